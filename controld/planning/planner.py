"""The planner: wakes when something changed, learns, decides, and publishes if a cell changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from controld.candidates.profile import Profile
from controld.candidates.stored import StoredProfileReader
from controld.contract.clock import Clock
from controld.contract.effect import Half
from controld.contract.errors import ControldError
from controld.contract.size_estimator import SizeEstimator
from controld.contract.snapshot import ClassRules
from controld.contract.telemetry import Telemetry
from controld.contract.trial import SegmentLoss
from controld.controller.guard import Pin
from controld.controller.pacing import Pace
from controld.controller.plan import Plan, plan_equal
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.artefacts import ArtefactFolder
from controld.planning.known_profiles import KnownProfiles
from controld.planning.learning import Learning, Lessons
from controld.planning.loop import PlanningLoop
from controld.planning.pin_trail import PinTrail
from controld.planning.plane import (
    LINK_GROUP,
    class_rules_of,
    class_workloads,
    resources_of,
    selector_of,
    table_requests,
    tiers_of,
    unlearned_classes,
)
from controld.planning.shared_decisions import SharedDecisions
from controld.planning.situation import Shares, Situation, observe_situation
from controld.planning.tenants import TenantLedger, TenantReport
from controld.policy.model import PlaneKind, Policy, PolicySet
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import EffectRecord

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
LOOK_S = 0.1
"""Between two plans, news are looked at this often: as often as effects become durable."""
IDLE_REPLAN_S = 30.0
"""Without any news evidence still fades; look again this often."""


class Planner:
    """A daemon component.

    Args:
        policies: the policy set in force.
        store, fleet, metrics, clock: as everywhere.
        artefacts: where calibrated artefacts are looked up.
        interval_s: the least time between two plans that no surprise calls for.
    """

    def __init__(
        self,
        policies: Callable[[], PolicySet],
        store: Store,
        fleet: FleetServer,
        metrics: Metrics,
        clock: Clock,
        *,
        interval_s: float,
        artefacts: ArtefactFolder | None = None,
    ) -> None:
        self._policies = policies
        self._store = store
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._pace = Pace(interval_s)
        self._loop = PlanningLoop("planner", self.plan_once, self._rest, idle_s=IDLE_REPLAN_S, metrics=metrics)
        self._artefacts = artefacts or ArtefactFolder(None)
        self._stored = KnownProfiles(store, StoredProfileReader())
        self._pin_trail = PinTrail(store.audit)
        self.learning = Learning(store)
        self.sizes = SizeEstimator()
        self.plans: dict[Selector, Plan] = {}
        self.alarms: dict[Selector, str] = {}
        self._published: dict[Selector, tuple[ClassRules, frozenset[str]]] = {}
        self._waiting_for_artefacts: dict[Selector, bool] = {}
        self._decisions = SharedDecisions()
        self._tenants = TenantLedger()
        self._shares: dict[Selector, Shares] = {}
        self._checkpoint_due_s = 0.0

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Something changed: policies, agents, effects."""
        self._loop.wake()

    def profiles_changed(self) -> None:
        """A study has measured something."""
        self._stored.changed()
        self.wake()

    async def on_effects(self, session: AgentSession, effects: tuple[EffectRecord, ...]) -> None:
        """The fleet's callback: durable effects. They are counted here and learned from the store."""
        policies = self._policies()
        classes = {c.name for policy in policies.policies for c in policy.classes}
        policy = policies.for_plane(session.identity.kind, session.identity.deployment)
        plan = self.plans.get(selector_of(policy)) if policy is not None else None
        for record in effects:
            self._metrics.count_effect(record.effect, classes)
            if record.effect.half is Half.SENDER and record.effect.service_class in classes:
                self.sizes.observe(self._clock.monotonic_s(), record.effect.service_class, record.effect.raw_bytes)
            if policy is not None:
                self._tenants.observe(policy, plan, record.effect, self._clock.monotonic_s())
        self.wake()

    def tenants(self) -> list[TenantReport]:
        """What each policy's tenants had, and how fairly."""
        return self._tenants.report(self._policies().policies, self._clock.monotonic_s())

    async def on_session(self, session: AgentSession) -> None:
        """The fleet's callback: an agent came or went."""
        if session.connected:
            await self.learning.enroll(session.identity.selector, session.agent_id)
        self.wake()

    async def on_telemetry(self, session: AgentSession, telemetry: Telemetry) -> None:
        """The fleet's callback: an agent may hold what no policy stands for any more, or what arms waited for."""
        selector = session.identity.selector
        holds_what_is_gone = telemetry.applied_version and self._fleet.desired(selector) is None
        if holds_what_is_gone or self._waiting_for_artefacts.get(selector):
            self.wake()

    def guard_looks(self) -> dict[str, int]:
        """What the quality guard made of measured errors and losses since the daemon started."""
        found = Counter[str]()
        for lessons in self.learning.lessons.values():
            for learner in lessons.learners.values():
                found.update({look.value: number for look, number in learner.quality.looks.items()})
        return dict(found)

    def profiles_in_use(self, selector: Selector) -> tuple[Profile, ...]:
        """The profiles that a selector's effects are compared with."""
        lessons = self.learning.lessons.get(selector)
        return () if lessons is None else lessons.profiles

    def probed_segments(self, selector: Selector, arm_id: str) -> int:
        """How many segments of an arm's probes count already."""
        return self.learning.probed_segments(selector, arm_id)

    async def take_probe(self, policy: Policy, profile: Profile, losses: Sequence[SegmentLoss]) -> None:
        """What a profiling worker measured again of an arm.

        Raises:
            StoreError: it counts, but is not durable yet.
        """
        limits = {
            c.name: c.max_quality_loss_nats
            for c in policy.classes
            # A class that the arm was never good enough for has nothing to lose.
            if c.workload == profile.workload and profile.loss_upper_nats <= c.max_quality_loss_nats
        }
        try:
            await self.learning.take_probe(selector_of(policy), profile, losses, limits, self._clock.unix_s())
        finally:
            self.wake()

    # ------------------------------------------------------------------------------------ life

    async def restore(self) -> None:
        """Take over what an earlier process learned and decided; before any agent is let in. Raises: StoreError."""
        try:
            await self.learning.restore()
        except ControldError as error:
            if isinstance(error, StoreError):
                raise
            # What cannot be understood must not stop serving: learning starts over, and says so.
            _log.exception("what was learned is lost", extra={"code": error.code})
            self._metrics.internal_errors.labels("restore").inc()
            self.learning = Learning(self._store)
        await self._pin_trail.restore()
        await self._restore_plans()

    async def start(self) -> None:
        """Publish once, and go on planning. Raises: StoreError."""
        await self._loop.start()

    async def stop(self) -> None:
        """Learn what is there, write it down, and end."""
        await self._loop.stop()
        await self.learning.catch_up()
        await self.learning.checkpoint()

    async def _restore_plans(self) -> None:
        """What was in use before a restart stays in use while it is as good as the best."""
        for policy in self._policies().policies:
            if policy.kind is PlaneKind.LONGLIVE:
                continue
            selector = selector_of(policy)
            record = await self._store.versions.latest(selector.kind, selector.deployment)
            if record is None:
                continue
            try:
                self.plans[selector] = Plan.from_json(record.explanations_json)
            except ControldError as error:
                _log.warning("the last plan cannot be read: %s", error, extra={"version": record.number})

    async def _rest(self) -> None:
        """Wait until the next plan may be made: an interval, or less where what is learned meanwhile is a surprise."""
        self._pace.planned(self._clock.monotonic_s())
        woken = False
        while True:
            now_s = self._clock.monotonic_s()
            left_s = self._pace.earliest_s(now_s, self._moved_log()) - now_s
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, LOOK_S))
            if self._loop.take_wake():
                woken = True
                with contextlib.suppress(StoreError):  # the plan after the rest meets it again, and says so
                    await self._learn()
        if woken:
            self.wake()

    # ------------------------------------------------------------------------------------ one round

    def _moved_log(self) -> float:
        """Of the planes that a policy plans: nobody looks at what the others learned."""
        return self.learning.moved_log([selector_of(policy) for policy in self._policies().policies])

    async def plan_once(self) -> int:
        """Learn what is new, decide for every policy, publish what changed; how many versions were published."""
        await self._learn()
        await self._stored.refresh()
        policies = self._policies()
        published = 0
        for policy in policies.policies:
            if policy.kind is PlaneKind.LONGLIVE:
                continue  # `VideoPlanner` gives an engine its setting
            try:
                published += await self._plan_policy(policy, policies.generation)
            except StoreError:
                raise
            except ControldError as error:
                # One policy that cannot be planned must not keep the others from it.
                self.alarms[selector_of(policy)] = f"not planned: {error}"
                self._metrics.plans.labels("failed").inc()
                _log.error("policy %s not planned: %s", policy.name, error, extra={"code": error.code})
        published += await self._withdraw({selector_of(policy) for policy in policies.policies}, policies.generation)
        if self.learning.is_dirty and self._clock.monotonic_s() >= self._checkpoint_due_s:
            await self._checkpoint()
        return published

    async def _learn(self) -> None:
        """Take in what became durable since. Raises: StoreError."""
        for _, feedback in await self.learning.catch_up():
            if feedback is not None:
                self._metrics.feedback.labels(feedback.value).inc()

    async def _checkpoint(self) -> None:
        await self.learning.checkpoint()
        self._checkpoint_due_s = self._clock.monotonic_s() + CHECKPOINT_INTERVAL_S

    async def _plan_policy(self, policy: Policy, generation: int) -> bool:
        selector = selector_of(policy)
        lessons = self.learning.for_selector(selector)
        now = await self._situation(policy, lessons)
        self._waiting_for_artefacts[selector] = now.waiting
        self.alarms[selector] = now.alarm
        if _teach(lessons, policy, now):
            # A replay must compare with the same candidates, from this position on.
            await self._checkpoint()
        now_unix_s = self._clock.unix_s()
        learned = lessons.learned(now_unix_s)
        out = await self._pin_trail.note(selector, (pin for _, board in learned.values() for pin in board.pins))
        self._metrics.arms_out.labels(selector.kind, selector.deployment).set(out)
        self._shares[selector] = now.shares
        requests = table_requests(policy, now.place, now.profiles, learned, now.shares)
        began_s = self._clock.monotonic_s()
        before = self.plans.get(selector)
        plan = await asyncio.to_thread(
            self._decisions.decide, requests, previous=before, policy_generation=generation, now_unix_s=now_unix_s
        )
        self._metrics.plan_seconds.observe(self._clock.monotonic_s() - began_s)
        wanted = class_rules_of(policy), frozenset(now.artefacts)
        same = self._published.get(selector) == wanted and self._fleet.desired(selector) is not None
        if same and plan_equal(before, plan):
            self._metrics.plans.labels("unchanged").inc()
            # What it was decided from may have moved: the next round compares with this, and is free if nothing moved.
            self.plans[selector] = plan
            return False
        version = await self._fleet.publish(
            selector,
            resources_of(plan, policy, now.artefacts),
            policy_generation=generation,
            explanations_json=plan.to_json(),
        )
        self.plans[selector] = plan
        self._published[selector] = wanted
        self._metrics.plans.labels("published").inc()
        self._metrics.published_version.set(version)
        return True

    async def _situation(self, policy: Policy, lessons: Lessons) -> Situation:
        """What there is to plan from for a policy; changes nothing."""
        selector = selector_of(policy)
        return await observe_situation(
            policy,
            [session for session in self._fleet.sessions() if session.identity.selector == selector],
            self._stored.profiles,
            self._artefacts,
            place=lessons.place,
            shares=self._shares.get(selector, {}),
        )

    async def dry_plan(self, policy: Policy) -> tuple[Plan, tuple[str, ...]]:
        """What would be decided for a policy at this moment, and notes on it: nothing is learned, stored, published.

        Raises:
            ControldError: it cannot be planned.
        """
        selector = selector_of(policy)
        lessons = self.learning.lessons.get(selector, Lessons()).copy()
        now = await self._situation(policy, lessons)
        _teach(lessons, policy, now)
        now_unix_s = self._clock.unix_s()
        requests = table_requests(policy, now.place, now.profiles, lessons.learned(now_unix_s), now.shares)
        plan = await asyncio.to_thread(
            self._decisions.decide, requests, previous=self.plans.get(selector), now_unix_s=now_unix_s
        )
        waits = "arms that name a calibrated artefact come into use once every receiver holds it" if now.waiting else ""
        return plan, tuple(note for note in (now.alarm, waits) if note)

    async def release(self, arm_id: str, deployment: str | None) -> list[tuple[Selector, Pin]]:
        """A person's word that an arm may be used again; the pins that there were.

        Args:
            deployment: of the planes; None: wherever it is pinned.

        Raises:
            StoreError: it could not be written down.
        """
        released = []
        for selector in sorted(self.learning.lessons, key=lambda s: (s.kind, s.deployment)):
            if deployment not in (None, selector.deployment):
                continue
            for pin in await self.learning.release(arm_id, selector, self._clock.unix_s()):
                released.append((selector, pin))
                await self._pin_trail.note_release(selector, pin)
        if released:
            self.wake()
        return released

    async def _withdraw(self, named: set[Selector], generation: int) -> int:
        """Planes that no policy names any more go raw: what they have is taken away."""
        # Agents may hold what an earlier process published for a policy that went away while it was down.
        holding = {session.identity.selector for session in self._fleet.sessions() if session.effective_version}
        stale = {
            selector
            for selector in holding
            if self._fleet.desired(selector) is None and selector.kind != PlaneKind.LONGLIVE
        }
        gone = (set(self.plans) | stale) - named
        for selector in gone:
            await self._fleet.publish(selector, [], policy_generation=generation)
            self.plans.pop(selector, None)
            self.alarms.pop(selector, None)
            self._published.pop(selector, None)
            self._shares.pop(selector, None)
            self._waiting_for_artefacts.pop(selector, None)
        return len(gone)


def _teach(lessons: Lessons, policy: Policy, now: Situation) -> bool:
    """Compare effects with the policy's profiles of this place from now on; whether they are others than before."""
    for tier in tiers_of(policy):
        lessons.learner(tier.value, LINK_GROUP)
    return lessons.set_candidates(now.place, now.measured, unlearned_classes(policy), class_workloads(policy))
