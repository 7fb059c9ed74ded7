"""A directory with a settings file and a policy."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from controld.cli.main import main

POLICY = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: chat}
select: {kind: sglang, deployment: chat}
classes:
  - {name: default, workload: general, tiers: [pd], max_quality_loss_nats: 0.01}
"""


# A daemon's imports are most of what it costs to start one; a parent of them all has done those once. The tests of
# tests/daemon start it from nothing, as a shell does.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["controld.cli.main", "controld.composition", "controld.daemon", "uvloop"])


class Serving:
    """`controld serve` as a process of its own."""

    def __init__(self, config_file: Path) -> None:
        self._config_file = config_file
        self._process: BaseProcess | None = None

    def start(self) -> None:
        serve = ["serve", "--config", str(self._config_file)]
        self._process = PROCESSES.Process(target=main, args=(serve,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join(60)

    def stop(self) -> None:
        """Raises: AssertionError when it did not end well on SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(60)
        status = self._process.exitcode
        self.kill()
        assert status == 0


@pytest.fixture(scope="session")
def serving_of() -> type[Serving]:
    return Serving


def write_policy(folder: Path) -> Path:
    file = folder / "policies" / "chat.yaml"
    file.parent.mkdir()
    file.write_text(POLICY)
    return file


def write_config(folder: Path) -> Path:
    file = folder / "controld.yaml"
    file.write_text(
        "apiVersion: controld/v1\nkind: Daemon\nstate: {dir: state}\n"
        "fleet: {listen: ['unix:fleet.sock']}\nadmin: {socket: admin.sock}\n"
    )
    return file


@pytest.fixture(scope="module")
def module_config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of a daemon that the tests of a module share; `CONTROLD_CONFIG` does not name it."""
    folder = tmp_path_factory.mktemp("shared")
    write_policy(folder)
    return write_config(folder)


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return write_policy(tmp_path)


@pytest.fixture
def config_file(tmp_path: Path, policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = write_config(tmp_path)
    monkeypatch.setenv("CONTROLD_CONFIG", str(file))
    return file
