"""Errors on the wire as `application/problem+json` (RFC 9457) with stable codes."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from controld.contract.errors import ControldError, FieldError
from controld.obs.metrics import Metrics
from controld.policy.problem import SettingsErrors
from controld.profiling.errors import StudyNotFoundError

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotFoundError(ControldError):
    """The named thing does not exist (any more)."""

    def __init__(self, message: str, *, hint: str = "", gone: bool = False) -> None:
        super().__init__(message, code="resource.gone" if gone else "resource.not_found", hint=hint)
        self.gone = gone


class UnavailableError(ControldError):
    """The request is right, but what it needs is not there now."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, code="resource.unavailable", hint=hint)


def problem_response(status: int, *, code: str, title: str, hint: str = "", **members: Any) -> web.Response:
    """A problem document."""
    body = {"type": f"urn:controld:problem:{code}", "title": title, "status": status, "code": code, **members}
    if hint:
        body["hint"] = hint
    return web.Response(status=status, text=json.dumps(body), content_type="application/problem+json")


def _status_of(error: ControldError) -> int:
    if isinstance(error, NotFoundError):
        return 410 if error.gone else 404
    if isinstance(error, StudyNotFoundError):
        return 404
    if isinstance(error, FieldError):
        return 400
    if isinstance(error, UnavailableError):
        return 503
    return 422


def problem_middleware(metrics: Metrics) -> Any:
    """Turn errors into problems; what nobody expected is logged whole, counted and answered 500."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ControldError as error:
            problems = [one.to_json() for one in error.problems] if isinstance(error, SettingsErrors) else []
            members = {"problems": problems} if problems else {}
            return problem_response(_status_of(error), code=error.code, title=error.message, hint=error.hint, **members)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            code = {404: "route.unknown", 405: "route.method"}.get(error.status, f"http.{error.status}")
            return problem_response(error.status, code=code, title=error.reason, hint="see /v1/openapi.json")
        except Exception:  # noqa: BLE001 - the edge of the process: one broken request must not end the daemon
            _log.exception("admin request failed", extra={"path": request.path})
            metrics.internal_errors.labels("admin").inc()
            return problem_response(
                500, code="internal", title="internal error", hint="the daemon's log has the details"
            )

    return middleware
