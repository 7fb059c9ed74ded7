"""The planner: wakes when something changed, learns, decides, and publishes if a cell changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from controld.candidates.profile import Profile
from controld.contract.clock import Clock
from controld.contract.errors import ControldError
from controld.controller.decide import decide
from controld.controller.plan import Plan, plan_equal
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.learning import Learning
from controld.planning.plane import (
    LINK_GROUP,
    observe_place,
    profiles_for,
    resources_of,
    selector_of,
    table_requests,
    tiers_of,
    unlearned_classes,
)
from controld.policy.model import Policy, PolicySet
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import EffectRecord

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
IDLE_REPLAN_S = 30.0
"""Without any news evidence still fades; look again this often."""


class Planner:
    """A daemon component.

    Args:
        policies: the policy set in force.
        store, fleet, metrics, clock: as everywhere.
        interval_s: the least time between two plans.
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
    ) -> None:
        self._policies = policies
        self._store = store
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_s
        self.learning = Learning(store)
        self.plans: dict[Selector, Plan] = {}
        self.alarms: dict[Selector, str] = {}
        self._profiles: tuple[Profile, ...] | None = None
        self._published_rules: dict[Selector, int] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._checkpoint_due_s = 0.0

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Something changed: policies, agents, effects."""
        self._wake.set()

    def profiles_changed(self) -> None:
        """A study has measured something."""
        self._profiles = None
        self.wake()

    async def on_effects(self, session: AgentSession, effects: tuple[EffectRecord, ...]) -> None:
        """The fleet's callback: durable effects. They are counted here and learned from the store."""
        del session
        for record in effects:
            self._metrics.count_effect(record.effect)
        self.wake()

    async def on_session(self, session: AgentSession) -> None:
        """The fleet's callback: an agent came or went."""
        identity = session.identity
        if session.connected:
            await self.learning.enroll(Selector(identity.kind, identity.deployment), identity.agent_id)
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

    async def _restore_plans(self) -> None:
        """What was in use before a restart stays in use while it is as good as the best."""
        for policy in self._policies().policies:
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
            await asyncio.sleep(self._interval_s)

    # ------------------------------------------------------------------------------------ one round

    async def plan_once(self) -> int:
        """Learn what is new, decide for every policy, publish what changed; how many versions were published."""
        for _, feedback in await self.learning.catch_up():
            if feedback is not None:
                self._metrics.feedback.labels(feedback.value).inc()
        if self._profiles is None:
            records = await self._store.profiles.list()
            self._profiles = tuple(Profile.from_json(record.document) for record in records)
        policies = self._policies()
        published = 0
        for policy in policies.policies:
            published += await self._plan_policy(policy, policies.generation)
        published += await self._withdraw({selector_of(policy) for policy in policies.policies}, policies.generation)
        if self.learning.is_dirty and self._clock.monotonic_s() >= self._checkpoint_due_s:
            await self._checkpoint()
        return published

    async def _checkpoint(self) -> None:
        await self.learning.checkpoint()
        self._checkpoint_due_s = self._clock.monotonic_s() + CHECKPOINT_INTERVAL_S

    async def _plan_policy(self, policy: Policy, generation: int) -> bool:
        selector = selector_of(policy)
        lessons = self.learning.for_selector(selector)
        identities = [
            session.identity
            for session in self._fleet.sessions()
            if (session.identity.kind, session.identity.deployment) == (selector.kind, selector.deployment)
        ]
        place, alarm = observe_place(lessons.place, identities)
        self.alarms[selector] = alarm
        profiles = profiles_for(policy, place, self._profiles or ())
        for tier in tiers_of(policy):
            lessons.learner(tier.value, LINK_GROUP)
        if lessons.set_candidates(place, profiles, unlearned_classes(policy)):
            # A replay must compare with the same candidates, from this position on.
            await self._checkpoint()
        now_unix_s = self._clock.unix_s()
        requests = table_requests(policy, place, profiles, lessons.learned(now_unix_s))
        began_s = self._clock.monotonic_s()
        before = self.plans.get(selector)
        plan = await asyncio.to_thread(
            decide, requests, previous=before, policy_generation=generation, now_unix_s=now_unix_s
        )
        self._metrics.plan_seconds.observe(self._clock.monotonic_s() - began_s)
        rules_same = self._published_rules.get(selector) == hash(policy.rules)
        if rules_same and self._fleet.desired(selector) is not None and plan_equal(before, plan):
            self._metrics.plans.labels("unchanged").inc()
            # What it was decided from may have moved: the next round compares with this, and is free if nothing moved.
            self.plans[selector] = plan
            return False
        version = await self._fleet.publish(
            selector, resources_of(plan, policy), policy_generation=generation, explanations_json=plan.to_json()
        )
        self.plans[selector] = plan
        self._published_rules[selector] = hash(policy.rules)
        self._metrics.plans.labels("published").inc()
        self._metrics.published_version.set(version)
        return True

    async def _withdraw(self, named: set[Selector], generation: int) -> int:
        """Planes that no policy names any more go raw: what they have is taken away."""
        gone = [selector for selector in self.plans if selector not in named]
        for selector in gone:
            await self._fleet.publish(selector, [], policy_generation=generation)
            del self.plans[selector]
            self._published_rules.pop(selector, None)
        return len(gone)
