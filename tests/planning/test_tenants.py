"""Tenants: their parts of the load reach the decisions, their weights the agents, and their effects the status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controld.contract.clock import SystemClock
from controld.contract.decision import RAW
from controld.contract.effect import Half
from controld.contract.effect import Path as EffectPath
from controld.contract.telemetry import LinkEstimate
from controld.controller.decide import decide
from controld.controller.plan import Plan
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.plane import table_requests
from controld.planning.planner import Planner
from controld.planning.sharing import SHARE_STEP, offered_shares
from controld.planning.tenants import HALF_LIFE_S, TenantLedger, slowdown_of
from controld.policy.model import Objective, Policy, PolicySet, Tenant
from controld.store.records import EffectRecord
from controld.store.sqlite import SqliteStore
from dataplanes.agent import Agent, AgentIdentity, AgentTiming
from tests.planning.test_planner import CODED, PLACE, SELECTOR, effect, policy_set, profile, service_class


def two_tenants(**weights: float) -> PolicySet:
    found = policy_set(service_class("chat", tenant="acme", explore_share=0.0))
    tenants = tuple(Tenant(name=name, weight=weights.get(name, 1.0)) for name in ("acme", "default"))
    return replace(found, policies=(replace(found.policies[0], tenants=tenants),))


@pytest.fixture
def policy() -> Policy:
    return two_tenants().policies[0]


@pytest.fixture
def plan(policy: Policy) -> Plan:
    return decide(table_requests(policy, PLACE, [profile()], {}))


def link(**by_class: float) -> LinkEstimate:
    return LinkEstimate(tier="pd", link_group="default", offered_by_class_bytes_per_s=by_class)


def test_shares_are_summed_over_agents_and_sum_to_one(policy: Policy) -> None:
    shares = offered_shares(policy, [link(chat=6e6, default=1e6), link(chat=2e6, stranger=9e9, default=1e6)], {})
    floor = SHARE_STEP / 2
    assert shares == pytest.approx({"chat": 0.8 * (1 - SHARE_STEP) + floor, "default": 0.2 * (1 - SHARE_STEP) + floor})
    assert offered_shares(policy, [link(chat=1e6)], {}) == pytest.approx({"chat": 1 - floor, "default": floor})


def test_many_idle_classes_make_no_load_of_their_own(policy: Policy) -> None:
    classes = tuple(replace(policy.classes[0], name=f"c{number}") for number in range(40))
    many = replace(policy, classes=(*classes, *policy.classes))
    shares = offered_shares(many, [link(c0=1e6)], {})
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["c0"] > 1 - SHARE_STEP and min(shares.values()) > 0


def test_a_share_stays_until_it_moved_by_a_step_and_while_nobody_offers_anything(policy: Policy) -> None:
    before = offered_shares(policy, [link(chat=0.5, default=0.5)], {})
    assert offered_shares(policy, [link(chat=0.54, default=0.46)], before) == before
    moved = offered_shares(policy, [link(chat=0.62, default=0.38)], before)
    assert moved["chat"] == pytest.approx(0.62 * (1 - SHARE_STEP) + SHARE_STEP / 2)
    assert sum(moved.values()) == pytest.approx(1.0)
    assert offered_shares(policy, [link()], before) == before
    assert offered_shares(policy, [], before) == before


def test_nothing_is_said_of_one_class_or_by_agents_that_do_not_tell(policy: Policy) -> None:
    one = policy_set().policies[0]
    assert [each.name for each in one.classes] == ["default"]
    assert offered_shares(one, [link(default=1.0)], {}) == {}
    assert offered_shares(policy, [LinkEstimate(tier="pd", link_group="default", offered_bytes_per_s=5.0)], {}) == {}
    assert offered_shares(policy, [link(chat=1e6)], {"gone": 1.0}).keys() == {"chat", "default"}
    assert offered_shares(policy, [], {"gone": 1.0}) == {}


def test_classes_of_one_tenant_share_an_overloaded_link_by_quality_too() -> None:
    """Raw for both does not fit, coded for both wastes quality: the first class may stay raw, the second is capped."""
    classes = tuple(service_class(name, objective=Objective.QUALITY, explore_share=0.0) for name in ("chat", "default"))
    policy = replace(policy_set().policies[0], classes=classes)
    shares = offered_shares(policy, [link(chat=1e6, default=1e6)], {})
    assert shares == pytest.approx({"chat": 0.5, "default": 0.5})

    def choices(offered: dict[str, dict[str, float]]) -> dict[str, str]:
        table = decide(table_requests(policy, PLACE, [profile()], {}, offered)).tables[0].decision_table(version=1)
        where = {"size_bytes": 20e6, "bandwidth_bytes_per_s": 2.5e6, "load": 1.2}
        return {name: table.draw("x", name, **where).arm.arm_id for name in ("chat", "default")}

    assert choices({"pd": shares}) == {"chat": RAW, "default": CODED.config_id}
    assert choices({}) == {"chat": CODED.config_id, "default": CODED.config_id}


def test_a_slowdown_is_the_time_over_the_time_alone(plan: Plan) -> None:
    alone = effect(0, wait_s=0.0, total_s=1.0)
    idle_s = 1.0 / (slowdown_of(plan, "chat", alone) or 0.0)
    waited = slowdown_of(plan, "chat", replace(alone, wait_s=2 * idle_s, total_s=idle_s))
    assert waited == pytest.approx(3.0)
    # 14 MB at 2.5 MB/s, a 4.5th of them on the wire; raw alone would take 5.6 s.
    assert 1.2 < idle_s < 1.6
    lossless = slowdown_of(plan, "default", replace(alone, total_s=5.6))
    assert lossless == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [{"path": EffectPath.FAILED}, {"raw_bytes": 0}, {"bandwidth_bytes_per_s": 0.0}, {"tier": "prefix_store"}],
)
def test_no_slowdown_where_none_is_known(plan: Plan, changes: dict[str, object]) -> None:
    assert slowdown_of(plan, "chat", effect(0, **changes)) is None
    assert slowdown_of(plan, "nobody", effect(0)) is None


def test_the_ledger_tells_bytes_slowdowns_and_how_fair_they_are(policy: Policy, plan: Plan) -> None:
    ledger = TenantLedger()
    (empty,) = ledger.report([policy], 0.0)
    assert [(t.transfers, t.slowdown) for t in empty.tenants] == [(0, None), (0, None)]
    assert empty.jain_index is None
    for number in range(10):
        ledger.observe(policy, plan, effect(number, total_s=1.4), 0.0)
        ledger.observe(policy, plan, effect(number, service_class="default", total_s=5.6), 0.0)
        ledger.observe(policy, plan, effect(number, half=Half.RECEIVER, total_s=99.0), 0.0)
    (fair,) = ledger.report([policy], 0.0)
    acme, default = fair.tenants
    assert (acme.name, acme.transfers, acme.raw_bytes, acme.wire_bytes) == ("acme", 10, 140_000_000, 35_000_000)
    assert acme.slowdown == pytest.approx(1.0, abs=0.1)
    assert default.slowdown == pytest.approx(1.0, abs=0.1)
    assert fair.jain_index is not None and fair.jain_index > 0.99
    for number in range(10):
        # A class that nobody knows belongs to default, as it was drawn.
        ledger.observe(policy, plan, effect(number, service_class="stranger", wait_s=100.0, total_s=5.6), 0.0)
    (unfair,) = ledger.report([policy], 0.0)
    assert unfair.jain_index is not None and unfair.jain_index < 0.7
    (faded,) = ledger.report([policy], 20 * HALF_LIFE_S)
    assert faded.jain_index is None and faded.tenants[0].transfers == 10
    assert ledger.report([], 0.0) == []
    assert ledger.report([policy], 0.0)[0].tenants[0].transfers == 0, "a policy that went away is forgotten"


def test_fairness_is_by_weight(plan: Plan) -> None:
    weighted = two_tenants(acme=3.0, default=1.0).policies[0]
    ledger = TenantLedger()
    for number in range(5):
        # The third of the weight, three times the loss.
        ledger.observe(weighted, plan, effect(number, wait_s=1.4, total_s=1.4), 0.0)
        ledger.observe(weighted, plan, effect(number, service_class="default", wait_s=16.8, total_s=5.6), 0.0)
    (report,) = ledger.report([weighted], 0.0)
    assert [tenant.share for tenant in report.tenants] == [0.75, 0.25]
    assert report.jain_index is not None and report.jain_index > 0.99


class Daemon:
    """Store, fleet and planner with two tenants."""

    def __init__(self, store: SqliteStore) -> None:
        self.policies = two_tenants()
        self.fleet = FleetServer(store, on_session=self._on_session, on_effects=self._on_effects)
        self.planner = Planner(lambda: self.policies, store, self.fleet, Metrics(), SystemClock(), interval_s=0.02)

    async def _on_session(self, session: AgentSession) -> None:
        await self.planner.on_session(session)

    async def _on_effects(self, session: AgentSession, effects: tuple[EffectRecord, ...]) -> None:
        await self.planner.on_effects(session, effects)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    store = await SqliteStore.open(tmp_path / "state")
    daemon = Daemon(store)
    await daemon.fleet.start([f"unix://{tmp_path}/fleet.sock"])
    await daemon.planner.start()
    yield daemon
    await daemon.planner.stop()
    await daemon.fleet.stop(0.5)
    await store.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_real_agent_gets_the_weights_and_tells_the_loads(daemon: Daemon, tmp_path: Path) -> None:
    identity = AgentIdentity(deployment="chat", agent_id="prefill-0", kind="sglang", role="prefill", tiers=("pd",))
    agent = Agent(identity, f"unix://{tmp_path}/fleet.sock", timing=AgentTiming(telemetry_interval_s=0.05))
    agent.start()
    try:
        await eventually(lambda: agent.tenancy().weights == {"acme": 0.5, "default": 0.5})
        assert agent.tenancy().tenant(agent.classify(extra_key="class=chat", priority=None)) == "acme"
        daemon.policies = replace(two_tenants(acme=3.0), generation=2)
        daemon.planner.wake()
        await eventually(lambda: agent.tenancy().weights == {"acme": 0.75, "default": 0.25})

        for _ in range(3):
            agent.offered(tier="pd", raw_bytes=14_000_000, service_class="chat")
        agent.offered(tier="pd", raw_bytes=14_000_000)
        agent.report(effect(0, arm_id=CODED.config_id))

        def shares() -> dict[str, float | None]:
            daemon.planner.wake()
            goals = (item.goal for item in daemon.planner.plans[SELECTOR].tables[0].classes)
            return {goal.name: goal.offered_share for goal in goals}

        await eventually(lambda: shares() == pytest.approx({"chat": 0.75, "default": 0.25}, abs=0.06))
        weights = {item.goal.name: item.goal.tenant_weight for item in daemon.planner.plans[SELECTOR].tables[0].classes}
        assert weights == {"chat": 3.0, "default": 1.0}
        await eventually(lambda: daemon.planner.tenants()[0].tenants[0].transfers == 1)
    finally:
        agent.close()
