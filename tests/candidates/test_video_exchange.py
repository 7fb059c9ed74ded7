"""Video profiles as documents: an export is imported as it was, and what is broken is named by its place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.candidates.stored import ProfileFilter, ProfileKind, StoredProfileReader, StoredVideoReader, kind_of
from controld.candidates.video_exchange import export_video_document, read_video_profiles, video_records
from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

FULL = VideoProfile(
    configuration=Configuration({"steps": 4, "vae": "async", "kv": "nvfp4"}), source=Source.MEASURED, forward_s=0.05,
    vae_s=0.1, frames_per_chunk=8, workload="shapes", model_fingerprint="m" * 64, hardware="cpu/2/1", loss_mean=0.01,
    loss_se=0.001, loss_samples=30,
    memory=VideoMemory(weights_bytes=9, kv_bytes=4, activation_bytes=5, session_bytes=1),
    drift=0.2, motion=0.04, measured_unix_s=1e9, provenance="grid, 30 clips",
)  # fmt: skip
BARE = replace(
    FULL, configuration=Configuration({"steps": 2}), loss_mean=None, loss_se=0.0, loss_samples=0, memory=None,
    drift=None, motion=None,
)  # fmt: skip


def text(*profiles: VideoProfile) -> str:
    return json.dumps(export_video_document(profiles))


def test_an_export_is_imported_as_it_was() -> None:
    assert read_video_profiles(text(FULL, BARE)) == [FULL, BARE]
    assert read_video_profiles(text()) == []


@given(
    forward_s=st.floats(1e-9, 86_400.0), loss=st.one_of(st.none(), st.floats(-1e6, 1e6)), name=st.text(max_size=8),
    size=st.integers(0, 2**53), source_steps=st.integers(1, 1024),
)  # fmt: skip
def test_whatever_may_be_kept_comes_back(
    forward_s: float, loss: float | None, name: str, size: int, source_steps: int
) -> None:
    memory = VideoMemory(weights_bytes=size, kv_bytes=0, activation_bytes=1)
    try:
        one = replace(
            FULL, forward_s=forward_s, loss_mean=loss, hardware=name, memory=memory,
            configuration=Configuration({"steps": source_steps}),
        )  # fmt: skip
    except FieldError:
        assert not name.isprintable()
        return
    assert read_video_profiles(text(one)) == [one]
    assert StoredVideoReader().read(video_records([one])).profiles == (one,)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"forward_s": -1.0}, "profiles[1].forward_s"),
        ({"memory": {"weights_bytes": -1, "kv_bytes": 0, "activation_bytes": 0}}, "profiles[1].memory.weights_bytes"),
        ({"memory": {"weights": 1}}, "profiles[1]"),
        ({"more": 1}, "profiles[1]"),
        ({"kind": "kv"}, "profiles[1].format"),
        ({"configuration": {"steps": 0}}, "profiles[1].configuration.steps"),
        ({"source": "published"}, "profiles[1].source"),
        ({"model_fingerprint": ""}, "profiles[1].model_fingerprint"),
        ({"measured_unix_s": 3e9}, "profiles[1].measured_unix_s"),
    ],
)
def test_what_is_broken_is_named_by_its_place(change: dict[str, Any], field: str) -> None:
    document = export_video_document([FULL, BARE])
    document["profiles"][1].update(change)
    with pytest.raises(FieldError) as caught:
        read_video_profiles(json.dumps(document), latest_unix_s=2e9)
    assert caught.value.field == field


def test_a_setting_that_comes_twice_or_a_key_that_does_is_refused() -> None:
    with pytest.raises(FieldError, match=r"profiles\[1\]: is profiles\[0\] again"):
        read_video_profiles(text(FULL, replace(FULL, forward_s=1.0)))
    with pytest.raises(FieldError, match="vae_s: the key is there twice"):
        read_video_profiles(text(FULL).replace('"vae_s": 0.1', '"vae_s": 0.1, "vae_s": 0.2'))


def test_rows_are_read_by_kind_and_what_is_no_profile_is_named() -> None:
    good, other = video_records([FULL, BARE])
    read = StoredVideoReader().read([good, replace(other, document=other.document.replace("shapes", "other"))])
    assert read.profiles == (FULL,)
    (row,) = read.unreadable
    assert BARE.setting_id in row.where and "of another configuration or place" in row.what
    damaged = replace(other, document=other.document.replace('"vae_s":0.1', '"vae_s":-1'))
    (row,) = StoredVideoReader().read([damaged]).unreadable
    assert "vae_s" in row.what
    assert StoredProfileReader().read([good, damaged]) == StoredProfileReader().read([])


def test_a_filter_takes_what_all_of_its_words_match() -> None:
    video, _ = video_records([FULL, BARE])
    garbage = replace(video, document="?")
    assert (kind_of(video), kind_of(garbage)) == (ProfileKind.VIDEO, ProfileKind.KV)
    for words, matches in (
        ({}, True),
        ({"kind": ProfileKind.VIDEO, "workload": "shapes", "hardware": "cpu/2/1"}, True),
        ({"kind": ProfileKind.KV}, False),
        ({"workload": "shape"}, False),
        ({"hardware": "cpu"}, False),
        ({"config_id": FULL.setting_id}, True),
        ({"config_id": FULL.setting_id[:8]}, False),
        ({"model": "m" * 64}, True),
        ({"model": "m" * 8}, True),
        ({"model": "m" * 7}, False),
        ({"model": ""}, False),
        ({"workload": ""}, False),
        ({"workload": "shapes", "config_id": "0"}, False),
    ):
        assert ProfileFilter(**words).matches(video) is matches, words  # type: ignore[arg-type]
    two_sided = replace(video, key=replace(video.key, sender_hardware="a", receiver_hardware="b"))
    assert [ProfileFilter(hardware=name).matches(two_sided) for name in "abc"] == [True, True, False]
