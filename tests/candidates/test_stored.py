"""Rows of the store: profiles, and what cannot be read, which is named and keeps nothing else back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from controld.candidates.profile import Profile, StageTime
from controld.candidates.stored import ProfileFilter, StoredProfileReader
from controld.contract.configuration import Configuration
from controld.profiling.results import profile_record
from controld.store.records import ProfileRecord


def profile(code: str = "entropy", workload: str = "general") -> Profile:
    return Profile(
        configuration=Configuration({"quantise": "levels", "key_levels": 12, "code": code}),
        workload=workload, model_fingerprint="f" * 64, loss_mean_nats=0.01, loss_se_nats=0.001, loss_samples=8,
        worst_prompt_tokens=256, ratio=4.0, encode=StageTime(0.0, 1e-9), decode=StageTime(0.0, 1e-9),
        median_transfer_bytes=1e6, sender_hardware="cpu/2", receiver_hardware="gpu/1", measured_unix_s=100.0,
    )  # fmt: skip


GOOD, OTHER = profile(), profile("zstd", "dialogue")


def changed(**changes: Any) -> str:
    return json.dumps({**OTHER.to_document(), **changes})


@pytest.mark.parametrize(
    "document",
    [
        "{{{",
        "",
        "[" * 100_000,
        "[]",
        "{}",
        changed(ratio=5e-324),
        changed(ratio=10**400),
        changed(ratio="4"),
        changed(encode={"a_s": 1e308, "b_s_per_byte": 1e308}),
        changed(measured_unix_s=1e308),
        changed(configuration=[]),
        changed(corpus={"texts": float("nan")}),
        changed(workload="general"),
        changed(sender_hardware=5),
        profile("bitpack", "dialogue").to_json(),
    ],
    ids=lambda document: document[:40],
)
def test_a_row_that_is_no_profile_is_named_and_the_others_are_read(document: str) -> None:
    rows = [profile_record(GOOD), replace(profile_record(OTHER), document=document)]
    read = StoredProfileReader().read(rows)
    assert read.profiles == (GOOD,)
    (row,) = read.unreadable
    assert row.key == rows[1].key
    for part in (OTHER.arm_id, "dialogue", "f" * 12, "cpu/2 -> gpu/1"):
        assert part in row.where
    assert "import it again" in row.what


def test_a_workload_shows_its_own_rows_only() -> None:
    reader = StoredProfileReader()
    rows = [profile_record(GOOD), profile_record(OTHER)]
    assert reader.read(rows, ProfileFilter(workload="dialogue")).profiles == (OTHER,)
    rows[1] = replace(rows[1], document="?")
    assert not reader.read(rows, ProfileFilter(workload="general")).unreadable
    assert len(reader.read(rows, ProfileFilter(workload="dialogue")).unreadable) == 1


def test_a_row_that_stays_as_it_is_is_read_once_and_one_that_changes_again() -> None:
    reader = StoredProfileReader()
    row = profile_record(GOOD)
    (first,) = reader.read([row]).profiles
    same = ProfileRecord(key=row.key, document=row.document, updated_unix_s=row.updated_unix_s)
    assert reader.read([same]).profiles[0] is first
    better = replace(GOOD, ratio=5.0)
    assert reader.read([profile_record(better)]).profiles == (better,)
    assert reader.read([]).profiles == ()
    assert reader.read([row]).profiles[0] is not first, "what was gone is forgotten"
