"""Documents of video profiles: read strictly, and taken by the daemon's import."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controld.admin.backend import CandidateImport
from controld.admin.candidate_exchange import CandidateExchange
from controld.candidates.stored import ProfileFilter
from controld.candidates.video_exchange import FORMAT, VERSION, read_video_profiles
from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.clock import SystemClock
from controld.contract.errors import FieldError
from controld.store.sqlite import SqliteStore
from dataplanes.longlive.reference.setting import FULL

PROFILE = VideoProfile(
    configuration=FULL,
    source=Source.MEASURED,
    forward_s=0.1,
    vae_s=0.2,
    frames_per_chunk=12,
    workload="shapes",
    model_fingerprint="f" * 64,
    hardware="cpu/2/1",
    loss_mean=0.0,
    loss_samples=8,
    memory=VideoMemory(weights_bytes=100, kv_bytes=40, activation_bytes=50, session_bytes=7),
    measured_unix_s=1.0,
)


def document(*profiles: VideoProfile) -> str:
    entries = [json.loads(profile.to_json()) for profile in profiles]
    return json.dumps({"format": FORMAT, "version": VERSION, "profiles": entries})


def test_a_profile_survives_its_document() -> None:
    assert read_video_profiles(document(PROFILE)) == [PROFILE]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d["profiles"].append(d["profiles"][0]), "profiles[1]"),
        (lambda d: d["profiles"][0].update(forward_s=-1), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(measured_unix_s=1e11), "profiles[0].measured_unix_s"),
        (lambda d: d["profiles"].append(3), "profiles[1]"),
        (lambda d: d["profiles"][0].update(forward_s=0), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(forward_s=None), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(vae_s=True), "profiles[0].vae_s"),
        (lambda d: d["profiles"][0].update(loss_samples=8.5), "profiles[0].loss_samples"),
        (lambda d: d["profiles"][0].update(frames_per_chunk=2.5), "profiles[0].frames_per_chunk"),
        (lambda d: d["profiles"][0].update(loss_se=None), "profiles[0].loss_se"),
        (lambda d: d["profiles"][0].update(measured_unix_s=None), "profiles[0].measured_unix_s"),
        (lambda d: d["profiles"][0].update(hardware="\udc00"), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(hardware="\x1b[2J"), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(hardware="x" * 2000), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(workload=""), "profiles[0].workload"),
        (lambda d: d["profiles"][0].update(source="published"), "profiles[0].source"),
        (
            lambda d: d["profiles"][0]["configuration"].update(steps=10**400),
            "profiles[0].configuration.steps",
        ),
        (
            lambda d: d["profiles"][0]["configuration"].update(kv="\x1b[2J"),
            "profiles[0].configuration.kv",
        ),
        (lambda d: d["profiles"][0]["configuration"].update(kv="x" * 5000), "profiles[0].configuration"),
    ],
)
def test_a_broken_document_is_refused_by_field(change: Callable[[dict[str, Any]], Any], field: str) -> None:
    broken = json.loads(document(PROFILE))
    change(broken)
    with pytest.raises(FieldError) as caught:
        read_video_profiles(json.dumps(broken), latest_unix_s=1e10)
    assert caught.value.field == field


async def test_an_import_takes_video_profiles_and_keeps_the_newer_ones(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "state")
    told: list[None] = []
    exchange = CandidateExchange(store, list, lambda: told.append(None), SystemClock())
    text = document(PROFILE)
    first = await exchange.take(text, CandidateImport())
    again = await exchange.take(text, CandidateImport())
    assert (first["stored"], again["stored"], again["kept"]) == (1, 0, 1)
    assert len(told) == 1
    stored = await exchange.stored(ProfileFilter())
    assert (stored.kv, stored.unreadable) == ((), ()), "they are no KV profiles"
    assert stored.video == tuple(read_video_profiles(text))
    await store.close()
