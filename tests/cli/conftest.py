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


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    file = tmp_path / "policies" / "chat.yaml"
    file.parent.mkdir()
    file.write_text(POLICY)
    return file


@pytest.fixture
def config_file(tmp_path: Path, policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "controld.yaml"
    file.write_text(
        "apiVersion: controld/v1\nkind: Daemon\nstate: {dir: state}\n"
        "fleet: {listen: ['unix:fleet.sock']}\nadmin: {socket: admin.sock}\n"
    )
    monkeypatch.setenv("CONTROLD_CONFIG", str(file))
    return file
