"""From a worse codec's effects to a table without it, over a real store: audit, restarts, and the way back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path as FilePath

import pytest

from controld.candidates.profile import Profile, StageTime
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, ClassRule
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.obs.metrics import Metrics
from controld.planning.learning import Learning
from controld.planning.plane import Place
from controld.planning.planner import Planner
from controld.policy.model import (
    GuardPolicy,
    Objective,
    OnBreach,
    PlaneKind,
    Policy,
    PolicySet,
    ServiceClass,
    Tenant,
    Tier,
)
from controld.store.records import AuditEvent, EffectRecord, ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore

SELECTOR = Selector("sglang", "chat")
CODED = Configuration({"quantise": "levels", "key_levels": 12, "code": "entropy"})
SLOW_LINK = {"size_bytes": 20e6, "bandwidth_bytes_per_s": 2.5e6, "load": 0.0}


def policies(sample_share: float = 0.01, generation: int = 1) -> PolicySet:
    classes = tuple(
        ServiceClass(
            name=name, tenant="default",
            rule=ClassRule(name, extra_key=None if name == "default" else f"class={name}"), workload="general",
            tiers=(Tier.PD,), objective=Objective.LATENCY, slo=None, max_quality_loss_nats=0.02, explore_share=0.0,
        )
        for name in ("chat", "default")
    )  # fmt: skip
    policy = Policy(
        name="p", kind=PlaneKind.SGLANG, deployment="chat", links=(), tenants=(Tenant(name="default", weight=1.0),),
        classes=classes, guard=GuardPolicy(sample_share=sample_share, on_breach=OnBreach.PIN_OFF), source_file="p.yaml",
    )  # fmt: skip
    return PolicySet(generation, "h", (policy,))


class House:
    """A store, a fleet that nobody connects to, and a planner over them that may die and come back."""

    def __init__(self, store: SqliteStore) -> None:
        self.store, self.clock = store, ManualClock()
        self.metrics = Metrics()
        self.policies = policies()
        self.planner = self._new_planner()
        self.planner.learning.for_selector(SELECTOR).place = Place(
            model_fingerprint="m", sender_hardware="cpu", receiver_hardware="cpu"
        )
        self._seq = 0

    def _new_planner(self) -> Planner:
        fleet = FleetServer(self.store, clock=self.clock)
        return Planner(lambda: self.policies, self.store, fleet, self.metrics, self.clock, interval_s=1.0)

    async def kill_and_restart(self) -> None:
        self.planner = self._new_planner()
        await self.planner.restore()

    async def keep_profile(self, measured_unix_s: float) -> None:
        profile = Profile(
            configuration=CODED, workload="general", model_fingerprint="m", loss_mean_nats=0.01, loss_se_nats=0.001,
            loss_samples=12, worst_prompt_tokens=2048, ratio=4.5, encode=StageTime(1e-3, 5e-9),
            decode=StageTime(1e-3, 5e-9), median_transfer_bytes=14e6, sender_hardware="cpu", receiver_hardware="cpu",
            measured_unix_s=measured_unix_s, error_mean=0.03, error_log_sd=0.1, error_samples=12,
        )  # fmt: skip
        key = ProfileKey(
            model_fingerprint="m", workload="general", config_id=profile.arm_id, sender_hardware="cpu",
            receiver_hardware="cpu",
        )  # fmt: skip
        await self.store.profiles.upsert([ProfileRecord(key=key, document=profile.to_json(), updated_unix_s=1.0)])
        self.planner.profiles_changed()

    async def send(self, error: float | None, times: int = 1) -> None:
        """Transfers of the class chat, checked by their sender."""
        for _ in range(times):
            self._seq += 1
            effect = Effect(
                transfer_id=f"t{self._seq}", half=Half.SENDER, arm_id=CODED.config_id, table_version=1,
                service_class="chat", tier="pd", link_group="default", tokens=600, chunks=8, raw_bytes=14_000_000,
                wire_bytes=3_100_000, encode_s=0.07, wire_s=1.24, decode_s=0.07, wait_s=0.0, total_s=1.3,
                path=Path.CODED, verdict=Verdict.VERIFIED, bandwidth_bytes_per_s=2.5e6,
                finished_unix_s=self.clock.unix_s(), reconstruction_error=error,
            )  # fmt: skip
            record = EffectRecord(
                agent_id="prefill-0", instance_id="i", seq=self._seq, effect=effect,
                received_unix_s=self.clock.unix_s(),
            )  # fmt: skip
            await self.store.effects.append("prefill-0", "i", [record], up_to_seq=self._seq)
        await self.planner.plan_once()

    def arm(self, service_class: str) -> str:
        table = self.planner.plans[SELECTOR].tables[0].decision_table(version=1)
        return table.draw("x", service_class, **SLOW_LINK).arm.arm_id

    async def audited(self, event: AuditEvent) -> list[dict[str, str]]:
        return [json.loads(record.document) for record in await self.store.audit.recent(100, event)]


@pytest.fixture
async def house(tmp_path: FilePath) -> AsyncIterator[House]:
    store = await SqliteStore.open(tmp_path)
    made = House(store)
    await made.keep_profile(measured_unix_s=1.0)
    await made.planner.learning.enroll(SELECTOR, "prefill-0")
    await made.planner.plan_once()
    yield made
    await store.close()


async def test_a_worse_codec_leaves_the_table_of_its_class_within_three_checks(house: House) -> None:
    await house.send(0.03, times=30)
    assert (house.arm("chat"), house.arm("default")) == (CODED.config_id, CODED.config_id)
    await house.send(0.12, times=2)
    assert house.arm("chat") == CODED.config_id
    await house.send(0.12)
    assert (house.arm("chat"), house.arm("default")) == (RAW, CODED.config_id)
    (line,) = await house.audited(AuditEvent.ARM_PINNED_OFF)
    assert (line["arm_id"], line["service_class"]) == (CODED.config_id, "chat")
    assert "4 times the profiled 0.03" in line["reason"]
    assert "controld_arms_out_of_use" in house.metrics.exposition().decode()
    assert 'deployment="chat",kind="sglang"} 1.0' in house.metrics.exposition().decode()


async def test_a_breach_survives_a_kill_and_a_person_s_release_does_too(house: House) -> None:
    await house.send(0.12, times=3)
    before = house.planner.learning.to_document()
    await house.kill_and_restart()
    assert house.planner.learning.to_document() == before
    await house.planner.plan_once()
    assert house.arm("chat") == RAW
    assert await house.planner.release("0123456789abcdef", None) == []
    assert await house.planner.release(CODED.config_id, "other") == []
    ((selector, pin),) = await house.planner.release(CODED.config_id, "chat")
    assert (selector, pin.service_class) == (SELECTOR, "chat")
    (line,) = await house.audited(AuditEvent.ARM_RELEASED)
    assert line["reason"] == "by the operator"
    await house.kill_and_restart()
    await house.planner.plan_once()
    assert house.arm("chat") == CODED.config_id
    await house.send(0.12, times=3)
    assert house.arm("chat") == RAW, "still broken, so out again"
    assert len(await house.audited(AuditEvent.ARM_RELEASED)) == 1


async def test_a_profile_measured_after_the_breach_brings_the_arm_back(house: House) -> None:
    await house.send(0.12, times=3)
    await house.keep_profile(measured_unix_s=2.0)
    await house.planner.plan_once()
    assert house.arm("chat") == RAW, "a profile of before says nothing of it"
    await house.keep_profile(measured_unix_s=house.clock.unix_s() + 60)
    await house.planner.plan_once()
    assert house.arm("chat") == CODED.config_id


async def test_every_kill_point_ends_in_the_state_that_was_lost(house: House) -> None:
    for error in (0.03, None, 0.12, 0.02, 0.12, 0.12, 0.12):
        await house.send(error)
        successor = Learning(house.store)
        await successor.restore()
        assert successor.to_document() == house.planner.learning.to_document()


async def test_the_policy_s_share_is_in_the_published_table_and_follows_an_edit(house: House) -> None:
    def share() -> float:
        return house.planner.plans[SELECTOR].tables[0].decision_table(version=1).guard_sample

    assert share() == 0.01
    house.policies = policies(sample_share=0.25, generation=2)
    assert await house.planner.plan_once() == 1
    assert share() == 0.25
    house.policies = policies(sample_share=0.0, generation=3)
    assert await house.planner.plan_once() == 1
    assert share() == 0.0


async def test_a_restart_writes_no_pin_down_again_but_one_that_was_not_yet(house: House) -> None:
    await house.send(0.12, times=3)
    assert len(await house.audited(AuditEvent.ARM_PINNED_OFF)) == 1
    await house.kill_and_restart()
    await house.planner.plan_once()
    assert house.arm("chat") == RAW
    assert len(await house.audited(AuditEvent.ARM_PINNED_OFF)) == 1

    await house.planner.release(CODED.config_id, "chat")
    await house.planner.plan_once()
    house.planner.plan_once = no_plan  # type: ignore[method-assign]
    await house.send(0.12, times=3)  # durable effects, and the daemon dies before it looks at them
    await house.kill_and_restart()
    await house.planner.plan_once()
    assert house.arm("chat") == RAW
    assert len(await house.audited(AuditEvent.ARM_PINNED_OFF)) == 2


async def no_plan() -> int:
    return 0
