"""Artefacts on the daemon's disk, and arms that wait until every receiver holds theirs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.snapshot import CalibratedArtefact
from controld.planning.artefacts import ArtefactFolder, read_artefact
from controld.planning.plane import Place, artefact_resource_name, ready_profiles
from tests.planning.test_planner import profile

NAME = "0123456789abcdef"
PLACE = Place(model_fingerprint="m")
CALIBRATED = Configuration({"transform": "klt", "artefact": NAME, "code": "rans"})


def file_bytes(fingerprint: object = "m", payload: bytes = b"weights") -> bytes:
    header = json.dumps({"__metadata__": {"controld": json.dumps({"model_fingerprint": fingerprint})}}).encode()
    return len(header).to_bytes(8, "little") + header + payload


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    folder = ArtefactFolder(tmp_path / "later")
    assert folder.find([NAME], PLACE) == {}
    (tmp_path / "later").mkdir()
    path = tmp_path / "later" / f"{NAME}.safetensors"
    path.write_bytes(file_bytes())
    found = folder.find([NAME, "fedcba9876543210"], PLACE)
    assert list(found) == [NAME]
    assert found[NAME].content == file_bytes()
    assert folder.find([NAME], PLACE)[NAME] is found[NAME]
    path.write_bytes(file_bytes(payload=b"other weights"))
    assert folder.find([NAME], PLACE)[NAME].content == file_bytes(payload=b"other weights")
    path.unlink()
    assert folder.find([NAME], PLACE) == {}


def test_another_models_artefact_and_a_path_are_not_found(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.safetensors").write_bytes(file_bytes("another model"))
    (tmp_path / "inner").mkdir()
    folder = ArtefactFolder(tmp_path / "inner")
    assert ArtefactFolder(tmp_path).find([NAME], PLACE) == {}
    assert folder.find([f"../{NAME}"], Place(model_fingerprint="another model")) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 64, file_bytes()[:20], file_bytes(fingerprint=3), (2).to_bytes(8, "little") + b"{}"],
)
def test_a_file_that_is_no_artefact_is_left_out(tmp_path: Path, content: bytes, caplog) -> None:
    path = tmp_path / f"{NAME}.safetensors"
    path.write_bytes(content)
    folder = ArtefactFolder(tmp_path)
    for _ in range(3):
        assert folder.find([NAME], PLACE) == {}
    assert len(caplog.records) == 1
    path.write_bytes(file_bytes())
    assert list(folder.find([NAME], PLACE)) == [NAME]


@dataclass
class Agent:
    """As much of a session as the rule looks at."""

    role: str
    own: tuple[str, ...] = ()
    artefacts_held: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> Any:
        return SimpleNamespace(role=self.role, space_json=json.dumps({"choices": self.own}))


OURS = CalibratedArtefact(hashlib.sha256(b"x").hexdigest(), "m", b"x")
HELD = {artefact_resource_name(NAME): OURS.sha256}
STALE = {artefact_resource_name(NAME): "0" * 64}


@pytest.mark.parametrize(
    ("agents", "offered", "ready"),
    [
        ([], True, False),
        ([Agent("prefill")], True, False),
        ([Agent("prefill"), Agent("decode")], True, False),
        ([Agent("prefill"), Agent("decode", artefacts_held=HELD)], True, True),
        ([Agent("prefill"), Agent("decode", artefacts_held=STALE)], True, False),
        ([Agent("prefill"), Agent("decode", artefacts_held=HELD), Agent("decode")], True, False),
        ([Agent("prefill"), Agent("decode", own=(NAME,))], True, True),
        ([Agent("prefill"), Agent("decode", own=(NAME,))], False, False),
        ([Agent("prefill", own=(NAME,)), Agent("decode", own=(NAME,)), Agent("profiler")], False, True),
    ],
)
def test_an_arm_waits_until_every_receiver_holds_its_artefact(agents: list[Agent], offered: bool, ready: bool) -> None:
    plain, calibrated = profile(), replace(profile(), configuration=CALIBRATED, arm_id="")
    kept, waiting = ready_profiles([plain, calibrated], agents, {NAME: OURS} if offered else {})  # type: ignore[arg-type]
    assert kept == ([plain, calibrated] if ready else [plain])
    assert waiting == (set() if ready else {NAME})


def test_what_is_read_is_what_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes())
    assert read_artefact(path).sha256 == hashlib.sha256(file_bytes()).hexdigest()
