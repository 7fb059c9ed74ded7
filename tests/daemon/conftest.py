"""A settings file and a policy that are right, and a socket that listens as systemd does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controld.config import Config, load_config

POLICY = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: chat}
select: {kind: sglang, deployment: chat}
classes:
  - {name: default, workload: general, tiers: [pd], max_quality_loss_nats: 0.01}
"""

SETTINGS = """\
apiVersion: controld/v1
kind: Daemon
state: {dir: state}
policy: {dir: policies, poll_interval: 200ms, settle: 20ms}
fleet: {listen: ["unix:fleet.sock", "127.0.0.1:0"]}
admin: {socket: admin.sock}
stop_grace: 500ms
"""


class SystemdStandIn:
    """The receiving end of sd_notify: a datagram socket, one message a datagram."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def receive(self, timeout_s: float = 60.0) -> dict[str, str]:
        """The next datagram as fields."""
        self._socket.settimeout(timeout_s)
        lines = self._socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def drain(self) -> list[dict[str, str]]:
        """Everything that has arrived."""
        received = []
        while True:
            try:
                received.append(self.receive(0.01))
            except TimeoutError:
                return received

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[SystemdStandIn]:
    stand_in = SystemdStandIn(str(tmp_path / "notify.sock"))
    yield stand_in
    stand_in.close()


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    file = tmp_path / "policies" / "chat.yaml"
    file.parent.mkdir()
    file.write_text(POLICY)
    return file


@pytest.fixture
def config_file(tmp_path: Path, policy_file: Path) -> Path:
    file = tmp_path / "controld.yaml"
    file.write_text(SETTINGS)
    return file


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(config_file)


@pytest.fixture
def policy_with() -> Callable[[float], str]:
    """The text of the policy with another quality limit."""
    return lambda limit_nats: POLICY.replace("0.01", str(limit_nats))
