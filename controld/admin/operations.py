"""What each route does: takes its arguments from the request, asks the backend, answers in JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from controld.admin.arguments import (
    MAX_IMPORT_BYTES,
    MAX_LISTED,
    candidate_import,
    hypothetical_context,
    policy_edit,
    profile_filter,
    query_choice,
    query_flag,
    query_integer,
    query_text,
)
from controld.admin.backend import AdminBackend, DecisionFilter
from controld.admin.event_stream import stream_events
from controld.admin.request_body import read_object, read_text
from controld.candidates.stored import ProfileKind
from controld.contract.errors import FieldError
from controld.obs.metrics import CONTENT_TYPE, Metrics

MAX_CANDIDATES = 1_000_000
MAX_COMPARED = 16
MAX_STUDY_BYTES = 2**20


def _json(data: Any, status: int = 200) -> web.Response:
    return web.json_response(data, status=status, dumps=lambda value: json.dumps(value, allow_nan=False))


class Operations:
    """One method for each route; `routes.ROUTES` says what each is for.

    Args:
        backend: what answers; `daemon_backend` says which module each part is in.
        metrics: what is exposed.
    """

    def __init__(self, backend: AdminBackend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def healthz(self, _: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def readyz(self, _: web.Request) -> web.Response:
        ready, reason = self._backend.status.ready()
        return _json({"status": "ready" if ready else "not_ready", "reason": reason}, 200 if ready else 503)

    async def metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def status(self, _: web.Request) -> web.Response:
        return _json(await self._backend.status.page())

    async def dataplanes(self, _: web.Request) -> web.Response:
        return _json({"dataplanes": await self._backend.agents.dataplanes()})

    async def spaces(self, _: web.Request) -> web.Response:
        return _json({"spaces": await self._backend.agents.spaces()})

    async def candidates(self, request: web.Request) -> web.Response:
        wanted = profile_filter(request)
        offset = query_integer(request, "offset", 0, low=0, high=MAX_CANDIDATES)
        limit = query_integer(request, "limit", MAX_CANDIDATES, low=1, high=MAX_CANDIDATES)
        found = await self._backend.candidates.listing(wanted)
        page: dict[str, Any] = {}
        # A list for each kind: their entries have other fields, and who reads one must not stumble over the other.
        for kind, name, entries in ((ProfileKind.KV, "", found.kv), (ProfileKind.VIDEO, "video_", found.video)):
            if wanted.kind in (None, kind):
                page[f"{name}candidates"] = entries[offset : offset + limit]
                page[f"{name}total"] = len(entries)
        page["problems"] = found.problems
        # Thousands of profiles take seconds to write, and agents must not wait for that.
        return await asyncio.to_thread(_json, page)

    async def export_candidates(self, request: web.Request) -> web.Response:
        kind = query_choice(request, "kind", ProfileKind) or ProfileKind.KV
        return await asyncio.to_thread(_json, await self._backend.candidates.export(kind))

    async def import_candidates(self, request: web.Request) -> web.Response:
        text = await read_text(request, max_bytes=MAX_IMPORT_BYTES)
        return _json(await self._backend.candidates.take(text, candidate_import(request)))

    async def delete_candidates(self, request: web.Request) -> web.Response:
        wanted, dry_run = profile_filter(request), query_flag(request, "dry_run")
        return await asyncio.to_thread(_json, await self._backend.candidates.delete(wanted, dry_run=dry_run))

    async def decisions(self, request: web.Request) -> web.Response:
        wanted = DecisionFilter(
            limit=query_integer(request, "limit", 50, low=1, high=MAX_LISTED),
            service_class=query_text(request, "class"),
            arm_id=query_text(request, "arm"),
        )
        return _json(await self._backend.decisions.listing(wanted))

    async def explain(self, request: web.Request) -> web.Response:
        return _json(await self._backend.decisions.explain(request.match_info["id"]))

    async def hypothetical(self, request: web.Request) -> web.Response:
        return _json(await self._backend.decisions.explain_hypothetical(hypothetical_context(request)))

    async def engines(self, _: web.Request) -> web.Response:
        return _json({"engines": await self._backend.engines.listing()})

    async def explain_engine(self, request: web.Request) -> web.Response:
        return _json(await self._backend.engines.explain(request.match_info["id"]))

    async def posteriors(self, _: web.Request) -> web.Response:
        return _json({"posteriors": await self._backend.learned.posteriors()})

    async def pins(self, _: web.Request) -> web.Response:
        return _json({"pins": await self._backend.learned.pins()})

    async def release(self, request: web.Request) -> web.Response:
        return _json(await self._backend.learned.release(request.match_info["arm"], query_text(request, "deployment")))

    async def policies(self, _: web.Request) -> web.Response:
        return _json(await self._backend.policies.in_force())

    async def compare_policies(self, request: web.Request) -> web.Response:
        return _json(await self._backend.policies.compare(await policy_edit(request)))

    async def reload(self, _: web.Request) -> web.Response:
        accepted, outcome = await self._backend.policies.reload()
        return _json(outcome, 200 if accepted else 422)

    async def start_study(self, request: web.Request) -> web.Response:
        return _json(await self._backend.studies.begin(await read_object(request, max_bytes=MAX_STUDY_BYTES)), 201)

    async def studies(self, _: web.Request) -> web.Response:
        return _json({"studies": await self._backend.studies.list()})

    async def study(self, request: web.Request) -> web.Response:
        return _json(await self._backend.studies.get(request.match_info["id"]))

    async def cancel_study(self, request: web.Request) -> web.Response:
        return _json(await self._backend.studies.cancel(request.match_info["id"]))

    async def pause_study(self, request: web.Request) -> web.Response:
        return _json(await self._backend.studies.pause(request.match_info["id"]))

    async def resume_study(self, request: web.Request) -> web.Response:
        return _json(await self._backend.studies.resume(request.match_info["id"]))

    async def compare_studies(self, request: web.Request) -> web.Response:
        identities = [part for part in (query_text(request, "ids") or "").split(",") if part]
        if not 1 <= len(identities) <= MAX_COMPARED:
            raise FieldError("ids", f"must be 1 to {MAX_COMPARED} studies", hint="as ?ids=A,B")
        return _json({"studies": await self._backend.studies.compare(identities)})

    async def study_events(self, request: web.Request) -> web.StreamResponse:
        return await stream_events(request, self._backend.studies.events(request.match_info["id"]))
