"""One server process: started in a group of its own, watched by health, stopped with everything it started."""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from controld.contract.errors import ControldError

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 25
# A killed process gives back gigabytes before it is gone.
_KILL_WAIT_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


class LaunchError(ControldError):
    """A server did not come up, or is gone.

    Args:
        log_tail: the last lines of its log, also part of the message.
    """

    def __init__(self, message: str, *, code: str, log_tail: str = "", hint: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message, code=code, hint=hint)
        self.log_tail = log_tail


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    # Runs between fork and exec. The kernel then kills the server should this process die without cleaning up; SGLang
    # sets the same on its own workers.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """A running server, its log and its health address.

    Start it from a thread that lives as long as the server: the kernel ties the two together.

    Args:
        name: what errors and the log file are called.
        command: what to run.
        environment: its whole environment.
        log_dir: folder of the log file `NAME.log`.
        host, port: where it serves HTTP.
        health_path: answers 200 once it is ready.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_dir: Path,
        host: str,
        port: int,
        health_path: str = "/health",
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.log_file = log_dir / f"{name}.log"
        self._health_path = health_path
        log_dir.mkdir(parents=True, exist_ok=True)
        log: IO[bytes]
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.started_at_s = time.monotonic()
        self.ready_after_s: float | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Base address for HTTP."""
        return f"http://{self.host}:{self.port}"

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log."""
        text = self.log_file.read_text(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    def check_running(self) -> None:
        """Raise with the end of the log if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise LaunchError(
                f"{self.name} ended with status {status}; end of {self.log_file}:",
                code="launcher.server_died",
                log_tail=self.log_tail(),
            )

    def is_healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the health address answers 200 now."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self._health_path)
            healthy = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if healthy and self.ready_after_s is None:
            self.ready_after_s = time.monotonic() - self.started_at_s
        return healthy

    def tree_rss_bytes(self) -> int:
        """Resident memory of the process and everything it started (shared pages counted once a process)."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total = 0
        for pid in self._group_members():
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page_bytes
            except (FileNotFoundError, ProcessLookupError):
                continue
        return total

    def _group_members(self) -> list[int]:
        members = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # The command name may hold anything; the fields after its closing parenthesis are fixed.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, session = fields[0], int(fields[3])
            if session == self.pid and state != "Z":
                members.append(int(entry.name))
        return members

    def stop(self, grace_s: float = 3.0) -> None:
        """End the process and everything in its session: SIGTERM, then SIGKILL after `grace_s`."""
        self._signal_all(signal.SIGTERM)
        self._wait_for_group(grace_s)
        self._signal_all(signal.SIGKILL)
        self._process.wait()
        self._wait_for_group(_KILL_WAIT_S)

    def _wait_for_group(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._group_members() and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.05)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._group_members():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def wait_until_ready(servers: Sequence[ServerProcess], *, deadline_s: float) -> None:
    """Return when all of `servers` are healthy.

    Raises:
        LaunchError: one of them ended, or the time was up; with the end of its log.
    """
    limit = time.monotonic() + deadline_s
    waiting = list(servers)
    while waiting:
        for server in servers:
            server.check_running()
        waiting = [server for server in waiting if not server.is_healthy()]
        if not waiting:
            return
        if time.monotonic() > limit:
            late = waiting[0]
            raise LaunchError(
                f"{late.name} was not ready within {deadline_s:.0f} s; end of {late.log_file}:",
                code="launcher.not_ready",
                log_tail=late.log_tail(),
                hint="a loaded machine needs a longer ready deadline",
            )
        time.sleep(0.25)


def stop_all(servers: Sequence[ServerProcess], *, grace_s: float = 3.0) -> None:
    """Stop `servers` together: all are asked first, so that the grace times overlap."""
    for server in servers:
        server._signal_all(signal.SIGTERM)
    for server in servers:
        server.stop(grace_s)
