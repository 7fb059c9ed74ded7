"""A directory with a settings file and a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

POLICY = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: chat}
select: {kind: sglang, deployment: chat}
classes:
  - {name: default, workload: general, tiers: [pd], max_quality_loss_nats: 0.01}
"""


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
