"""The pair behind its router, and the unsplit server it is compared with, as context managers."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from dataplanes.sglang.launcher.client import SglangClient
from dataplanes.sglang.launcher.process import ServerProcess, free_port, stop_all, wait_until_ready
from dataplanes.sglang.launcher.settings import (
    PairSettings,
    Role,
    ServerSettings,
    router_command,
    server_command,
    server_environment,
)

_ROUTER_HOST = "127.0.0.1"


class _Running:
    """Servers that start on entry and are all stopped on every way out."""

    def __init__(self, ready_deadline_s: float) -> None:
        self._ready_deadline_s = ready_deadline_s
        self.servers: list[ServerProcess] = []

    def __enter__(self) -> Self:
        try:
            self._start()
            wait_until_ready(self.servers, deadline_s=self._ready_deadline_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop everything that was started; harmless when repeated."""
        servers, self.servers = self.servers, []
        stop_all(servers)

    def check_running(self) -> None:
        """Raise LaunchError if one of the processes has ended."""
        for server in self.servers:
            server.check_running()

    def tree_rss_bytes(self) -> dict[str, int]:
        """Resident memory by server name."""
        return {server.name: server.tree_rss_bytes() for server in self.servers}


class SglangPair(_Running):
    """A prefill server, a decode server and a router, started at the same time.

    Attributes:
        prefill, decode, router: the processes; valid inside the context.
    """

    prefill: ServerProcess
    decode: ServerProcess
    router: ServerProcess

    def __init__(self, settings: PairSettings) -> None:
        super().__init__(settings.ready_deadline_s)
        self.settings = settings
        self.bootstrap_port = 0

    def _start(self) -> None:
        settings = self.settings
        # A port that is free here says little about a namespace, but nothing else listens in a fresh one.
        self.bootstrap_port = free_port()
        self.prefill = self._server(Role.PREFILL)
        self.decode = self._server(Role.DECODE)
        router_port = free_port()
        self.router = ServerProcess(
            name="router",
            command=router_command(
                settings.router,
                host=_ROUTER_HOST,
                port=router_port,
                prefill_url=self.prefill.url,
                bootstrap_port=self.bootstrap_port,
                decode_url=self.decode.url,
                metrics_port=free_port(),
            ),
            environment=server_environment(settings.server, host=_ROUTER_HOST, extra={}),
            log_dir=settings.log_dir,
            host=_ROUTER_HOST,
            port=router_port,
            health_path=settings.router.ready_path,
        )
        self.servers.append(self.router)

    def _server(self, role: Role) -> ServerProcess:
        settings = self.settings
        prefill = role is Role.PREFILL
        host = settings.prefill_host if prefill else settings.decode_host
        port = free_port()
        command = server_command(settings.server, role, host=host, port=port, bootstrap_port=self.bootstrap_port)
        process = ServerProcess(
            name=role.value,
            command=[*(settings.prefill_prefix if prefill else ()), *command],
            environment=server_environment(
                settings.server,
                host=host,
                extra=settings.prefill_environment if prefill else settings.decode_environment,
            ),
            log_dir=settings.log_dir,
            host=host,
            port=port,
        )
        self.servers.append(process)
        return process

    def client(self, timeout_s: float = 600.0) -> SglangClient:
        """A client of the router."""
        return SglangClient(self.router.host, self.router.port, timeout_s=timeout_s)


class UnsplitServer(_Running):
    """One ordinary SGLang server with the same settings, to compare the pair's answers with."""

    server: ServerProcess

    def __init__(self, settings: ServerSettings, *, log_dir: Path, ready_deadline_s: float = 420.0) -> None:
        super().__init__(ready_deadline_s)
        self.settings = settings
        self._log_dir = log_dir

    def _start(self) -> None:
        host, port = "127.0.0.1", free_port()
        self.server = ServerProcess(
            name="unsplit",
            command=server_command(self.settings, Role.UNSPLIT, host=host, port=port, bootstrap_port=0),
            environment=server_environment(self.settings, host=host, extra={}),
            log_dir=self._log_dir,
            host=host,
            port=port,
        )
        self.servers.append(self.server)

    def client(self, timeout_s: float = 600.0) -> SglangClient:
        """A client of the server."""
        return SglangClient(self.server.host, self.server.port, timeout_s=timeout_s)
