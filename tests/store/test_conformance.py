"""What every store must do. A new implementation adds itself to the `store` fixture's parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from controld.contract.clock import ManualClock
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.store.errors import ConflictError, GoneError, NotFoundError, StoreError
from controld.store.interface import Store
from controld.store.records import (
    AuditEvent,
    EffectColumn,
    EffectFilter,
    EffectRecord,
    PosteriorRecord,
    ProfileKey,
    ProfileRecord,
    StudyRecord,
    TrialChange,
    TrialRecord,
    VersionRecord,
)
from controld.store.sqlite import SqliteStore

RETAIN_VERSIONS = 5
RETAIN_VERSIONS_S = 100.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: FilePath, clock: ManualClock) -> AsyncIterator[Store]:
    assert request.param == "sqlite"
    opened = await SqliteStore.open(
        tmp_path,
        clock=clock,
        retain_versions=RETAIN_VERSIONS,
        retain_versions_s=RETAIN_VERSIONS_S,
        retain_effects=20,
        retain_audit=10,
    )
    yield opened
    await opened.close()


def effect(transfer_id: str = "t1", **changes: object) -> Effect:
    values: dict[str, object] = {
        "transfer_id": transfer_id,
        "half": Half.SENDER,
        "arm_id": "raw",
        "table_version": 7,
        "service_class": "chat",
        "tier": "pd",
        "link_group": "default",
        "tokens": 12,
        "chunks": 1,
        "raw_bytes": 2**53,
        "wire_bytes": 10,
        "encode_s": 0.1,
        "wire_s": 0.2,
        "decode_s": 0.3,
        "wait_s": 0.0,
        "total_s": 0.6,
        "path": Path.CODED,
        "verdict": Verdict.VERIFIED,
        "explored": True,
    }
    return Effect(**{**values, **changes})  # type: ignore[arg-type]


def record(seq: int, value: Effect | None = None, *, agent: str = "a", instance: str = "i") -> EffectRecord:
    return EffectRecord(
        agent_id=agent, instance_id=instance, seq=seq, effect=value or effect(), received_unix_s=float(seq)
    )


def profile(config_id: str, document: str = "{}", workload: str = "dialogue") -> ProfileRecord:
    key = ProfileKey(
        model_fingerprint="f", workload=workload, config_id=config_id, sender_hardware="s", receiver_hardware="r"
    )
    return ProfileRecord(key=key, document=document, updated_unix_s=1.0)


def version(number: int, *, kind: str = "sglang", created_unix_s: float = 1_700_000_000.0) -> VersionRecord:
    return VersionRecord(
        number=number,
        kind=kind,
        deployment="chat",
        policy_generation=3,
        created_unix_s=created_unix_s,
        tables_json='{"tables": "ä"}',
        explanations_json='{"cells": []}',
    )


# ---------------------------------------------------------------------------------------- profiles, posteriors


async def test_a_profile_replaces_the_one_under_its_key(store: Store) -> None:
    await store.profiles.upsert([profile("a"), profile("b"), profile("c", workload="code")])
    await store.profiles.upsert([profile("a", '{"new": 1}')])
    assert [p.document for p in await store.profiles.list(workload="dialogue")] == ['{"new": 1}', "{}"]
    assert len(await store.profiles.list()) == 3
    assert await store.profiles.list(model_fingerprint="other") == ()
    assert await store.profiles.delete([profile("a").key, profile("zz").key]) == 1
    assert {p.key.config_id for p in await store.profiles.list()} == {"b", "c"}


async def test_only_a_newer_profile_replaces_where_that_is_asked(store: Store) -> None:
    await store.profiles.upsert([profile("a"), profile("b")])
    older = replace(profile("a", '{"old": 1}'), updated_unix_s=0.5)
    same = profile("b", '{"same": 1}')
    assert await store.profiles.add_newer([older, same]) == 0
    newer = replace(profile("b", '{"new": 1}'), updated_unix_s=1.5)
    assert await store.profiles.add_newer([older, newer, profile("c")]) == 2
    assert [p.document for p in await store.profiles.list()] == ["{}", '{"new": 1}', "{}"]
    assert await store.profiles.add_newer([]) == 0


async def test_a_posterior_is_swapped_only_for_the_version_that_was_read(store: Store) -> None:
    await store.posteriors.put([PosteriorRecord(key="k", version=0, document="1")])
    assert await store.posteriors.get("k") == PosteriorRecord(key="k", version=1, document="1")
    batch = [
        PosteriorRecord(key="other", version=0, document="x"),
        PosteriorRecord(key="k", version=0, document="lost update"),
    ]
    with pytest.raises(ConflictError) as caught:
        await store.posteriors.put(batch)
    assert (caught.value.expected, caught.value.actual, caught.value.code) == (0, 1, "store.conflict")
    assert await store.posteriors.get("other") is None, "a conflict must take the whole batch back"
    await store.posteriors.put([PosteriorRecord(key="k", version=1, document="2")])
    assert (await store.posteriors.list("k"))[0] == PosteriorRecord(key="k", version=2, document="2")


async def test_of_concurrent_swaps_exactly_one_wins(store: Store) -> None:
    attempts = await asyncio.gather(
        *(store.posteriors.put([PosteriorRecord(key="k", version=0, document=str(i))]) for i in range(8)),
        return_exceptions=True,
    )
    assert sum(attempt is None for attempt in attempts) == 1
    assert sum(isinstance(attempt, ConflictError) for attempt in attempts) == 7


async def test_posterior_prefixes_are_literal(store: Store) -> None:
    keys = ["a%/1", "a%/2", "ab/1", "A%/1"]
    await store.posteriors.put([PosteriorRecord(key=key, version=0, document="") for key in keys])
    assert [r.key for r in await store.posteriors.list("a%/")] == ["a%/1", "a%/2"]
    assert await store.posteriors.delete("a%/") == 2
    assert [r.key for r in await store.posteriors.list()] == ["A%/1", "ab/1"]


# ---------------------------------------------------------------------------------------- effects


async def test_an_effect_is_stored_once_however_often_it_comes(store: Store) -> None:
    assert await store.effects.append("a", "i", [record(1), record(2)], up_to_seq=2) == (record(1), record(2))
    assert await store.effects.append("a", "i", [record(2), record(3)], up_to_seq=3) == (record(3),)
    assert await store.effects.count() == 3
    assert await store.effects.acked_up_to("a", "i") == 3
    assert await store.effects.acked_up_to("a", "other instance") == 0


async def test_the_same_sequence_number_of_another_instance_is_another_effect(store: Store) -> None:
    await store.effects.append("a", "i", [record(1)], up_to_seq=1)
    other = record(1, instance="j")
    assert await store.effects.append("a", "j", [other], up_to_seq=1) == (other,)


async def test_progress_never_falls_and_counts_what_was_not_stored(store: Store) -> None:
    await store.effects.append("a", "i", [], up_to_seq=9)
    await store.effects.append("a", "i", [record(4)], up_to_seq=4)
    assert await store.effects.acked_up_to("a", "i") == 9


async def test_both_halves_of_a_transfer_come_back_as_they_went_in(store: Store) -> None:
    receiver = record(1, effect("t", half=Half.RECEIVER, reason="ü"), agent="decode")
    sender = record(1, effect("t", encode_s=0.1 + 0.2), agent="prefill")
    await store.effects.append("decode", "i", [receiver], up_to_seq=1)
    await store.effects.append("prefill", "i", [sender], up_to_seq=1)
    assert await store.effects.by_transfer("t") == (sender, receiver)
    assert await store.effects.by_transfer("none") == ()


async def test_recent_effects_are_filtered_and_newest_first(store: Store) -> None:
    records = [record(i, effect(f"t{i}", path=Path.RAW if i % 2 else Path.CODED)) for i in range(1, 9)]
    await store.effects.append("a", "i", records, up_to_seq=8)
    assert [r.seq for r in await store.effects.recent(2)] == [8, 7]
    assert [r.seq for r in await store.effects.recent(9, EffectFilter(path=Path.RAW))] == [7, 5, 3, 1]
    assert [r.seq for r in await store.effects.recent(9, EffectFilter(received_since_unix_s=7.0))] == [8, 7]
    assert await store.effects.recent(0) == ()
    assert await store.effects.recent(9, EffectFilter(service_class="'; DROP TABLE effects; --")) == ()


async def test_effects_are_read_on_from_a_position_in_the_order_of_their_durability(store: Store) -> None:
    await store.effects.append("b", "i", [record(1, agent="b"), record(2, agent="b")], up_to_seq=2)
    first = await store.effects.after(0, 10)
    await store.effects.append("a", "i", [record(i) for i in range(1, 4)], up_to_seq=3)
    await store.effects.append("a", "i", [record(3)], up_to_seq=3)
    rest = await store.effects.after(first[-1][0], 2)
    rest += await store.effects.after(rest[-1][0], 10)
    assert [(r.agent_id, r.seq) for _, r in first + rest] == [("b", 1), ("b", 2), ("a", 1), ("a", 2), ("a", 3)]
    positions = [position for position, _ in first + rest]
    assert positions == sorted(set(positions))
    assert await store.effects.after(positions[-1], 10) == ()


async def test_effects_are_counted_by_what_one_asks(store: Store) -> None:
    values = [effect(arm_id="raw", raw_bytes=5), effect(arm_id="x", raw_bytes=7), effect(arm_id="x", raw_bytes=7)]
    await store.effects.append("a", "i", [record(i + 1, v) for i, v in enumerate(values)], up_to_seq=3)
    counts = await store.effects.counts([EffectColumn.ARM_ID, EffectColumn.PATH])
    assert [(c.values, c.effects, c.raw_bytes) for c in counts] == [(("x", "coded"), 2, 14), (("raw", "coded"), 1, 5)]
    assert [c.effects for c in await store.effects.counts([])] == [3]
    assert await store.effects.counts([], EffectFilter(arm_id="none")) == ()


async def test_the_oldest_effects_go_first(store: Store) -> None:
    for seq in range(1, 61):
        await store.effects.append("a", "i", [record(seq)], up_to_seq=seq)
    kept = [r.seq for r in await store.effects.recent(100)]
    assert 20 <= len(kept) < 41 and kept[0] == 60 and kept == sorted(kept, reverse=True)


# ---------------------------------------------------------------------------------------- versions, generations


async def test_versions_are_numbered_without_gaps(store: Store) -> None:
    assert await store.versions.last_number() == 0
    await store.versions.append(version(1))
    for wrong in (1, 3):
        with pytest.raises(ConflictError):
            await store.versions.append(version(wrong))
    assert await store.versions.get(1) == version(1)
    assert await store.versions.last_number() == 1


async def test_old_versions_are_gone_and_unknown_ones_not_found(store: Store) -> None:
    for number in range(1, 9):
        await store.versions.append(version(number))
    with pytest.raises(GoneError) as caught:
        await store.versions.get(3)
    assert caught.value.code == "store.gone"
    assert (await store.versions.get(4)).number == 4
    for never in (0, 9, -1):
        with pytest.raises(NotFoundError):
            await store.versions.get(never)


async def test_the_last_version_of_a_selector_outlives_the_window(store: Store, clock: ManualClock) -> None:
    await store.versions.append(version(1, kind="longlive", created_unix_s=clock.unix_s()))
    await store.versions.append(version(2, created_unix_s=clock.unix_s()))
    clock.advance(RETAIN_VERSIONS_S + 1)
    await store.versions.append(version(3, created_unix_s=clock.unix_s()))
    with pytest.raises(GoneError):
        await store.versions.get(2)
    latest = await store.versions.latest("longlive", "chat")
    assert latest is not None and latest.number == 1
    assert await store.versions.latest("longlive", "other") is None


async def test_a_policy_generation_rises_only_with_new_content(store: Store) -> None:
    assert (await store.policy_generations.current()).generation == 0
    first = await store.policy_generations.advance("h1", expected_generation=0)
    assert await store.policy_generations.advance("h1", expected_generation=1) == first
    with pytest.raises(ConflictError):
        await store.policy_generations.advance("h2", expected_generation=0)
    second = await store.policy_generations.advance("h2", expected_generation=1)
    assert (second.generation, second.content_hash) == (2, "h2")
    assert await store.policy_generations.current() == second


# ---------------------------------------------------------------------------------------- studies, audit


async def test_states_of_studies_and_trials_are_swapped(store: Store) -> None:
    study = StudyRecord(study_id="s", kind="grid", state="running", spec="{}", created_unix_s=1.0)
    await store.studies.create(study)
    with pytest.raises(ConflictError):
        await store.studies.create(study)
    trials = [
        TrialRecord(study_id="s", trial_id=t, state="waiting", spec="{}", result="", updated_unix_s=1.0)
        for t in ("t2", "t1")
    ]
    await store.studies.add_trials(trials)
    with pytest.raises(ConflictError):
        await store.studies.add_trials([trials[0]])
    done = TrialChange(trial_id="t1", expected="waiting", state="done", result='{"loss": 0}')
    await store.studies.transition_trial("s", done)
    with pytest.raises(ConflictError):
        await store.studies.transition_trial("s", TrialChange(trial_id="t1", expected="waiting", state="failed"))
    assert [(t.trial_id, t.state, t.result) for t in await store.studies.trials("s")] == [
        ("t2", "waiting", ""),
        ("t1", "done", '{"loss": 0}'),
    ]
    await store.studies.transition("s", expected="running", state="stopped")
    with pytest.raises(ConflictError):
        await store.studies.transition("s", expected="running", state="stopped")
    assert (await store.studies.get("s")).state == "stopped"
    assert [s.study_id for s in await store.studies.list()] == ["s"]


async def test_a_study_is_created_with_its_trials_or_not_at_all(store: Store) -> None:
    def trial(trial_id: str, study_id: str = "s") -> TrialRecord:
        return TrialRecord(
            study_id=study_id, trial_id=trial_id, state="waiting", spec="{}", result="", updated_unix_s=1.0
        )

    study = StudyRecord(study_id="s", kind="grid", state="running", spec="{}", created_unix_s=1.0)
    for wrong, error in (([trial("t1"), trial("t1")], ConflictError), ([trial("t1", "no")], NotFoundError)):
        with pytest.raises(error):
            await store.studies.create(study, wrong)
        assert await store.studies.list() == ()
        assert await store.studies.trials("s") == ()
    await store.studies.create(study, [trial("t2"), trial("t1")])
    assert [t.trial_id for t in await store.studies.trials("s")] == ["t2", "t1"]


async def test_a_study_moves_on_with_its_trials_or_not_at_all(store: Store) -> None:
    study = StudyRecord(study_id="s", kind="grid", state="running", spec="{}", created_unix_s=1.0)
    trials = [
        TrialRecord(study_id="s", trial_id=t, state="waiting", spec="{}", result="", updated_unix_s=1.0)
        for t in ("t1", "t2")
    ]
    await store.studies.create(study, trials)
    end = TrialChange(trial_id="t1", expected="waiting", state="stopped", result='{"why": 1}')
    for wrong, error in (
        (TrialChange(trial_id="t2", expected="done", state="stopped"), ConflictError),
        (TrialChange(trial_id="t3", expected="waiting", state="stopped"), NotFoundError),
    ):
        with pytest.raises(error):
            await store.studies.transition("s", expected="running", state="stopped", trials=[end, wrong])
        assert (await store.studies.get("s")).state == "running"
        assert await store.studies.trials("s") == tuple(trials)
    await store.studies.transition("s", expected="running", state="stopped", trials=[end])
    assert (await store.studies.get("s")).state == "stopped"
    assert [(t.state, t.result) for t in await store.studies.trials("s")] == [
        ("stopped", '{"why": 1}'),
        ("waiting", ""),
    ]


async def test_what_does_not_exist_is_said_so(store: Store) -> None:
    trial = TrialRecord(study_id="no", trial_id="t", state="", spec="", result="", updated_unix_s=0.0)
    for attempt in (
        store.studies.get("no"),
        store.studies.transition("no", expected="a", state="b"),
        store.studies.transition_trial("no", TrialChange(trial_id="t", expected="a", state="b")),
        store.studies.add_trials([trial]),
    ):
        with pytest.raises(NotFoundError):
            await attempt


async def test_the_audit_trail_is_newest_first_and_bounded(store: Store, clock: ManualClock) -> None:
    for number in range(15):
        clock.advance(1.0)
        await store.audit.append(AuditEvent.POLICY_APPLIED, f'{{"n": {number}}}')
    await store.audit.append(AuditEvent.AGENT_LOST, "{}")
    trail = await store.audit.recent(100)
    assert len(trail) == 10 and trail[0].event is AuditEvent.AGENT_LOST
    assert [r.document for r in await store.audit.recent(2, AuditEvent.POLICY_APPLIED)] == ['{"n": 14}', '{"n": 13}']


async def test_a_closed_store_says_so(store: Store) -> None:
    await store.close()
    await store.close()
    for attempt in (store.effects.count(), store.audit.append(AuditEvent.AGENT_LOST, "{}")):
        with pytest.raises(StoreError) as caught:
            await attempt
        assert caught.value.code == "store.closed"
