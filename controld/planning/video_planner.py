"""Plans the settings of video engines: hears what they serve and how fast, decides, publishes what changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from controld.candidates.stored import StoredVideoReader
from controld.candidates.video_profile import VideoProfile
from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError
from controld.contract.snapshot import ClassRules, Resource
from controld.contract.telemetry import Telemetry
from controld.contract.video import Applied, ChunkReport, EngineSetting, EngineState, engine_setting_name
from controld.controller.guard import EVERY_CLASS, Pin
from controld.controller.video import decide_video
from controld.controller.video_plan import VideoPlan, plans_to_json, settings_of_json
from controld.controller.video_view import EngineView, Steering
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.known_profiles import KnownProfiles
from controld.planning.loop import PlanningLoop
from controld.planning.pin_trail import audit_pin
from controld.planning.plane import class_rules_of, selector_of
from controld.planning.video_engines import EngineBook, EngineKey, KnownEngine
from controld.planning.video_fittings import Fittings
from controld.planning.video_plane import ENGINE_ROLE, Fitting, is_of_space, served_workloads, video_goals
from controld.policy.model import PlaneKind, Policy, PolicySet
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
IDLE_REPLAN_S = 5.0
"""Chunks change what is known without waking anybody; look again this often."""

_KIND = PlaneKind.LONGLIVE.value


class VideoPlanner:
    """A daemon component beside `Planner`, for the policies of video engines.

    Args:
        policies: the policy set in force.
        store, fleet, metrics, clock: as everywhere.
        interval_s: the least time between two plans.
        steering: how eagerly engines are turned.
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
        steering: Steering | None = None,
    ) -> None:
        self._policies = policies
        self._store = store
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._loop = PlanningLoop(
            "video_planner", self.plan_once, lambda: asyncio.sleep(interval_s), idle_s=IDLE_REPLAN_S, metrics=metrics
        )
        self._steering = steering or Steering()
        self.alarms: dict[Selector, str] = {}
        self._book = EngineBook(store, clock, self._connected)
        self._published: dict[Selector, tuple[dict[str, Configuration], ClassRules]] = {}
        self._stored = KnownProfiles(store, StoredVideoReader())
        self._fittings = Fittings(self._stored)
        self._checkpoint_due_s = 0.0

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Something changed: policies, engines."""
        self._loop.wake()

    def profiles_changed(self) -> None:
        """Something was measured or imported."""
        self._stored.changed()
        self.wake()

    async def on_session(self, session: AgentSession) -> None:
        """The fleet's callback: an agent came or went."""
        if session.identity.kind != _KIND:
            return
        known = self._book.engines.get(_key(session))
        kept = None if known is None else known.pushed
        if known is not None and kept is not None and session.connected:
            # It may be another release of the engine; what is not of its space it would refuse for ever.
            known.pushed = kept if is_of_space(session.identity.space_json, kept.configuration) else None
            known.dirty = known.dirty or known.pushed is None
        self.wake()

    async def on_telemetry(self, session: AgentSession, telemetry: Telemetry) -> None:
        """The fleet's callback: what an engine serves, and what memory it has."""
        if session.identity.kind != _KIND or telemetry.engine is None:
            return
        engine = await self._engine(session)
        if engine.setting_id != telemetry.engine.setting_id:
            engine.setting_id, engine.since_s = telemetry.engine.setting_id, self._clock.monotonic_s()
        self.wake()

    async def on_applied(self, session: AgentSession, answer: Applied) -> None:
        """The fleet's callback: an engine took a setting, or refused it."""
        if not _is_engine(session):
            return
        engine = await self._engine(session)
        told = session.identity.instance_id, answer
        if engine.answered == told:
            return  # the last answer is told again on every stream
        engine.answered = told
        if not answer.refused:
            engine.lessons.applied(answer)
            self._metrics.video_settings.labels("applied").inc()
        else:
            self._metrics.video_settings.labels("refused").inc()
            # Of the setting that this version asked for: another one may have been published since.
            asked = engine.asked(answer.version)
            if asked and asked != answer.setting_id:
                engine.refused = asked
                reason = f"the engine refused it: {'; '.join(answer.refused.values())}"
                engine.lessons.pin(asked, reason, self._clock.unix_s())
                await self._note_pin(_key(session), asked, reason)
        engine.dirty = True
        self.wake()

    async def on_chunks(self, session: AgentSession, reports: tuple[ChunkReport, ...]) -> None:
        """The fleet's callback: chunks were made."""
        if not _is_engine(session):
            return
        engine = await self._engine(session)
        policy = self._policies().for_plane(session.identity.kind, session.identity.deployment)
        state = session.telemetry.engine if session.telemetry is not None else None
        known: Mapping[str, VideoProfile] = {}
        if policy is not None:
            workloads = served_workloads(policy, state.sessions if state is not None else {})
            known = (await self._fittings.of(session.identity, workloads)).by_setting
        for report in reports:
            if report.setting_id not in known and not engine.may_run(report.setting_id):
                # Whoever makes up settings must not fill the memory with evidence of them.
                self._metrics.video_chunks.labels("unknown_setting").inc()
                continue
            self._metrics.video_chunks.labels("not_finite" if report.has_nan else "made").inc()
            pin = engine.lessons.observe(
                report,
                known.get(report.setting_id),
                hardware=session.identity.hardware,
                now_unix_s=self._clock.unix_s(),
                drift=policy.guard.drift if policy else None,
                motion=policy.guard.motion if policy else None,
            )
            if pin is not None:
                await self._note_pin(_key(session), pin.arm_id, pin.reason)
                self.wake()
        engine.dirty = True

    async def _note_pin(self, key: EngineKey, setting_id: str, reason: str) -> None:
        _log.warning("setting out of use", extra={"setting_id": setting_id, "reason": reason})
        await self._audit(AuditEvent.ARM_PINNED_OFF, key, setting_id, reason)

    async def _audit(self, event: AuditEvent, key: EngineKey, setting_id: str, reason: str) -> None:
        # At once, whatever happens to this process: a setting that is out must not be tried again for that.
        await self._book.write(key)
        selector, agent_id = key
        pinned = (setting_id, EVERY_CLASS)
        await audit_pin(self._store.audit, event, selector, pinned, reason, agent_id=agent_id)

    # ------------------------------------------------------------------------------------ life

    async def restore(self) -> None:
        """Take over what an earlier process learned and pushed. Raises: StoreError."""
        await self._book.restore()
        for policy in self._video_policies():
            selector = selector_of(policy)
            latest = await self._store.versions.latest(selector.kind, selector.deployment)
            if latest is None:
                continue
            try:
                settings = settings_of_json(latest.explanations_json)
            except ControldError as error:
                _log.warning("the last settings cannot be read: %s", error, extra={"version": latest.number})
                continue
            for agent_id, setting in settings.items():
                self._book.restore_setting((selector, agent_id), setting, latest.number)

    async def start(self) -> None:
        """Publish once, and go on planning. Raises: StoreError."""
        await self._loop.start()

    async def stop(self) -> None:
        """Write down what was learned, and end."""
        await self._loop.stop()
        await self._checkpoint()

    # ------------------------------------------------------------------------------------ one round

    async def plan_once(self) -> int:
        """Decide for every engine, publish what changed; how many versions were published. Raises: StoreError."""
        await self._stored.refresh()
        published = 0
        policies = self._policies()
        for policy in self._video_policies():
            try:
                published += await self._plan_policy(policy, policies.generation)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - one policy's engines must not hold up the others'
                self.alarms[selector_of(policy)] = f"not planned: {error}"
                _log.exception("policy %s not planned", policy.name)
                self._metrics.internal_errors.labels("video_planner").inc()
        published += await self._withdraw(policies)
        if self._clock.monotonic_s() >= self._checkpoint_due_s:
            await self._checkpoint()
        return published

    async def _plan_policy(self, policy: Policy, generation: int) -> bool:
        selector = selector_of(policy)
        alarms = []
        for session in self._fleet.sessions():
            if session.identity.selector != selector:
                continue
            if session.identity.role == ENGINE_ROLE and session.telemetry is not None:
                alarms.append(await self._plan_engine(policy, session))
        self.alarms[selector] = "; ".join(alarm for alarm in alarms if alarm)
        engines = self._book.present(selector)
        settings = {name: engine.pushed for name, engine in sorted(engines.items()) if engine.pushed is not None}
        wanted = {name: setting.configuration for name, setting in settings.items()}, class_rules_of(policy)
        asks_again = self._asks_again(engines.values())
        if not asks_again and self._published.get(selector) == wanted and self._fleet.desired(selector) is not None:
            return False
        resources = [Resource(engine_setting_name(name), setting) for name, setting in settings.items()]
        plans = {name: engine.plan for name, engine in engines.items() if engine.plan is not None}
        version = await self._fleet.publish(
            selector,
            [*resources, Resource("class_rules", wanted[1])],
            policy_generation=generation,
            explanations_json=await asyncio.to_thread(plans_to_json, plans, settings),
        )
        for engine in engines.values():
            engine.tell(version)
        self._published[selector] = wanted
        self._metrics.plans.labels("published").inc()
        self._metrics.published_version.set(version)
        return True

    def _asks_again(self, engines: Iterable[KnownEngine]) -> bool:
        """Whether an engine is to be asked for a setting that it refused a while ago: only a new version says so."""
        again = False
        for engine in engines:
            if engine.may_be_asked_again(self._clock.unix_s()):
                engine.refused, again = "", True
        return again

    async def _plan_engine(self, policy: Policy, session: AgentSession) -> str:
        """Decide for one engine; what the operator should know, or nothing."""
        engine, state = await self._engine(session), session.telemetry.engine if session.telemetry else None
        if state is None:
            return f"{session.agent_id} says nothing of its engine"
        workloads = served_workloads(policy, state.sessions)
        fitting = await self._fittings.of(session.identity, workloads)
        if not fitting.profiles:
            return f"no profile of workload {', '.join(workloads)} fits {session.agent_id}"
        # Looking at thousands of settings takes a while; streams must not wait for it.
        plan = await asyncio.to_thread(self._decide, policy, session, engine, state, fitting)
        engine.plan = plan
        if plan.setting is None:
            return f"{session.agent_id}: {plan.reason}"
        engine.push(EngineSetting(configuration=plan.setting, reason=plan.reason))
        return "" if plan.meets_targets else f"{session.agent_id}: {plan.reason}"

    def _decide(
        self, policy: Policy, session: AgentSession, engine: KnownEngine, state: EngineState, fitting: Fitting
    ) -> VideoPlan:
        view = self._view(policy, session, engine, state, fitting)
        return decide_video(video_goals(policy, state.sessions), fitting.profiles, view, self._steering)

    def _view(
        self, policy: Policy, session: AgentSession, engine: KnownEngine, state: EngineState, fitting: Fitting
    ) -> EngineView:
        now_unix_s = self._clock.unix_s()
        lessons, in_force = engine.lessons, None
        if state.setting_id in fitting.by_setting:
            in_force = fitting.by_setting[state.setting_id].configuration
        elif engine.pushed is not None and engine.pushed.setting_id == state.setting_id:
            in_force = engine.pushed.configuration
        return EngineView(
            in_force=in_force,
            in_force_s=self._clock.monotonic_s() - engine.since_s,
            facts=session.identity.engine,
            offered=fitting.offered,
            memory_limit_bytes=state.memory_limit_bytes,
            corrections=lessons.corrections(fitting.profiles, session.identity.hardware, now_unix_s),
            memory_factors=lessons.memory_factors(fitting.profiles, now_unix_s),
            switch_seconds=dict(lessons.switch_seconds),
            keeps_kv=dict(lessons.keeps_kv),
            pins=lessons.pins.at(now_unix_s),
            motion=policy.guard.motion,
        )

    async def _withdraw(self, policies: PolicySet) -> int:
        """Engines that no policy names any more are told nothing; they keep what they run under."""
        named = {selector_of(policy) for policy in self._video_policies()}
        gone = [selector for selector in self._published if selector not in named]
        for selector in gone:
            await self._fleet.publish(selector, [], policy_generation=policies.generation)
            del self._published[selector]
            self.alarms.pop(selector, None)
        return len(gone)

    async def _checkpoint(self) -> None:
        self._checkpoint_due_s = self._clock.monotonic_s() + CHECKPOINT_INTERVAL_S
        await self._book.checkpoint()

    # ------------------------------------------------------------------------------------ for people

    def plans(self) -> dict[tuple[Selector, str], VideoPlan]:
        """The last decision for each engine."""
        return {key: engine.plan for key, engine in self._book.engines.items() if engine.plan is not None}

    def pins(self) -> list[tuple[EngineKey, Pin]]:
        """Settings out of use, each for one engine."""
        now_unix_s = self._clock.unix_s()
        return [(key, pin) for key, one in self._book.engines.items() for pin in one.lessons.pins.at(now_unix_s).pins]

    async def release(self, setting_id: str, deployment: str | None) -> list[tuple[EngineKey, Pin]]:
        """A person's word that a setting may be used again; the pins that there were.

        Args:
            deployment: of the engines; None: wherever it is pinned.

        Raises:
            StoreError: it could not be written down.
        """
        released = []
        for key, engine in list(self._book.engines.items()):
            if deployment not in (None, key[0].deployment):
                continue
            pin = engine.lessons.release(setting_id, self._clock.unix_s())
            if pin is None:
                continue
            engine.dirty = True
            released.append((key, pin))
            await self._audit(AuditEvent.ARM_RELEASED, key, setting_id, "by the operator")
        if released:
            self.wake()
        return released

    def _video_policies(self) -> list[Policy]:
        return [policy for policy in self._policies().policies if policy.kind is PlaneKind.LONGLIVE]

    async def _engine(self, session: AgentSession) -> KnownEngine:
        return await self._book.of(_key(session))

    def _connected(self) -> frozenset[EngineKey]:
        return frozenset(_key(session) for session in self._fleet.sessions())


def _is_engine(session: AgentSession) -> bool:
    return session.identity.kind == _KIND and session.identity.role == ENGINE_ROLE


def _key(session: AgentSession) -> EngineKey:
    return session.identity.selector, session.agent_id
