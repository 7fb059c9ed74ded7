"""Profiles of both kinds over a real store: listed with their fronts, carried out and in, and deleted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.admin.backend import CandidateImport
from controld.admin.candidates import MAX_AUDITED_IDS, Candidates
from controld.admin.problem import NotFoundError
from controld.candidates.profile import Profile, StageTime
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.candidates.video_exchange import video_records
from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.profiling.results import profile_record
from controld.store.records import AuditEvent
from controld.store.sqlite import SqliteStore

EVERY = ProfileFilter()
VIDEO = ProfileFilter(kind=ProfileKind.VIDEO)
OURS = CandidateImport()


def kv(code: str = "entropy", ratio: float = 4.0, **changes: Any) -> Profile:
    values: dict[str, Any] = {
        "configuration": Configuration({"quantise": "levels", "key_levels": 12, "code": code}), "workload": "general",
        "model_fingerprint": "f" * 64, "loss_mean_nats": 0.01, "loss_se_nats": 0.001, "loss_samples": 8,
        "worst_prompt_tokens": 256, "ratio": ratio, "encode": StageTime(0.0, 1e-9), "decode": StageTime(0.0, 1e-9),
        "median_transfer_bytes": 1e6, "sender_hardware": "cpu", "receiver_hardware": "gpu", "measured_unix_s": 1e9,
    }  # fmt: skip
    return Profile(**{**values, **changes})


def video(steps: int = 4, **changes: Any) -> VideoProfile:
    values: dict[str, Any] = {
        "configuration": Configuration({"steps": steps, "vae": "async"}), "source": Source.MEASURED, "forward_s": 0.05,
        "vae_s": 0.1, "frames_per_chunk": 8, "workload": "shapes", "model_fingerprint": "m" * 64, "hardware": "cpu",
        "loss_mean": 0.01 * (4 - steps), "loss_se": 0.001, "loss_samples": 30, "measured_unix_s": 1e9,
        "memory": VideoMemory(weights_bytes=100, kv_bytes=40, activation_bytes=50), "provenance": "grid",
    }  # fmt: skip
    return VideoProfile(**{**values, **changes})


FULL, FAST = video(), video(2)
BEATEN = video(3, forward_s=0.5, loss_mean=0.02)


class Desk:
    """The candidates part with what it stands between."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.told = 0
        self.candidates = Candidates(store, list, self._tell, ManualClock())

    def _tell(self) -> None:
        self.told += 1

    async def keep(self, *profiles: Profile | VideoProfile) -> None:
        for one in profiles:
            rows = video_records([one]) if isinstance(one, VideoProfile) else [profile_record(one)]
            await self.store.profiles.upsert(rows)

    async def ids(self, wanted: ProfileFilter = EVERY) -> set[str]:
        found = await self.candidates.listing(wanted)
        return {entry["config_id"] for entry in (*found.kv, *found.video)}

    async def deletions(self) -> list[dict[str, Any]]:
        return [json.loads(line.document) for line in await self.store.audit.recent(9, AuditEvent.CANDIDATES_DELETED)]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    store = await SqliteStore.open(tmp_path)
    yield Desk(store)
    await store.close()


async def test_each_kind_is_listed_with_its_own_fields_and_its_front(desk: Desk) -> None:
    await desk.keep(kv(), kv("zstd", ratio=3.0), FULL, FAST, BEATEN)
    found = await desk.candidates.listing(EVERY)
    assert {(one["kind"], one["ratio"], one["pareto"]) for one in found.kv} == {("kv", 4.0, True), ("kv", 3.0, False)}
    by_id = {one["config_id"]: one for one in found.video}
    assert {name: one["pareto"] for name, one in by_id.items()} == {
        FULL.setting_id: True, FAST.setting_id: True, BEATEN.setting_id: False,
    }  # fmt: skip
    fast = by_id[FAST.setting_id]
    assert fast["kind"] == "video"
    assert fast["seconds_per_frame"] == pytest.approx(3 * 0.05 / 8)
    assert fast["memory_bytes"] == 190
    assert fast["loss_upper"] == pytest.approx(FAST.loss_upper)
    assert {name: fast[name] for name in FAST.to_document()} == json.loads(FAST.to_json())
    json.dumps([*found.kv, *found.video], allow_nan=False)
    assert not found.problems


async def test_what_is_not_known_of_a_setting_is_null(desk: Desk) -> None:
    await desk.keep(video(loss_mean=None, loss_samples=0, memory=None))
    (one,) = (await desk.candidates.listing(EVERY)).video
    assert (one["loss_mean"], one["loss_upper"], one["memory_bytes"], one["memory"]) == (None,) * 4
    assert one["pareto"] is False


async def test_filters_hide_and_change_no_front(desk: Desk) -> None:
    other = video(model_fingerprint="n" * 64, hardware="gpu")
    await desk.keep(kv(), FULL, BEATEN, other)
    (one,) = (await desk.candidates.listing(ProfileFilter(config_id=BEATEN.setting_id))).video
    assert one["pareto"] is False, "it is alone in the answer, not in the store"
    assert await desk.ids(VIDEO) == {FULL.setting_id, BEATEN.setting_id}
    assert await desk.ids(ProfileFilter(kind=ProfileKind.KV)) == {kv().arm_id}
    assert await desk.ids(ProfileFilter(workload="shapes", hardware="gpu")) == {other.setting_id}
    assert await desk.ids(ProfileFilter(hardware="gpu")) == {other.setting_id, kv().arm_id}
    assert await desk.ids(ProfileFilter(model="nnnnnnnn")) == {other.setting_id}
    assert (await desk.candidates.listing(ProfileFilter(model="nnnnnnnn"))).video[0]["pareto"] is True


@pytest.mark.parametrize("kind", list(ProfileKind))
async def test_an_export_of_a_kind_is_imported_as_it_was(desk: Desk, kind: ProfileKind, tmp_path: Path) -> None:
    await desk.keep(kv(provenance="imported: x"), kv("zstd", provenance="imported: x"), FULL, FAST)
    exported = await desk.candidates.export(kind)
    store = await SqliteStore.open(tmp_path / "elsewhere")
    elsewhere = Desk(store)
    outcome = await elsewhere.candidates.take(json.dumps(exported), OURS)
    assert outcome == {"profiles": 2, "stored": 2, "kept": 0, "unmapped": []}
    again = await elsewhere.candidates.export(kind)
    assert again["profiles"] == exported["profiles"]
    wanted = ProfileFilter(kind=kind)
    assert await elsewhere.candidates.listing(wanted) == await desk.candidates.listing(wanted)
    assert await elsewhere.ids() == await desk.ids(wanted)
    await store.close()


async def test_a_damaged_video_row_is_a_problem_that_an_import_mends(desk: Desk) -> None:
    (row,) = video_records([FULL])
    damaged = replace(row, document=row.document.replace('"vae_s":0.1', '"vae_s":-1'), updated_unix_s=1e308)
    await desk.store.profiles.upsert([damaged])
    await desk.keep(FAST)
    (problem,) = (await desk.candidates.listing(EVERY)).problems
    assert FULL.setting_id in problem["where"] and "vae_s" in problem["what"]
    assert [one.key for one in await desk.candidates.unreadable()] == [row.key]
    exported = await desk.candidates.export(ProfileKind.VIDEO)
    assert [one["configuration"]["steps"] for one in exported["profiles"]] == [2], "without it"
    document = json.dumps({**exported, "profiles": [FULL.to_document()]})
    assert (await desk.candidates.take(document, OURS))["stored"] == 1
    assert await desk.ids() == {FULL.setting_id, FAST.setting_id}
    assert not (await desk.candidates.listing(EVERY)).problems


def deletions() -> Iterator[tuple[ProfileFilter, set[str]]]:
    every = {kv().arm_id, kv("zstd").arm_id, FULL.setting_id, FAST.setting_id}
    yield VIDEO, {kv().arm_id, kv("zstd").arm_id}
    yield ProfileFilter(kind=ProfileKind.KV), {FULL.setting_id, FAST.setting_id}
    yield ProfileFilter(workload="general"), {FULL.setting_id, FAST.setting_id}
    yield ProfileFilter(model="m" * 8), {kv().arm_id, kv("zstd").arm_id}
    yield ProfileFilter(hardware="gpu"), {FULL.setting_id, FAST.setting_id}
    yield ProfileFilter(hardware="cpu"), set()
    yield ProfileFilter(config_id=FAST.setting_id), every - {FAST.setting_id}
    yield ProfileFilter(workload="shapes", config_id=FULL.setting_id), every - {FULL.setting_id}


@pytest.mark.parametrize(("wanted", "left"), list(deletions()))
async def test_what_is_named_is_deleted_audited_and_planned_without(
    desk: Desk, wanted: ProfileFilter, left: set[str]
) -> None:
    await desk.keep(kv(), kv("zstd"), FULL, FAST)
    before = await desk.ids()
    dry = await desk.candidates.delete(wanted, dry_run=True)
    assert (dry["dry_run"], dry["matched"], dry["deleted"]) == (True, 4 - len(left), 0)
    assert (await desk.ids(), desk.told, await desk.deletions()) == (before, 0, [])
    real = await desk.candidates.delete(wanted, dry_run=False)
    assert real == {**dry, "dry_run": False, "deleted": 4 - len(left)}
    assert {one["config_id"] for one in real["profiles"]} == before - left
    assert await desk.ids() == left
    assert desk.told == 1
    (line,) = await desk.deletions()
    assert line["deleted"] == 4 - len(left)
    assert line["config_ids"] == sorted(before - left)
    assert line["by"], "what was named"
    with pytest.raises(NotFoundError):
        await desk.candidates.delete(wanted, dry_run=False)
    assert desk.told == 1, "nothing went, nothing to plan"


async def test_a_row_that_cannot_be_read_is_deleted_by_where_it_lies(desk: Desk) -> None:
    row = replace(profile_record(kv()), document="{{{")
    await desk.store.profiles.upsert([row])
    (deleted,) = (await desk.candidates.delete(ProfileFilter(config_id=kv().arm_id), dry_run=False))["profiles"]
    assert (deleted["kind"], deleted["workload"]) == ("kv", "general")
    assert await desk.candidates.unreadable() == ()


async def test_a_deletion_names_something_and_one_model(desk: Desk) -> None:
    one, other = video(model_fingerprint="abcdefgh1"), video(model_fingerprint="abcdefgh2")
    await desk.keep(one, other)
    with pytest.raises(FieldError, match="names no profiles"):
        await desk.candidates.delete(EVERY, dry_run=False)
    with pytest.raises(FieldError, match="model: 2 models begin like this") as caught:
        await desk.candidates.delete(ProfileFilter(model="abcdefgh"), dry_run=False)
    assert "abcdefgh1, abcdefgh2" in caught.value.hint
    assert len(await desk.store.profiles.list()) == 2
    await desk.candidates.delete(ProfileFilter(model="abcdefgh2"), dry_run=False)
    (left,) = (await desk.candidates.listing(EVERY)).video
    assert left["model_fingerprint"] == "abcdefgh1"


async def test_the_audit_trail_names_so_many_and_counts_all(desk: Desk) -> None:
    crowd = [video(configuration=Configuration({"steps": 4, "number": n})) for n in range(MAX_AUDITED_IDS + 5)]
    await desk.store.profiles.upsert(video_records(crowd))
    await desk.candidates.delete(VIDEO, dry_run=False)
    (line,) = await desk.deletions()
    assert line["by"] == {"kind": "video"}
    assert (line["deleted"], len(line["config_ids"])) == (MAX_AUDITED_IDS + 5, MAX_AUDITED_IDS)
