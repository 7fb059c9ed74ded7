"""The daemon as a process of the experiment, and what the experiment asks of its admin API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controld.contract.errors import ControldError

_START_S = 20.0
_STOP_S = 10.0


class DaemonError(ControldError):
    """The daemon did not do what the experiment needs."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("daemon", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Daemon:
    """`controld serve` in a folder of its own: configuration, policies, state, sockets and log below `root`.

    Args:
        root: created.
        policies: file name to text of the first policy set.
        artefacts: folder of calibrated artefacts, which the daemon hands to the servers.
    """

    def __init__(self, root: Path, policies: Mapping[str, str], artefacts: Path | None = None) -> None:
        self.root = root.resolve()
        self.policy_dir = self.root / "policies"
        self.fleet_address = f"unix://{self.root / 'fleet.sock'}"
        self.admin_socket = self.root / "admin.sock"
        self.log = self.root / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.policy_dir.mkdir(parents=True, exist_ok=True)
        self.write_policies(policies)
        self.config = self.root / "controld.yaml"
        self.config.write_text(
            _CONFIG.format(root=self.root, artefacts=(artefacts or self.root / "artefacts").resolve())
        )

    def write_policies(self, policies: Mapping[str, str]) -> None:
        """Replace the policy files; the daemon sees the change by itself, `reload` waits for it."""
        for file in self.policy_dir.glob("*.yaml"):
            if file.name not in policies:
                file.unlink()
        for name, text in policies.items():
            scratch = self.policy_dir / f".{name}.new"
            scratch.write_text(text)
            scratch.replace(self.policy_dir / name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start, and wait until it is ready. Raises: DaemonError with the end of its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "controld.cli.main", "serve", "--config", str(self.config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise DaemonError(f"the daemon ended at once: {self._tail()}", code="demo.daemon_ended")
            with contextlib.suppress(OSError, http.client.HTTPException, DaemonError):
                self.get("/readyz")
                return
            time.sleep(0.02)
        self.stop()
        raise DaemonError(f"the daemon was not ready in {_START_S} s: {self._tail()}", code="demo.daemon_late")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
        """One request to the admin API. Raises: DaemonError for a problem document."""
        connection = _UnixConnection(self.admin_socket, timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"} if payload else {})
            response = connection.getresponse()
            answer = json.loads(response.read() or b"null")
        finally:
            connection.close()
        if response.status >= 400:
            raise DaemonError(f"{method} {path} answered {response.status}: {answer}", code="demo.daemon_refused")
        return answer

    def text(self, path: str) -> str:
        """GET of something that is no JSON, such as `/metrics`."""
        connection = _UnixConnection(self.admin_socket, _START_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """GET."""
        return self.request("GET", path)

    def reload(self) -> Any:
        """Reload the policies now and wait. Raises: DaemonError when they are refused."""
        return self.request("POST", "/v1/reload")

    def attached_agents(self, roles: Sequence[str], deadline_s: float) -> list[dict[str, Any]]:
        """Wait until an agent of each role is attached and has applied a snapshot.

        Raises:
            DaemonError: it did not happen in time; names what the daemon sees.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            planes: list[dict[str, Any]] = self.get("/v1/dataplanes")["dataplanes"]
            good = [plane for plane in planes if plane["attached"] and plane["effective_version"]]
            if set(roles) <= {plane["role"] for plane in good}:
                return good
            if time.monotonic() > deadline:
                seen = [
                    {name: plane.get(name) for name in ("role", "attached", "attach_reason", "effective_version")}
                    for plane in planes
                ]
                raise DaemonError(f"no attached agent for each of {list(roles)}: {seen}", code="demo.not_attached")
            time.sleep(0.2)

    def wait_until_settled(self, roles: Sequence[str], quiet_s: float, deadline_s: float) -> None:
        """Wait until every agent of these roles uses what it should have, and has used nothing else for a while.

        Raises:
            DaemonError: it did not happen in time; names what the daemon sees.
        """
        deadline = time.monotonic() + deadline_s
        seen: tuple[tuple[str, int], ...] = ()
        since = time.monotonic()
        while True:
            listed: list[dict[str, Any]] = self.get("/v1/dataplanes")["dataplanes"]
            planes = [plane for plane in listed if plane["role"] in roles]
            versions = tuple((plane["agent_id"], plane["effective_version"]) for plane in planes)
            behind = [plane for plane in planes if plane["effective_version"] != plane["desired_version"]]
            if behind or versions != seen:
                seen, since = versions, time.monotonic()
            elif time.monotonic() - since >= quiet_s:
                return
            if time.monotonic() > deadline:
                raise DaemonError(f"agents do not settle: {versions}", code="demo.not_settled")
            time.sleep(0.2)


_CONFIG = """\
apiVersion: controld/v1
kind: Daemon
state: {{dir: {root}/state}}
artefacts: {{dir: {artefacts}}}
policy: {{dir: {root}/policies}}
fleet: {{listen: ["unix://{root}/fleet.sock"]}}
admin: {{socket: {root}/admin.sock}}
"""
