"""The planner: wakes when something changed, learns, decides, and publishes if a cell changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controld.candidates.profile import Profile
from controld.candidates.stored import StoredProfileReader
from controld.contract.clock import Clock
from controld.contract.decision import RAW
from controld.contract.effect import Half
from controld.contract.errors import ControldError
from controld.contract.size_estimator import SizeEstimator
from controld.contract.snapshot import CalibratedArtefact, ClassRules
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
from controld.planning.learning import Learned, Learning, Lessons, TableKey
from controld.planning.plane import (
    LINK_GROUP,
    Place,
    artefact_of,
    class_rules_of,
    class_workloads,
    observe_place,
    profiles_for,
    ready_profiles,
    resources_of,
    selector_of,
    table_requests,
    tiers_of,
    unlearned_classes,
)
from controld.planning.shared_decisions import SharedDecisions
from controld.planning.sharing import offered_shares
from controld.planning.tenants import TenantLedger, TenantReport
from controld.policy.model import PlaneKind, Policy, PolicySet
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, EffectRecord

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
_AUDIT_LINES = 10_000
LOOK_S = 0.1
"""Between two plans, news are looked at this often: as often as effects become durable."""
IDLE_REPLAN_S = 30.0
"""Without any news evidence still fades; look again this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What one policy is planned from at a moment, beside what was learned.

    Args:
        place: the model and the hardware.
        measured: the policy's profiles of that place; `profiles` are those of them that may be sent now.
        artefacts: calibrated artefacts that agents are to get.
        waiting: whether profiles wait for an artefact.
        alarm: what the operator should know; empty where all is well.
        shares: by tier the parts of the offered bytes by class; empty where they are not known.
    """

    place: Place
    measured: list[Profile]
    profiles: list[Profile]
    artefacts: Mapping[str, CalibratedArtefact]
    waiting: bool
    alarm: str
    shares: dict[str, dict[str, float]]


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
        self._artefacts = artefacts or ArtefactFolder(None)
        self.learning = Learning(store)
        self.sizes = SizeEstimator()
        self.plans: dict[Selector, Plan] = {}
        self.alarms: dict[Selector, str] = {}
        self._profiles: tuple[Profile, ...] = ()
        self._profile_reader = StoredProfileReader()
        self._profiles_are_stale = True
        self._offered: dict[Selector, frozenset[str]] = {}
        self._waiting_for_artefacts: dict[Selector, bool] = {}
        self._published_rules: dict[Selector, ClassRules] = {}
        self._pinned: dict[Selector, frozenset[tuple[str, str]]] = {}
        self._decisions = SharedDecisions()
        self._tenants = TenantLedger()
        self._shares: dict[Selector, dict[str, dict[str, float]]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._checkpoint_due_s = 0.0

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Something changed: policies, agents, effects."""
        self._wake.set()

    def profiles_changed(self) -> None:
        """A study has measured something."""
        self._profiles_are_stale = True
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
        await self._restore_audited_pins()
        await self._restore_plans()

    async def start(self) -> None:
        """Publish once, and go on planning. Raises: StoreError."""
        await self.plan_once()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="planner")

    async def stop(self) -> None:
        """Learn what is there, write it down, and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.learning.catch_up()
        await self.learning.checkpoint()

    async def _restore_audited_pins(self) -> None:
        """What the audit trail says is out of use is not written there again: what it does not say yet, is."""
        lines = [
            (record.sequence, record.event, record.document)
            for event in (AuditEvent.ARM_PINNED_OFF, AuditEvent.ARM_RELEASED)
            for record in await self._store.audit.recent(_AUDIT_LINES, event)
        ]
        for _, event, text in sorted(lines):
            try:
                document = json.loads(text)
                selector = Selector(document["kind"], document["deployment"])
                if selector.kind == PlaneKind.LONGLIVE.value:
                    continue  # `VideoPlanner`'s
                pin = frozenset({(str(document["arm_id"]), str(document["service_class"]))})
            except (ValueError, KeyError, TypeError) as error:
                _log.error("a line of the audit trail cannot be read: %s", error)
                continue
            known = self._pinned.get(selector, frozenset())
            self._pinned[selector] = known | pin if event is AuditEvent.ARM_PINNED_OFF else known - pin

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

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_REPLAN_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.plan_once()
            except Exception:  # noqa: BLE001 - the edge of the loop: planes keep the last good table meanwhile
                _log.exception("planning failed")
                self._metrics.internal_errors.labels("planner").inc()
            self._pace.planned(self._clock.monotonic_s())
            await self._rest()

    async def _rest(self) -> None:
        """Wait until the next plan may be made: an interval, or less where what is learned meanwhile is a surprise."""
        woken = False
        while True:
            now_s = self._clock.monotonic_s()
            left_s = self._pace.earliest_s(now_s, self._moved_log()) - now_s
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, LOOK_S))
            if self._wake.is_set():
                self._wake.clear()
                woken = True
                with contextlib.suppress(StoreError):  # the plan after the rest meets it again, and says so
                    await self._learn()
        if woken:
            self._wake.set()

    # ------------------------------------------------------------------------------------ one round

    def _moved_log(self) -> float:
        """Of the planes that a policy plans: nobody looks at what the others learned."""
        return self.learning.moved_log([selector_of(policy) for policy in self._policies().policies])

    async def plan_once(self) -> int:
        """Learn what is new, decide for every policy, publish what changed; how many versions were published."""
        await self._learn()
        if self._profiles_are_stale:
            await self._read_profiles()
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

    async def _read_profiles(self) -> None:
        """All profiles that can be read; one that cannot is left out and logged."""
        self._profiles_are_stale = False
        try:
            records = await self._store.profiles.list()
        except StoreError:
            self._profiles_are_stale = True
            raise
        stored = await asyncio.to_thread(self._profile_reader.read, records)
        for row in stored.unreadable:
            _log.error("%s: %s", row.where, row.what, extra={"config_id": row.key.config_id})
        self._profiles = stored.profiles

    async def _checkpoint(self) -> None:
        await self.learning.checkpoint()
        self._checkpoint_due_s = self._clock.monotonic_s() + CHECKPOINT_INTERVAL_S

    async def _plan_policy(self, policy: Policy, generation: int) -> bool:
        selector = selector_of(policy)
        lessons = self.learning.for_selector(selector)
        now = await self._situation(policy, lessons)
        self._waiting_for_artefacts[selector] = now.waiting
        self.alarms[selector] = now.alarm
        for tier in tiers_of(policy):
            lessons.learner(tier.value, LINK_GROUP)
        workloads = class_workloads(policy)
        if lessons.set_candidates(now.place, now.measured, unlearned_classes(policy), workloads):
            # A replay must compare with the same candidates, from this position on.
            await self._checkpoint()
        now_unix_s = self._clock.unix_s()
        learned = lessons.learned(now_unix_s)
        await self._note_pins(selector, learned)
        self._shares[selector] = now.shares
        requests = table_requests(policy, now.place, now.profiles, learned, now.shares)
        began_s = self._clock.monotonic_s()
        before = self.plans.get(selector)
        plan = await asyncio.to_thread(
            self._decisions.decide, requests, previous=before, policy_generation=generation, now_unix_s=now_unix_s
        )
        self._metrics.plan_seconds.observe(self._clock.monotonic_s() - began_s)
        rules_same = self._published_rules.get(selector) == class_rules_of(policy)
        offered = frozenset(now.artefacts)
        same = rules_same and self._offered.get(selector) == offered
        if same and self._fleet.desired(selector) is not None and plan_equal(before, plan):
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
        self._offered[selector] = offered
        self.plans[selector] = plan
        self._published_rules[selector] = class_rules_of(policy)
        self._metrics.plans.labels("published").inc()
        self._metrics.published_version.set(version)
        return True

    async def _situation(self, policy: Policy, lessons: Lessons) -> Situation:
        """What there is to plan from for a policy; changes nothing."""
        selector = selector_of(policy)
        sessions = [session for session in self._fleet.sessions() if session.identity.selector == selector]
        place, alarm = observe_place(lessons.place, [session.identity for session in sessions])
        measured = profiles_for(policy, place, self._profiles)
        artefacts = await asyncio.to_thread(self._artefacts.find, {artefact_of(one) for one in measured} - {""}, place)
        profiles, waiting = ready_profiles(measured, sessions, artefacts)
        known = {RAW, *(profile.arm_id for profile in measured)}
        unknown = [c.name for c in policy.classes if c.pin is not None and c.pin not in known]
        if unknown and not alarm:
            alarm = f"classes without a profile of their pinned arm stay raw: {', '.join(unknown)}"
        nowhere = waiting - artefacts.keys()
        if nowhere and sessions and not alarm:
            alarm = f"calibrated artefacts are neither here nor on every agent: {', '.join(sorted(nowhere))}"
        return Situation(
            place=place, measured=measured, profiles=profiles, artefacts=artefacts, waiting=bool(waiting), alarm=alarm,
            shares=self._offered_shares(policy, sessions),
        )  # fmt: skip

    async def dry_plan(self, policy: Policy) -> tuple[Plan, tuple[str, ...]]:
        """What would be decided for a policy at this moment, and notes on it: nothing is learned, stored, published.

        Raises:
            ControldError: it cannot be planned.
        """
        selector = selector_of(policy)
        lessons = self.learning.lessons.get(selector, Lessons()).copy()
        now = await self._situation(policy, lessons)
        for tier in tiers_of(policy):
            lessons.learner(tier.value, LINK_GROUP)
        lessons.set_candidates(now.place, now.measured, unlearned_classes(policy), class_workloads(policy))
        now_unix_s = self._clock.unix_s()
        requests = table_requests(policy, now.place, now.profiles, lessons.learned(now_unix_s), now.shares)
        plan = await asyncio.to_thread(
            self._decisions.decide, requests, previous=self.plans.get(selector), now_unix_s=now_unix_s
        )
        waits = "arms that name a calibrated artefact come into use once every receiver holds it" if now.waiting else ""
        return plan, tuple(note for note in (now.alarm, waits) if note)

    def _offered_shares(self, policy: Policy, sessions: Sequence[AgentSession]) -> dict[str, dict[str, float]]:
        """By tier; what was known stays while agents have nothing to tell."""
        known, found = self._shares.get(selector_of(policy), {}), {}
        for tier in tiers_of(policy):
            links = [
                link
                for session in sessions
                if session.connected and session.telemetry is not None
                for link in session.telemetry.links
                if (link.tier, link.link_group) == (tier.value, LINK_GROUP)
            ]
            found[tier.value] = offered_shares(policy, links, known.get(tier.value, {}))
        return found

    async def _note_pins(self, selector: Selector, learned: Mapping[TableKey, Learned]) -> None:
        """Write down which arms were taken out of use, and which came back."""
        pins = {(pin.arm_id, pin.service_class): pin.reason for _, board in learned.values() for pin in board.pins}
        before = self._pinned.get(selector, frozenset())
        for pinned in sorted(pins.keys() - before):
            _log.warning("arm out of use", extra={"arm_id": pinned[0], "class": pinned[1], "reason": pins[pinned]})
            await self._audit(AuditEvent.ARM_PINNED_OFF, selector, pinned, pins[pinned])
        for pinned in sorted(before - pins.keys()):
            await self._audit(AuditEvent.ARM_RELEASED, selector, pinned, "")
        self._pinned[selector] = frozenset(pins)
        self._metrics.arms_out.labels(selector.kind, selector.deployment).set(len(pins))

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
                await self._audit(AuditEvent.ARM_RELEASED, selector, (arm_id, pin.service_class), "by the operator")
                self._pinned[selector] = self._pinned.get(selector, frozenset()) - {(arm_id, pin.service_class)}
        if released:
            self.wake()
        return released

    async def _audit(self, event: AuditEvent, selector: Selector, pinned: tuple[str, str], reason: str) -> None:
        arm_id, service_class = pinned
        document = {
            "kind": selector.kind, "deployment": selector.deployment, "arm_id": arm_id,
            "service_class": service_class, "reason": reason,
        }  # fmt: skip
        await self._store.audit.append(event, json.dumps(document, sort_keys=True))

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
            self._published_rules.pop(selector, None)
            self._offered.pop(selector, None)
            self._shares.pop(selector, None)
            self._waiting_for_artefacts.pop(selector, None)
        return len(gone)
