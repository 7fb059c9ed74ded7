"""Import and export over a real store: all or nothing, the newer one stays, and a library needs its model's space."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controld.admin.backend import CandidateImport, ImportFormat
from controld.admin.candidate_exchange import CLOCK_SLACK_S, CandidateExchange
from controld.admin.problem import UnavailableError
from controld.candidates.exchange import export_document
from controld.candidates.profile import Profile, StageTime
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.fleet.identity import AgentIdentity
from controld.fleet.session import AgentSession
from controld.store.records import AuditEvent, ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.kvcodec import HeadProfile, KVDtype, KVLayout
from dataplanes.kvcodec.space import kv_strategy_space

OURS = CandidateImport()
KVSERVE = CandidateImport(format=ImportFormat.KVSERVE)
LAYOUT = KVLayout.keys_then_values(layers=2, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=64)
HEADS = HeadProfile(key=np.ones((2, 2)), value=np.ones((2, 2)))


def profile(measured_unix_s: float = 100.0, code: str = "entropy", ratio: float = 4.0) -> Profile:
    return Profile(
        configuration=Configuration({"quantise": "levels", "key_levels": 12, "code": code}),
        workload="general", model_fingerprint="f", loss_mean_nats=0.01, loss_se_nats=0.001, loss_samples=8,
        worst_prompt_tokens=256, ratio=ratio, encode=StageTime(0.0, 1e-9), decode=StageTime(0.0, 1e-9),
        median_transfer_bytes=1e6, measured_unix_s=measured_unix_s, provenance="study s, trial 1",
    )  # fmt: skip


def record(one: Profile) -> ProfileRecord:
    key = ProfileKey(
        model_fingerprint=one.model_fingerprint, workload=one.workload, config_id=one.arm_id,
        sender_hardware=one.sender_hardware, receiver_hardware=one.receiver_hardware,
    )  # fmt: skip
    return ProfileRecord(key=key, document=one.to_json(), updated_unix_s=one.measured_unix_s)


def session(agent_id: str = "w0", **changes: Any) -> AgentSession:
    values: dict[str, Any] = {
        "deployment": "chat", "agent_id": agent_id, "instance_id": "i", "kind": "sglang", "role": "profiler", "rank": 0,
        "role_peers": 1, "model_name": "Tiny-7B", "model_fingerprint": "m" * 64, "kv_dtype": "bfloat16",
        "kv_bytes_per_token": 1024, "device": "cpu", "torch_version": "2", "threads": 1, "config_hash": "",
        "space_json": kv_strategy_space(LAYOUT).to_json(), "tiers": ("pd",), "resource_kinds": frozenset(),
        "started_unix_s": 1.0, **changes,
    }  # fmt: skip
    return AgentSession(
        identity=AgentIdentity(**values), peer="unix:", connected=True, connected_since_unix_s=1.0, attached=True,
        not_attached_reason="", desired_version=0, artefacts_held={}, acked_version=0, effective_version=0,
        effective_is_known=True, last_failed=None, degraded=False, telemetry=None, telemetry_unix_s=0.0,
        effects_acked_up_to=0, counters={},
    )  # fmt: skip


def document(*profiles: Profile) -> str:
    return json.dumps(export_document(profiles, exported_unix_s=1.0))


def library(share: float = 0.8) -> str:
    quantiser = {
        "hybrid_ratio": share, "high_key_max_value": 12, "high_value_max_value": 8, "low_key_max_value": 6,
        "low_value_max_value": 4, "axis_key": "channel", "axis_value": "token", "split_type": "head",
    }  # fmt: skip
    config = {
        "enabled": True, "pipeline": ["quantizer", "codec"], "quantizer_config": quantiser,
        "codec_config": {"codec_type": "nvcomp", "nvcomp_algorithm": "ANS"},
    }  # fmt: skip
    entry = {
        "profile_id": "c0", "compression_config": config,
        "performance_metrics": {"compression_ratio": 8.0, "harmonic_speed_mbps": 1000.0},
        "quality_metrics": {"accuracy": 0.97},
    }  # fmt: skip
    metadata = {"model_name": "Tiny-7B", "dataset": "qa", "machine": "H100", "input_length": 4096}
    return json.dumps({"library_metadata": metadata, "accuracy_buckets": [{"pareto_profiles": [entry]}]})


class Desk:
    """An exchange with what it stands between."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.sessions: list[AgentSession] = []
        self.told = 0
        self.exchange = CandidateExchange(store, lambda: self.sessions, self._tell, ManualClock())

    def _tell(self) -> None:
        self.told += 1

    async def profiles(self) -> list[Profile]:
        return [Profile.from_json(kept.document) for kept in await self.store.profiles.list()]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    store = await SqliteStore.open(tmp_path)
    yield Desk(store)
    await store.close()


async def test_what_one_daemon_exports_another_takes_once(desk: Desk) -> None:
    text = document(profile(), profile(code="zstd"))
    assert await desk.exchange.take(text, OURS) == {"profiles": 2, "stored": 2, "kept": 0, "unmapped": []}
    before = await desk.profiles()
    assert {one.provenance for one in before} == {"imported: study s, trial 1"}
    assert await desk.exchange.take(text, OURS) == {"profiles": 2, "stored": 0, "kept": 2, "unmapped": []}
    assert await desk.profiles() == before
    assert desk.told == 1, "nothing new, nothing to plan"
    again = await desk.exchange.export(ProfileKind.KV)
    assert await desk.exchange.take(json.dumps(again), OURS) == {"profiles": 2, "stored": 0, "kept": 2, "unmapped": []}


async def test_the_newer_measurement_stays(desk: Desk) -> None:
    await desk.store.profiles.upsert([record(profile(100.0, ratio=4.0))])
    await desk.exchange.take(document(profile(99.0, ratio=3.0)), OURS)
    assert [one.ratio for one in await desk.profiles()] == [4.0]
    await desk.exchange.take(document(profile(101.0, ratio=5.0)), OURS)
    assert [one.ratio for one in await desk.profiles()] == [5.0]


async def test_one_wrong_profile_keeps_all_out(desk: Desk) -> None:
    broken = json.loads(document(profile(), profile(code="zstd")))
    broken["profiles"][1]["ratio"] = -1.0
    with pytest.raises(FieldError) as caught:
        await desk.exchange.take(json.dumps(broken), OURS)
    assert caught.value.field == "profiles[1].ratio"
    assert await desk.profiles() == []
    assert desk.told == 0


async def test_an_import_is_in_the_audit_trail(desk: Desk) -> None:
    await desk.exchange.take(document(profile()), OURS)
    (line,) = await desk.store.audit.recent(5, AuditEvent.CANDIDATES_IMPORTED)
    assert json.loads(line.document) == {"format": "controld", "profiles": 1, "stored": 1, "kept": 0}


async def test_a_library_is_read_for_the_connected_model_of_its_name(desk: Desk) -> None:
    with pytest.raises(UnavailableError, match="Tiny-7B"):
        await desk.exchange.take(library(), KVSERVE)
    with_heads = kv_strategy_space(LAYOUT, {HEADS.profile_id: HEADS}).to_json()
    desk.sessions = [session("other", model_name="else"), session("z0"), session("a0", space_json=with_heads)]
    outcome = await desk.exchange.take(library(), replace(KVSERVE, workload="dialogue"))
    assert outcome == {"profiles": 1, "stored": 1, "kept": 0, "unmapped": []}
    (stored,) = await desk.profiles()
    assert (stored.model_fingerprint, stored.workload) == ("m" * 64, "dialogue")
    assert stored.median_transfer_bytes == 4096 * 1024
    # What was measured beats a prior, whenever it comes.
    measured = replace(stored, loss_samples=4, measured_unix_s=1.0, provenance="study")
    await desk.exchange.take(document(measured), OURS)
    await desk.exchange.take(library(), replace(KVSERVE, workload="dialogue"))
    assert [one.loss_samples for one in await desk.profiles()] == [4]


async def test_what_does_not_map_is_said_and_the_rest_is_stored(desk: Desk) -> None:
    desk.sessions = [session()]
    outcome = await desk.exchange.take(library(share=0.7), KVSERVE)
    assert (outcome["profiles"], outcome["stored"]) == (0, 0)
    assert [one["profile_id"] for one in outcome["unmapped"]] == ["c0"]


async def test_two_models_of_one_name_must_be_told_apart(desk: Desk) -> None:
    desk.sessions = [session("a"), session("b", model_fingerprint="n" * 64)]
    with pytest.raises(FieldError, match="2 models"):
        await desk.exchange.take(library(), KVSERVE)
    await desk.exchange.take(library(), replace(KVSERVE, model="n" * 64))
    with pytest.raises(UnavailableError):
        await desk.exchange.take(library(), replace(KVSERVE, model="o" * 64))


async def test_a_date_that_is_yet_to_come_is_refused_and_the_honest_profile_stays(desk: Desk) -> None:
    now_unix_s = ManualClock().unix_s()
    await desk.store.profiles.upsert([record(profile(now_unix_s, ratio=4.0))])
    for late in (now_unix_s + CLOCK_SLACK_S + 1, 1e308):
        forged = json.loads(document(profile(ratio=9.0)))
        forged["profiles"][0]["measured_unix_s"] = late
        with pytest.raises(FieldError) as caught:
            await desk.exchange.take(json.dumps(forged), OURS)
        assert caught.value.field == "profiles[0].measured_unix_s"
    assert [one.ratio for one in await desk.profiles()] == [4.0]
    await desk.exchange.take(document(profile(now_unix_s + CLOCK_SLACK_S, ratio=5.0)), OURS)
    assert [one.ratio for one in await desk.profiles()] == [5.0], "clocks may differ by a day"


async def test_a_damaged_row_keeps_nothing_back_and_an_import_replaces_it(desk: Desk) -> None:
    good, other = profile(), profile(code="zstd")
    damaged = replace(record(other), document="{{{", updated_unix_s=1e308)
    await desk.store.profiles.upsert([record(good), damaged])
    stored = await desk.exchange.stored(ProfileFilter())
    assert stored.kv == (good,)
    assert [row.key for row in stored.unreadable] == [damaged.key]
    assert [one["arm_id"] for one in (await desk.exchange.export(ProfileKind.KV))["profiles"]] == [good.arm_id]
    # Of the row that can be read the one that is here stays, as ever.
    outcome = await desk.exchange.take(document(good, other), OURS)
    assert outcome == {"profiles": 2, "stored": 1, "kept": 1, "unmapped": []}
    assert {one.arm_id for one in (await desk.exchange.stored(ProfileFilter())).kv} == {good.arm_id, other.arm_id}
    assert not (await desk.exchange.stored(ProfileFilter())).unreadable
