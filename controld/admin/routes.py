"""The routes as data: aiohttp serves them, OpenAPI describes them, one table for both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from controld.admin.arguments import MAX_LISTED
from controld.admin.operations import Operations
from controld.candidates.stored import LEAST_FINGERPRINT

Operation = Callable[[Operations, web.Request], Awaitable[web.StreamResponse]]


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
    operation: Operation
    summary: str
    query: tuple[QueryParameter, ...] = ()
    body: str = ""
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)


def _get(path: str, operation: Operation, summary: str, **rest: Any) -> Route:
    return Route(method="GET", path=path, operation=operation, summary=summary, **rest)


def _optional(name: str, description: str) -> QueryParameter:
    return QueryParameter(name=name, description=description)


def _required(name: str, description: str) -> QueryParameter:
    return QueryParameter(name=name, description=description, required=True)


_PROFILE_FILTER: Final = (
    _optional("kind", "kv or video; both unless given"),
    _optional("workload", "only this workload"),
    _optional("model", f"only of this fingerprint, or of that which begins like this ({LEAST_FINGERPRINT} characters)"),
    _optional("hardware", "only what was measured on it, on either side"),
    _optional("config_id", "only this configuration"),
)

# The OpenAPI document itself comes on top of them.
ROUTES: Final = (
    _get("/healthz", Operations.healthz, "Whether the process lives"),
    _get("/readyz", Operations.readyz, "Whether it serves agents under a valid policy", statuses=(200, 503)),
    _get("/metrics", Operations.metrics_text, "Prometheus metrics", media_type="text/plain"),
    _get("/v1/status", Operations.status, "Policy generation, agents, links, counts of decisions"),
    _get(
        "/v1/dataplanes", Operations.dataplanes,
        "Connected agents with desired, acked, effective and last failed version",
    ),
    _get("/v1/spaces", Operations.spaces, "The strategy spaces that connected agents advertise, with their sizes"),
    _get(
        "/v1/candidates", Operations.candidates,
        "Profiles with their objectives and whether each is on the Pareto front: KV in `candidates`, video in"
        " `video_candidates`",
        query=(
            *_PROFILE_FILTER,
            _optional("offset", "from this one on (0), of each kind"),
            _optional("limit", "at most so many (all) of each kind; `total` and `video_total` say how many there are"),
        ),
    ),
    Route(
        method="DELETE", path="/v1/candidates", operation=Operations.delete_candidates, statuses=(200, 400, 404),
        summary="Forget the profiles that all given parameters match (at least one) and plan without them",
        query=(*_PROFILE_FILTER, _optional("dry_run", "true: only say which they are")),
    ),
    _get(
        "/v1/candidates/export", Operations.export_candidates,
        "Every profile of a kind as one document, to import elsewhere",
        query=(_optional("kind", "kv (unless given) or video"),),
    ),
    Route(
        method="POST", path="/v1/candidates/import", operation=Operations.import_candidates, statuses=(200, 400, 503),
        body="what the export gave, or a KVServe profile library",
        summary="Store the profiles of a document, all or nothing; a newer one here stays",
        query=(
            _optional("format", "controld (unless given) or kvserve"),
            _optional("model", "kvserve: fingerprint of the model, found by name unless given"),
            _optional("workload", "kvserve: whose profiles they become, its dataset unless given"),
        ),
    ),
    _get(
        "/v1/decisions", Operations.decisions, "Effects, newest first, and counts by arm, path and reason",
        query=(
            _optional("limit", f"1 to {MAX_LISTED}, 50 unless given"),
            _optional("class", "only this service class"),
            _optional("arm", "only this arm"),
        ),
    ),
    _get(
        "/v1/decisions/{id}/explain", Operations.explain, "Why a transfer was sent as it was", statuses=(200, 404, 410),
    ),
    _get(
        "/v1/explain", Operations.hypothetical, "What would be decided in a context",
        query=(
            _optional("class", "service class, `default` unless given"),
            _optional("tier", "pd, prefix_store or video; pd unless given"),
            _required("bytes", "size of the transfer, as 20MB"),
            _required("bandwidth", "of the link, as 200Mbit"),
            _optional("load", "raw bytes per second offered over bandwidth, 0 unless given"),
            _optional("deployment", "which plane; the only one unless given"),
        ),
    ),
    _get(
        "/v1/engines", Operations.engines,
        "Video engines: what they serve, their setting, and whether it meets the targets",
    ),
    _get(
        "/v1/engines/{id}/explain", Operations.explain_engine, "Why a video engine runs under its setting",
        statuses=(200, 404),
    ),
    _get("/v1/posteriors", Operations.posteriors, "What was learned of each arm and stage"),
    _get("/v1/pins", Operations.pins, "Arms out of use: for which class, since when, and why"),
    Route(
        method="POST", path="/v1/pins/{arm}/release", operation=Operations.release, statuses=(200, 404),
        summary="Use an arm again that was taken out of use; its evidence starts anew",
        query=(_optional("deployment", "of which planes; everywhere unless given"),),
    ),
    _get("/v1/policies", Operations.policies, "The policy set in force, and the last refused one with its problems"),
    Route(
        method="POST", path="/v1/policies/diff", operation=Operations.compare_policies, statuses=(200, 400, 422),
        body="files: [{file, content}]; whole: whether they are all policies there would be (true unless given)",
        summary="What an edit would change in settings and decisions; nothing is applied; 422 names the problems",
    ),
    Route(
        method="POST", path="/v1/reload", operation=Operations.reload, statuses=(200, 422),
        summary="Read the policies again; 422 names the problems and the last good set stays in force",
    ),
    Route(
        method="POST", path="/v1/studies", operation=Operations.start_study, statuses=(201, 400, 422),
        body="specification", summary="Start a profiling study",
    ),
    _get("/v1/studies", Operations.studies, "All studies"),
    _get(
        "/v1/studies/compare", Operations.compare_studies, "The hypervolume by trial of some studies",
        statuses=(200, 400, 404),
        query=(_required("ids", "study ids with commas between"),),
    ),
    _get("/v1/studies/{id}", Operations.study, "One study with its trials", statuses=(200, 404)),
    _get(
        "/v1/studies/{id}/events", Operations.study_events, "States of a study as server-sent events, until it ends",
        media_type="text/event-stream", statuses=(200, 404),
    ),
    Route(
        method="POST", path="/v1/studies/{id}/pause", operation=Operations.pause_study, statuses=(200, 404, 422),
        summary="Begin no new trials; those that run are still taken",
    ),
    Route(
        method="POST", path="/v1/studies/{id}/resume", operation=Operations.resume_study, statuses=(200, 404, 422),
        summary="Go on with a paused study",
    ),
    Route(
        method="DELETE", path="/v1/studies/{id}", operation=Operations.cancel_study, statuses=(200, 404),
        summary="Cancel a study; what it measured stays",
    ),
)  # fmt: skip
