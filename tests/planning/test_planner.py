"""Planning over a real store and a real fleet: what is published when, and what survives a kill."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path as FilePath

import pytest

from controld.admin.candidates import Candidates
from controld.candidates.profile import Profile, StageTime
from controld.candidates.stored import ProfileFilter
from controld.contract.clock import ManualClock, SystemClock
from controld.contract.configuration import Configuration
from controld.contract.decision import ClassRule
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.controller.plan import Plan
from controld.fleet.identity import AgentIdentity
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.obs.metrics import Metrics
from controld.planning.learning import Learning
from controld.planning.plane import Place, observe_place
from controld.planning.planner import LOOK_S, Planner
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
from controld.store.records import EffectRecord, ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore

SELECTOR = Selector("sglang", "chat")
PLACE = Place(model_fingerprint="m", sender_hardware="cpu/2/1", receiver_hardware="cpu/2/1")
CODED = Configuration({"quantise": "levels", "key_levels": 12, "code": "entropy"})


def profile(**changes: object) -> Profile:
    values: dict[str, object] = {
        "configuration": CODED, "workload": "general", "model_fingerprint": "m", "loss_mean_nats": 0.01,
        "loss_se_nats": 0.001, "loss_samples": 12, "worst_prompt_tokens": 2048, "ratio": 4.5,
        "encode": StageTime(1e-3, 5e-9), "decode": StageTime(1e-3, 5e-9), "median_transfer_bytes": 14e6,
        "sender_hardware": "cpu/2/1", "receiver_hardware": "cpu/2/1",
    }  # fmt: skip
    return Profile(**{**values, **changes})  # type: ignore[arg-type]


def service_class(name: str, **changes: object) -> ServiceClass:
    values: dict[str, object] = {
        "name": name, "tenant": "default",
        "rule": ClassRule(name, extra_key=None if name == "default" else f"class={name}"),
        "workload": "general", "tiers": (Tier.PD,), "objective": Objective.LATENCY, "slo": None,
        "max_quality_loss_nats": 0.02, "explore_share": 0.02,
    }  # fmt: skip
    return ServiceClass(**{**values, **changes})  # type: ignore[arg-type]


def policy_set(*classes: ServiceClass, generation: int = 1) -> PolicySet:
    policy = Policy(
        name="p", kind=PlaneKind.SGLANG, deployment="chat", links=(), tenants=(Tenant(name="default", weight=1.0),),
        classes=(*classes, service_class("default", max_quality_loss_nats=0.0)),
        guard=GuardPolicy(sample_share=0.01, on_breach=OnBreach.PIN_OFF), source_file="p.yaml",
    )  # fmt: skip
    return PolicySet(generation, "h", (policy,))


def effect(number: int, **changes: object) -> Effect:
    raw_bytes = 14_000_000
    values: dict[str, object] = {
        "transfer_id": f"t{number}", "half": Half.SENDER, "arm_id": CODED.config_id, "table_version": 1,
        "service_class": "chat", "tier": "pd", "link_group": "default", "tokens": 600, "chunks": 8,
        "raw_bytes": raw_bytes, "wire_bytes": raw_bytes // 4, "encode_s": 0.3, "wire_s": 1.4, "decode_s": 0.3,
        "wait_s": 0.0, "total_s": 1.6, "path": Path.CODED, "verdict": Verdict.VERIFIED,
        "bandwidth_bytes_per_s": 2.5e6, "finished_unix_s": 1_700_000_000.0 + number,
    }  # fmt: skip
    return Effect(**{**values, **changes})  # type: ignore[arg-type]


class House:
    """A store, a fleet that nobody connects to, and a planner over them."""

    def __init__(self, store: SqliteStore, clock: ManualClock, policies: PolicySet) -> None:
        self.store, self.clock, self.policies = store, clock, policies
        self.fleet = FleetServer(store, clock=clock)
        self.planner = Planner(lambda: self.policies, store, self.fleet, Metrics(), clock, interval_s=1.0)
        self.planner.learning.for_selector(SELECTOR).place = PLACE

    async def keep(self, kept: Profile) -> None:
        key = ProfileKey(
            model_fingerprint=kept.model_fingerprint, workload=kept.workload, config_id=kept.arm_id,
            sender_hardware=kept.sender_hardware, receiver_hardware=kept.receiver_hardware,
        )  # fmt: skip
        await self.store.profiles.upsert([ProfileRecord(key=key, document=kept.to_json(), updated_unix_s=1.0)])
        self.planner.profiles_changed()

    async def happen(self, *effects: Effect, first_seq: int = 1) -> None:
        records = [
            EffectRecord(
                agent_id="prefill-0",
                instance_id="i",
                seq=first_seq + index,
                effect=item,
                received_unix_s=item.finished_unix_s + 0.1,
            )
            for index, item in enumerate(effects)
        ]
        await self.store.effects.append("prefill-0", "i", records, up_to_seq=records[-1].seq)

    def arm(self, name: str, size: float, rate: float) -> str:
        table = self.planner.plans[SELECTOR].tables[0].decision_table(version=1)
        return table.draw("x", name, size, rate, 0.0).arm.arm_id


@pytest.fixture
async def house(tmp_path: FilePath) -> AsyncIterator[House]:
    clock = ManualClock()
    store = await SqliteStore.open(tmp_path, clock=clock)
    yield House(store, clock, policy_set(service_class("chat", explore_share=0.0)))
    await store.close()


async def test_without_profiles_everything_is_raw_and_one_version_says_so(house: House) -> None:
    assert await house.planner.plan_once() == 1
    assert house.arm("chat", 20e6, 2.5e6) == "raw"
    assert await house.planner.plan_once() == 0, "nothing changed, nothing is published"


async def test_a_profile_changes_slow_cells_of_classes_that_allow_its_loss(house: House) -> None:
    await house.planner.plan_once()
    await house.keep(profile())
    assert await house.planner.plan_once() == 1
    assert house.arm("chat", 20e6, 2.5e6) == CODED.config_id
    assert house.arm("chat", 20e6, 1.25e9) == "raw"
    assert house.arm("default", 20e6, 2.5e6) == "raw", "default is lossless"


async def test_without_its_profile_an_arm_leaves_the_table(house: House) -> None:
    await house.keep(profile())
    await house.planner.plan_once()
    assert house.arm("chat", 20e6, 2.5e6) == CODED.config_id
    deleting = Candidates(house.store, house.fleet.sessions, house.planner.profiles_changed, house.clock)
    await deleting.delete(ProfileFilter(config_id=CODED.config_id), dry_run=True)
    assert await house.planner.plan_once() == 0, "nobody was told"
    await deleting.delete(ProfileFilter(config_id=CODED.config_id), dry_run=False)
    assert await house.planner.plan_once() == 1
    assert house.arm("chat", 20e6, 2.5e6) == "raw"


async def test_a_pinned_class_takes_its_arm_and_unlearned_ones_teach_nothing(house: House) -> None:
    await house.keep(profile())
    pinned = service_class("fixed", pin=CODED.config_id, rule=ClassRule("fixed", extra_key="class=fixed", learn=False))
    house.policies = policy_set(pinned, generation=2)
    await house.planner.learning.enroll(SELECTOR, "prefill-0")
    await house.planner.plan_once()
    assert house.arm("fixed", 20e6, 1.25e9) == CODED.config_id
    before = house.planner.learning.to_document()
    await house.happen(effect(1, service_class="fixed"))
    await house.planner.plan_once()
    [table], [old] = house.planner.learning.to_document()[0]["tables"], before[0]["tables"]
    assert table["arms"] == old["arms"]
    assert house.planner.learning.refused == {"unlearned_class": 1}


async def test_planes_that_no_policy_names_any_more_go_raw(house: House) -> None:
    await house.planner.plan_once()
    house.policies = PolicySet(2, "other", ())
    assert await house.planner.plan_once() == 1
    published = house.fleet.desired(SELECTOR)
    assert published is not None
    assert published.names == frozenset()
    assert await house.planner.plan_once() == 0


async def test_a_slow_codec_is_left_once_effects_show_it(house: House) -> None:
    await house.keep(profile())
    await house.planner.learning.enroll(SELECTOR, "prefill-0")
    await house.planner.plan_once()
    rate = 4e6
    assert house.arm("chat", 20e6, rate) == CODED.config_id
    slow = [effect(n, encode_s=12.0, decode_s=12.0, bandwidth_bytes_per_s=rate, wire_s=0.9) for n in range(12)]
    house.clock.advance(12)
    await house.happen(*slow)
    await house.planner.plan_once()
    assert house.arm("chat", 20e6, rate) == "raw"


async def test_what_was_learned_is_equal_after_a_kill_at_any_point(house: House, tmp_path: FilePath) -> None:
    await house.keep(profile())
    await house.planner.learning.enroll(SELECTOR, "prefill-0")
    await house.planner.plan_once()
    for step in range(6):
        house.clock.advance(3)
        await house.happen(*(effect(step * 10 + n, encode_s=0.1 * (n + 1)) for n in range(5)), first_seq=step * 10 + 1)
        await house.planner.plan_once()
        # A kill: nothing is written any more, and another process reads what is there.
        successor = Learning(house.store)
        await successor.restore()
        assert successor.to_document() == house.planner.learning.to_document()
        assert successor.position == house.planner.learning.position


async def test_effects_of_agents_that_nobody_enrolled_teach_nothing(house: House) -> None:
    await house.keep(profile())
    await house.planner.plan_once()
    before = house.planner.learning.to_document()
    await house.happen(effect(1))
    await house.planner.plan_once()
    assert house.planner.learning.to_document() == before


def agent(role: str, fingerprint: str = "m", threads: int = 1) -> AgentIdentity:
    return AgentIdentity(
        deployment="chat",
        agent_id=role,
        instance_id="i",
        kind="sglang",
        role=role,
        rank=0,
        role_peers=1,
        model_name="n",
        model_fingerprint=fingerprint,
        kv_dtype="bfloat16",
        kv_bytes_per_token=1,
        device="cpu",
        torch_version="2",
        threads=threads,
        config_hash="",
        space_json="",
        tiers=("pd",),
        resource_kinds=frozenset(),
        started_unix_s=1.0,
    )


def test_the_place_is_what_serving_agents_say_and_survives_their_absence() -> None:
    place, alarm = observe_place(Place(), [agent("prefill"), agent("decode", threads=2), agent("profiler", "other")])
    assert (place.model_fingerprint, place.sender_hardware, place.receiver_hardware) == ("m", "cpu/2/1", "cpu/2/2")
    assert not alarm
    assert observe_place(place, []) == (place, "")
    other, _ = observe_place(place, [agent("decode", threads=4)])
    assert dataclasses.replace(other, receiver_hardware=place.receiver_hardware) == place


def test_two_models_under_one_deployment_leave_no_model_and_an_alarm() -> None:
    place, alarm = observe_place(Place(), [agent("prefill", "m"), agent("decode", "other")])
    assert place == Place()
    assert "2 different models" in alarm


async def test_two_agents_that_come_at_once_are_both_enrolled(house: House) -> None:
    learning = house.planner.learning
    await asyncio.gather(*(learning.enroll(SELECTOR, f"agent-{n}") for n in range(8)), house.planner.plan_once())
    successor = Learning(house.store)
    await successor.restore()
    assert successor.for_selector(SELECTOR).agents == {f"agent-{n}" for n in range(8)}


async def test_an_invented_tier_makes_no_learner(house: House) -> None:
    await house.planner.learning.enroll(SELECTOR, "prefill-0")
    await house.planner.plan_once()
    before = set(house.planner.learning.for_selector(SELECTOR).learners)
    await house.happen(*(effect(n, tier=f"tier-{n}") for n in range(5)))
    await house.planner.plan_once()
    assert set(house.planner.learning.for_selector(SELECTOR).learners) == before
    assert house.planner.learning.refused == {"orphan": 5}


async def test_a_pin_without_a_profile_is_an_alarm(house: House) -> None:
    house.policies = policy_set(service_class("fixed", pin="0123456789abcdef"))
    await house.planner.plan_once()
    assert "fixed" in house.planner.alarms[SELECTOR]
    assert house.arm("fixed", 20e6, 2.5e6) == "raw"


async def test_a_profile_that_cannot_be_read_is_left_out(house: House) -> None:
    key = ProfileKey(model_fingerprint="m", workload="general", config_id="x", sender_hardware="", receiver_hardware="")
    await house.store.profiles.upsert([ProfileRecord(key=key, document='{"format": 99}', updated_unix_s=1.0)])
    await house.keep(profile())
    assert await house.planner.plan_once() == 1
    assert house.arm("chat", 20e6, 2.5e6) == CODED.config_id


async def test_a_surprise_is_planned_for_at_once_and_other_news_wait(house: House) -> None:
    """With an interval of an hour, only what contradicts the plan in force makes another one while this test runs."""
    planner = Planner(lambda: house.policies, house.store, house.fleet, Metrics(), SystemClock(), interval_s=3600.0)
    planner.learning.for_selector(SELECTOR).place = PLACE
    await house.keep(profile())
    await planner.start()
    await planner.learning.enroll(SELECTOR, "prefill-0")

    async def another_plan_than(before: Plan) -> Plan:
        async with asyncio.timeout(30):
            while planner.plans[SELECTOR] is before:
                await asyncio.sleep(LOOK_S / 10)
        return planner.plans[SELECTOR]

    planner.wake()
    plan = await another_plan_than(planner.plans[SELECTOR])
    await house.happen(effect(1, encode_s=0.071, decode_s=0.071))
    planner.wake()
    async with asyncio.timeout(30):
        while planner.learning.position != 1:
            await asyncio.sleep(LOOK_S / 10)
    await asyncio.sleep(3 * LOOK_S)
    assert planner.plans[SELECTOR] is plan, "what it learned was as predicted: it can wait"
    await house.happen(effect(2, encode_s=9.0), first_seq=2)
    planner.wake()
    assert await another_plan_than(plan) is not plan
    await planner.stop()
