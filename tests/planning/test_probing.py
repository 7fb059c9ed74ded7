"""From a policy's `probe_every` to an arm out of use: a real fleet server and a real agent, whose codec gets worse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controld.contract.clock import ManualClock, SystemClock
from controld.contract.decision import RAW
from controld.contract.trial import SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.learning import Learning
from controld.planning.planner import Planner
from controld.planning.probing import DEADLINE_S, PROBE_STUDY, SEGMENTS, Prober
from controld.policy.model import PolicySet
from controld.profiling.service import StudyService
from controld.store.records import AuditEvent, ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.agent import Agent, AgentIdentity
from tests.planning.test_planner import CODED, PLACE, SELECTOR, policy_set, profile, service_class

EVERY_S = 3600.0


def probed_policies() -> PolicySet:
    found = policy_set(service_class("chat", explore_share=0.0))
    (policy,) = found.policies
    return replace(found, policies=(replace(policy, guard=replace(policy.guard, probe_every_s=EVERY_S)),))


class House:
    """The daemon's parts over a real fleet server; probes and plans are made when the test says so."""

    def __init__(self, store: SqliteStore, address: str) -> None:
        self.store, self.address, self.clock, self.metrics = store, address, ManualClock(), Metrics()
        self.policies = probed_policies()
        self.fleet = FleetServer(store, clock=SystemClock(), on_trial_result=self._on_trial_result)
        self.planner = Planner(lambda: self.policies, store, self.fleet, self.metrics, self.clock, interval_s=1.0)
        self.planner.learning.for_selector(SELECTOR).place = PLACE
        self.studies = StudyService(store, self.fleet, self.clock)
        self.prober = self.new_prober()

    def new_prober(self) -> Prober:
        """As a process that begins has it."""
        return Prober(
            lambda: self.policies,
            self.planner,
            self.studies.trials,
            self.fleet,
            self.metrics,
            self.clock,
            review_s=60.0,
        )

    async def _on_trial_result(self, session: AgentSession, outcome: TrialOutcome) -> None:
        assert outcome.study_id == PROBE_STUDY
        await self.prober.on_trial_result(session, outcome)

    async def keep_profile(self) -> None:
        kept = profile()
        key = ProfileKey(
            model_fingerprint="m", workload="general", config_id=kept.arm_id, sender_hardware="cpu/2/1",
            receiver_hardware="cpu/2/1",
        )  # fmt: skip
        await self.store.profiles.upsert([ProfileRecord(key=key, document=kept.to_json(), updated_unix_s=1.0)])

    def probes(self, outcome: str) -> float:
        return self.metrics.probes.labels(outcome)._value.get()

    async def probe(self, outcome: str = "measured") -> None:
        """Let one interval pass, and the worker answer."""
        before = self.probes(outcome)
        self.clock.advance(EVERY_S)
        await self.prober.review()
        await self.until(lambda: self.probes(outcome) == before + 1)
        await self.planner.plan_once()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    def arm(self, service_class_name: str) -> str:
        table = self.planner.plans[SELECTOR].tables[0].decision_table(version=1)
        return table.draw("x", service_class_name, 20e6, 2.5e6, 0.0).arm.arm_id


class Worker:
    """A profiling worker whose losses the test sets."""

    def __init__(self, address: str) -> None:
        self.loss_nats, self.status = 0.01, TrialStatus.MEASURED
        self.asked: list[TrialTask] = []
        identity = AgentIdentity(
            deployment="chat", agent_id="w0", kind="sglang", role="profiler", tiers=(), model_fingerprint="m"
        )
        self.agent = Agent(identity, address)
        self.agent.on_trial(self._measure)
        self.agent.start()

    def _measure(self, task: TrialTask, _progress: object, _cancelled: object) -> TrialOutcome:
        self.asked.append(task)
        losses = tuple(
            SegmentLoss(
                prompt_tokens=task.prompt_tokens[0], segment=task.first_segment + index, loss_nats=self.loss_nats,
                top1_agreement=1.0,
            )
            for index in range(task.segments_per_length)
        )  # fmt: skip
        return TrialOutcome(
            study_id=task.study_id, trial_id=task.trial_id, status=self.status, losses=losses, seconds=1.0
        )


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    store = await SqliteStore.open(tmp_path / "state")
    made = House(store, f"unix://{tmp_path}/fleet.sock")
    await made.keep_profile()
    await made.fleet.start([made.address])
    await made.planner.plan_once()
    yield made
    await made.prober.stop()
    await made.fleet.stop(0.5)
    await store.close()


@pytest.fixture
def start_worker(house: House) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(house.address))
        return workers[-1]

    yield start
    for worker in workers:
        worker.agent.close()


async def test_an_arm_whose_loss_grew_is_out_after_two_probes_and_says_why(
    house: House, start_worker: Callable[[], Worker]
) -> None:
    worker = start_worker()
    await house.until(lambda: any(s.connected for s in house.fleet.sessions()))
    await house.prober.review()
    assert not worker.asked, "the first is due an interval after the start"
    await house.probe()
    await house.probe()
    assert house.arm("chat") == CODED.config_id
    first, second = worker.asked
    assert (first.lossy, first.coders) == (CODED.lossy_part, (str(CODED["code"]),))
    assert (first.prompt_tokens, first.segments_per_length) == ((2048,), SEGMENTS)
    assert first.first_segment == 12, "after those that were profiled"
    assert second.first_segment == 12 + SEGMENTS

    worker.loss_nats = 0.08
    await house.probe()
    assert house.arm("chat") == CODED.config_id, "two segments condemn nobody"
    await house.probe()
    assert house.arm("chat") == RAW
    ((_, board),) = house.planner.learning.lessons[SELECTOR].learned(house.clock.unix_s()).values()
    (pin,) = board.pins
    assert pin.service_class == "chat"
    assert "lost 0.08 nats per token over 3 segments, above the limit of 0.02" in pin.reason
    (line,) = await house.store.audit.recent(10, AuditEvent.ARM_PINNED_OFF)
    assert "0.08 nats" in line.document
    assert house.planner.guard_looks()["breach"] == 1

    successor = Learning(house.store)
    await successor.restore()
    assert successor.to_document() == house.planner.learning.to_document(), "probes are durable at once"
    await house.prober.review()
    house.clock.advance(EVERY_S)
    await house.prober.review()
    assert len(worker.asked) == 4, "an arm out of use is not probed"


async def test_a_restart_asks_for_no_segment_that_counts_already(
    house: House, start_worker: Callable[[], Worker]
) -> None:
    worker = start_worker()
    await house.until(lambda: any(s.connected for s in house.fleet.sessions()))
    await house.probe()
    house.prober = house.new_prober()
    await house.probe()
    assert [task.first_segment for task in worker.asked] == [12, 12 + SEGMENTS]


async def test_a_probe_that_fails_begins_anew_with_the_first_segment(
    house: House, start_worker: Callable[[], Worker]
) -> None:
    worker = start_worker()
    await house.until(lambda: any(s.connected for s in house.fleet.sessions()))
    worker.status = TrialStatus.INFEASIBLE
    await house.probe("infeasible")
    worker.status = TrialStatus.MEASURED
    await house.probe()
    assert [task.first_segment for task in worker.asked] == [12, 0]
    assert len({task.trial_id for task in worker.asked}) == 2


async def test_nobody_is_asked_where_no_worker_is_idle_or_nothing_is_due(
    house: House, start_worker: Callable[[], Worker]
) -> None:
    house.clock.advance(EVERY_S)
    await house.prober.review()
    worker = start_worker()
    await house.until(lambda: any(s.connected for s in house.fleet.sessions()))
    lent = house.studies.trials.lend("sglang", "m")
    assert lent is not None and lent.agent_id == "w0"
    await house.prober.review()
    assert not worker.asked, "somebody else has it"
    assert house.studies.trials.lend("sglang", "m") is None
    house.studies.trials.give_back("w0")
    assert house.studies.trials.lend("sglang", "another model") is None
    house.policies = policy_set(service_class("chat", explore_share=0.0), generation=2)
    await house.prober.review()
    assert not worker.asked, "a policy without `probe_every` wants none"
    house.policies = replace(probed_policies(), generation=3)
    await house.prober.review()
    await house.until(lambda: house.probes("measured") == 1)
    await house.prober.review()
    assert len(worker.asked) == 1, "the budget is one an interval"


async def test_a_worker_that_is_gone_or_too_slow_is_given_up(house: House, start_worker: Callable[[], Worker]) -> None:
    worker = start_worker()
    await house.until(lambda: any(s.connected for s in house.fleet.sessions()))
    worker.status = TrialStatus.PROGRESS  # it says how far it is, and never more
    house.clock.advance(EVERY_S)
    await house.prober.review()
    await house.until(lambda: len(worker.asked) == 1)
    house.clock.advance(DEADLINE_S + 1)
    await house.prober.review()
    assert house.probes("too_late") == 1
    house.clock.advance(EVERY_S)
    await house.prober.review()
    worker.agent.close()
    await house.until(lambda: not any(s.connected for s in house.fleet.sessions()))
    await house.prober.review()
    assert house.probes("worker_gone") == 1
