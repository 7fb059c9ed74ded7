"""The routes as data: aiohttp serves them, OpenAPI describes them, one list for both."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from controld.admin.backend import (
    AdminBackend,
    CandidateImport,
    DecisionFilter,
    HypotheticalContext,
    ImportFormat,
    PolicyEdit,
)
from controld.admin.event_stream import stream_events
from controld.admin.request_body import read_object, read_text
from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import FieldError
from controld.contract.quantity import parse_rate_bytes_per_s, parse_size_bytes
from controld.obs.metrics import CONTENT_TYPE, Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_LISTED = 1000
MAX_CANDIDATES = 1_000_000
MAX_COMPARED = 16
MAX_IMPORT_BYTES = 64 * 2**20
MAX_STUDY_BYTES = 2**20
_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """One query parameter; a request with any other is refused."""

    name: str
    description: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation."""

    method: str
    path: str
    handler: Handler
    summary: str
    query: tuple[QueryParameter, ...] = ()
    body: str = ""
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)


def _json(data: Any, status: int = 200) -> web.Response:
    return web.json_response(data, status=status, dumps=lambda value: json.dumps(value, allow_nan=False))


def _query(request: web.Request, name: str) -> str | None:
    """A query parameter, None where it is not given. Raises: FieldError: it is given more than once."""
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise FieldError(name, f"is given {len(values)} times", hint="once")
    return values[0] if values else None


def _integer(request: web.Request, name: str, default: int, *, low: int, high: int) -> int:
    text = _query(request, name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or not low <= int(text) <= high:
        raise FieldError(name, f'"{text}" is not a whole number from {low} to {high}')
    return int(text)


def _number(request: web.Request, name: str, default: float) -> float:
    text = _query(request, name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise FieldError(name, f'"{text}" is not a finite non-negative number')
    return value


def _needed(request: web.Request, name: str, *, example: str) -> str:
    text = _query(request, name)
    if text is None:
        raise FieldError(name, "is missing", hint=f"for example {example}")
    return text


def _hypothetical(request: web.Request) -> HypotheticalContext:
    example = "?class=chat&bytes=20MB&bandwidth=200Mbit"
    service_class, tier = _query(request, "class"), _query(request, "tier")
    return HypotheticalContext(
        service_class=DEFAULT_CLASS if service_class is None else service_class,
        tier="pd" if tier is None else tier,
        size_bytes=parse_size_bytes(_needed(request, "bytes", example=example), field="bytes"),
        bandwidth_bytes_per_s=parse_rate_bytes_per_s(_needed(request, "bandwidth", example=example), field="bandwidth"),
        load=_number(request, "load", 0.0),
        deployment=_query(request, "deployment"),
    )


def _import(request: web.Request) -> CandidateImport:
    text = _query(request, "format")
    if text is None:
        text = ImportFormat.CONTROLD.value
    if text not in list(ImportFormat):
        raise FieldError("format", f'"{text}" is none of {", ".join(ImportFormat)}')
    wanted = CandidateImport(
        format=ImportFormat(text), model=_query(request, "model"), workload=_query(request, "workload")
    )
    for name in ("model", "workload"):
        value = getattr(wanted, name)
        if value is not None and wanted.format is ImportFormat.CONTROLD:
            raise FieldError(name, "is for format=kvserve only: our own documents say it with each profile")
        if value is not None and not (value and value.isprintable()):
            raise FieldError(name, f"{value!r} is not a name")
    return wanted


async def _policy_edit(request: web.Request) -> PolicyEdit:
    body = await read_object(request, max_bytes=MAX_IMPORT_BYTES)
    if body.keys() - {"files", "whole"}:
        raise FieldError("body", "must be {files: [{file, content}], whole: true or false}")
    files, whole = body.get("files"), body.get("whole", True)
    if not isinstance(files, list) or not 1 <= len(files) <= MAX_LISTED:
        raise FieldError("files", f"must be a list of 1 to {MAX_LISTED} files")
    if not isinstance(whole, bool):
        raise FieldError("whole", "must be true or false")
    named: dict[str, bytes] = {}
    for index, item in enumerate(files):
        if not isinstance(item, dict) or item.keys() != {"file", "content"}:
            raise FieldError(f"files[{index}]", "must be {file, content}")
        if not all(isinstance(value, str) for value in item.values()):
            raise FieldError(f"files[{index}]", "file and content must be texts")
        if item["file"] in named:
            raise FieldError(f"files[{index}].file", f"{item['file']} comes twice")
        # Bytes that are no text come as lone surrogates, so that the parser says where they stand.
        try:
            named[item["file"]] = item["content"].encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise FieldError(f"files[{index}].content", f"not Unicode: {error}") from error
    return PolicyEdit(files=tuple(named.items()), whole=whole)


def build_routes(backend: AdminBackend, metrics: Metrics) -> tuple[Route, ...]:
    """All operations but the OpenAPI document itself."""

    async def healthz(_: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def readyz(_: web.Request) -> web.Response:
        ready, reason = backend.ready()
        return _json({"status": "ready" if ready else "not_ready", "reason": reason}, 200 if ready else 503)

    async def metrics_text(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def status(_: web.Request) -> web.Response:
        return _json(await backend.status())

    async def dataplanes(_: web.Request) -> web.Response:
        return _json({"dataplanes": await backend.dataplanes()})

    async def spaces(_: web.Request) -> web.Response:
        return _json({"spaces": await backend.spaces()})

    async def candidates(request: web.Request) -> web.Response:
        workload = _query(request, "workload")
        offset = _integer(request, "offset", 0, low=0, high=MAX_CANDIDATES)
        limit = _integer(request, "limit", MAX_CANDIDATES, low=1, high=MAX_CANDIDATES)
        found = await backend.candidates(workload)
        page = {
            "candidates": found[offset : offset + limit],
            "total": len(found),
            "problems": await backend.candidate_problems(workload),
        }
        # Thousands of profiles take seconds to write, and agents must not wait for that.
        return await asyncio.to_thread(_json, page)

    async def export_candidates(_: web.Request) -> web.Response:
        return await asyncio.to_thread(_json, await backend.export_candidates())

    async def import_candidates(request: web.Request) -> web.Response:
        text = await read_text(request, max_bytes=MAX_IMPORT_BYTES)
        return _json(await backend.import_candidates(text, _import(request)))

    async def decisions(request: web.Request) -> web.Response:
        wanted = DecisionFilter(
            limit=_integer(request, "limit", 50, low=1, high=MAX_LISTED),
            service_class=_query(request, "class"),
            arm_id=_query(request, "arm"),
        )
        return _json(await backend.decisions(wanted))

    async def explain(request: web.Request) -> web.Response:
        return _json(await backend.explain(request.match_info["id"]))

    async def hypothetical(request: web.Request) -> web.Response:
        return _json(await backend.explain_hypothetical(_hypothetical(request)))

    async def posteriors(_: web.Request) -> web.Response:
        return _json({"posteriors": await backend.posteriors()})

    async def pins(_: web.Request) -> web.Response:
        return _json({"pins": await backend.pins()})

    async def release(request: web.Request) -> web.Response:
        return _json(await backend.release(request.match_info["arm"], _query(request, "deployment")))

    async def policies(_: web.Request) -> web.Response:
        return _json(await backend.policies())

    async def compare_policies(request: web.Request) -> web.Response:
        return _json(await backend.compare_policies(await _policy_edit(request)))

    async def reload(_: web.Request) -> web.Response:
        accepted, outcome = await backend.reload()
        return _json(outcome, 200 if accepted else 422)

    async def start_study(request: web.Request) -> web.Response:
        return _json(await backend.start_study(await read_object(request, max_bytes=MAX_STUDY_BYTES)), 201)

    async def studies(_: web.Request) -> web.Response:
        return _json({"studies": await backend.studies()})

    async def study(request: web.Request) -> web.Response:
        return _json(await backend.study(request.match_info["id"]))

    async def cancel_study(request: web.Request) -> web.Response:
        return _json(await backend.cancel_study(request.match_info["id"]))

    async def pause_study(request: web.Request) -> web.Response:
        return _json(await backend.pause_study(request.match_info["id"]))

    async def resume_study(request: web.Request) -> web.Response:
        return _json(await backend.resume_study(request.match_info["id"]))

    async def compare_studies(request: web.Request) -> web.Response:
        identities = [part for part in (_query(request, "ids") or "").split(",") if part]
        if not 1 <= len(identities) <= MAX_COMPARED:
            raise FieldError("ids", f"must be 1 to {MAX_COMPARED} studies", hint="as ?ids=A,B")
        return _json({"studies": await backend.compare_studies(identities)})

    async def study_events(request: web.Request) -> web.StreamResponse:
        return await stream_events(request, backend.study_events(request.match_info["id"]))

    def get(path: str, handler: Handler, summary: str, **rest: Any) -> Route:
        return Route(method="GET", path=path, handler=handler, summary=summary, **rest)

    parameter = QueryParameter
    return (
        get("/healthz", healthz, "Whether the process lives"),
        get("/readyz", readyz, "Whether it serves agents under a valid policy", statuses=(200, 503)),
        get("/metrics", metrics_text, "Prometheus metrics", media_type="text/plain"),
        get("/v1/status", status, "Policy generation, agents, links, counts of decisions"),
        get("/v1/dataplanes", dataplanes, "Connected agents with desired, acked, effective and last failed version"),
        get("/v1/spaces", spaces, "The strategy spaces that connected agents advertise, with their sizes"),
        get(
            "/v1/candidates", candidates, "Profiles with their objectives and whether each is on the Pareto front",
            query=(
                parameter(name="workload", description="only this workload"),
                parameter(name="offset", description="from this one on (0)"),
                parameter(name="limit", description="at most so many (all); `total` says how many there are"),
            ),
        ),
        get("/v1/candidates/export", export_candidates, "Every profile as one document, to import elsewhere"),
        Route(
            method="POST", path="/v1/candidates/import", handler=import_candidates, statuses=(200, 400, 503),
            body="what the export gave, or a KVServe profile library",
            summary="Store the profiles of a document, all or nothing; a newer one here stays",
            query=(
                parameter(name="format", description="controld (unless given) or kvserve"),
                parameter(name="model", description="kvserve: fingerprint of the model, found by name unless given"),
                parameter(name="workload", description="kvserve: whose profiles they become, its dataset unless given"),
            ),
        ),
        get(
            "/v1/decisions", decisions, "Effects, newest first, and counts by arm, path and reason",
            query=(
                parameter(name="limit", description=f"1 to {MAX_LISTED}, 50 unless given"),
                parameter(name="class", description="only this service class"),
                parameter(name="arm", description="only this arm"),
            ),
        ),
        get("/v1/decisions/{id}/explain", explain, "Why a transfer was sent as it was", statuses=(200, 404, 410)),
        get(
            "/v1/explain", hypothetical, "What would be decided in a context",
            query=(
                parameter(name="class", description="service class, `default` unless given"),
                parameter(name="tier", description="pd, prefix_store or video; pd unless given"),
                parameter(name="bytes", description="size of the transfer, as 20MB", required=True),
                parameter(name="bandwidth", description="of the link, as 200Mbit", required=True),
                parameter(name="load", description="raw bytes per second offered over bandwidth, 0 unless given"),
                parameter(name="deployment", description="which plane; the only one unless given"),
            ),
        ),
        get("/v1/posteriors", posteriors, "What was learned of each arm and stage"),
        get("/v1/pins", pins, "Arms out of use: for which class, since when, and why"),
        Route(
            method="POST", path="/v1/pins/{arm}/release", handler=release, statuses=(200, 404),
            summary="Use an arm again that was taken out of use; its evidence starts anew",
            query=(parameter(name="deployment", description="of which planes; everywhere unless given"),),
        ),
        get("/v1/policies", policies, "The policy set in force, and the last refused one with its problems"),
        Route(
            method="POST", path="/v1/policies/diff", handler=compare_policies, statuses=(200, 400, 422),
            body="files: [{file, content}]; whole: whether they are all policies there would be (true unless given)",
            summary="What an edit would change in settings and decisions; nothing is applied; 422 names the problems",
        ),
        Route(
            method="POST", path="/v1/reload", handler=reload, statuses=(200, 422),
            summary="Read the policies again; 422 names the problems and the last good set stays in force",
        ),
        Route(
            method="POST", path="/v1/studies", handler=start_study, statuses=(201, 400, 422), body="specification",
            summary="Start a profiling study",
        ),
        get("/v1/studies", studies, "All studies"),
        get(
            "/v1/studies/compare", compare_studies, "The hypervolume by trial of some studies",
            statuses=(200, 400, 404),
            query=(parameter(name="ids", description="study ids with commas between", required=True),),
        ),
        get("/v1/studies/{id}", study, "One study with its trials", statuses=(200, 404)),
        get(
            "/v1/studies/{id}/events", study_events, "States of a study as server-sent events, until it ends",
            media_type="text/event-stream", statuses=(200, 404),
        ),
        Route(
            method="POST", path="/v1/studies/{id}/pause", handler=pause_study, statuses=(200, 404, 422),
            summary="Begin no new trials; those that run are still taken",
        ),
        Route(
            method="POST", path="/v1/studies/{id}/resume", handler=resume_study, statuses=(200, 404, 422),
            summary="Go on with a paused study",
        ),
        Route(
            method="DELETE", path="/v1/studies/{id}", handler=cancel_study, statuses=(200, 404),
            summary="Cancel a study; what it measured stays",
        ),
    )  # fmt: skip
