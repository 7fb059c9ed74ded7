"""The admin server: one aiohttp application on a unix socket and, where configured, a TCP address."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from controld.admin.backend import AdminBackend
from controld.admin.openapi import build_openapi
from controld.admin.operations import Operations
from controld.admin.problem import Handler, problem_middleware
from controld.admin.routes import ROUTES, Route
from controld.contract.errors import FieldError
from controld.obs.metrics import Metrics

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAddress:
    """Where to listen: a unix socket (mode 0600), or a host and port; port 0 takes a free one."""

    socket: Path | None = None
    host: str = ""
    port: int = 0


def _strict_query(route: Route, operations: Operations) -> Handler:
    allowed = {parameter.name for parameter in route.query}

    async def handler(request: web.Request) -> web.StreamResponse:
        for name in request.query:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                raise FieldError(name, "unknown query parameter", hint=f"known here: {known}")
        return await route.operation(operations, request)

    return handler


def build_application(backend: AdminBackend, metrics: Metrics) -> web.Application:
    """The application, without a listener."""
    operations = Operations(backend, metrics)
    document = build_openapi(ROUTES)

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response(document)

    application = web.Application(middlewares=[problem_middleware(metrics)], client_max_size=1 << 20)
    for route in ROUTES:
        application.router.add_route(route.method, route.path, _strict_query(route, operations))
    application.router.add_get("/v1/openapi.json", openapi)
    return application


class AdminServer:
    """Serves the admin API; a daemon component.

    Args:
        backend: what answers.
        metrics: where broken requests are counted.
        addresses: where to listen.
    """

    def __init__(self, backend: AdminBackend, metrics: Metrics, addresses: tuple[AdminAddress, ...]) -> None:
        self._application = build_application(backend, metrics)
        self._addresses = addresses
        self._runner: web.AppRunner | None = None
        self.bound: tuple[str, ...] = ()

    async def start(self) -> None:
        """Listen on every address. Raises: OSError when one is taken."""
        self._runner = web.AppRunner(self._application, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        bound = []
        for address in self._addresses:
            if address.socket is not None:
                address.socket.parent.mkdir(parents=True, exist_ok=True)
                address.socket.unlink(missing_ok=True)
                await web.UnixSite(self._runner, str(address.socket)).start()
                address.socket.chmod(0o600)
                bound.append(f"unix://{address.socket}")
            else:
                site = web.TCPSite(self._runner, address.host, address.port)
                await site.start()
                bound.append(site.name if address.port else f"http://{address.host}:{self._runner.addresses[-1][1]}")
        self.bound = tuple(bound)
        _log.info("admin API listens", extra={"addresses": ", ".join(bound)})

    async def stop(self) -> None:
        """Finish the requests in flight and close."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            for address in self._addresses:
                if address.socket is not None:
                    address.socket.unlink(missing_ok=True)
