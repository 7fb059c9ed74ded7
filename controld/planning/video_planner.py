"""Plans the settings of video engines: hears what they serve and how fast, decides, publishes what changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controld.candidates.video_profile import VideoProfile, is_video_document
from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError
from controld.contract.snapshot import ClassRules, Resource
from controld.contract.telemetry import Telemetry
from controld.contract.video import Applied, ChunkReport, EngineSetting, EngineState, engine_setting_name
from controld.controller.video import decide_video
from controld.controller.video_plan import VideoPlan, plans_to_json, settings_of_json
from controld.controller.video_view import EngineView, Steering
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.plane import class_rules_of, selector_of
from controld.planning.video_lessons import EngineLessons
from controld.planning.video_plane import ENGINE_ROLE, engine_profiles, offered_settings, video_goals
from controld.policy.model import PlaneKind, Policy, PolicySet
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, PosteriorRecord

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 10.0
IDLE_REPLAN_S = 5.0
"""Chunks change what is known without waking anybody; look again this often."""

MAX_ENGINES = 4096
"""Beyond this many, those that are not connected are forgotten."""

LESSONS_PREFIX = "video/"
_KIND = PlaneKind.LONGLIVE.value


@dataclass(slots=True)
class _Engine:
    """What is remembered of one engine."""

    lessons: EngineLessons = field(default_factory=EngineLessons)
    record_version: int = 0
    dirty: bool = False
    setting_id: str = ""
    since_s: float = 0.0
    plan: VideoPlan | None = None
    pushed: Configuration | None = None
    reason: str = ""
    answered: tuple[str, int] = ("", 0)


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
        self._interval_s = interval_s
        self._steering = steering or Steering()
        self.alarms: dict[Selector, str] = {}
        self._engines: dict[tuple[Selector, str], _Engine] = {}
        self._published: dict[Selector, tuple[dict[str, Configuration], ClassRules]] = {}
        self._profiles: tuple[VideoProfile, ...] = ()
        self._profiles_are_stale = True
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._checkpoint_due_s = 0.0

    # ------------------------------------------------------------------------------------ news

    def wake(self) -> None:
        """Something changed: policies, engines."""
        self._wake.set()

    def profiles_changed(self) -> None:
        """Something was measured or imported."""
        self._profiles_are_stale = True
        self.wake()

    async def on_session(self, session: AgentSession) -> None:
        """The fleet's callback: an agent came or went."""
        if session.identity.kind == _KIND:
            self.wake()

    async def on_telemetry(self, session: AgentSession, telemetry: Telemetry) -> None:
        """The fleet's callback: what an engine serves, and what memory it has."""
        if session.identity.kind != _KIND or telemetry.engine is None:
            return
        engine = self._engine(session)
        if engine.setting_id != telemetry.engine.setting_id:
            engine.setting_id, engine.since_s = telemetry.engine.setting_id, self._clock.monotonic_s()
        self.wake()

    async def on_applied(self, session: AgentSession, answer: Applied) -> None:
        """The fleet's callback: an engine took a setting, or refused it."""
        engine = self._engine(session)
        told = session.identity.instance_id, answer.version
        if engine.answered == told:
            return  # the last answer is told again on every stream
        engine.answered = told
        if not answer.refused:
            engine.lessons.applied(answer)
            self._metrics.video_settings.labels("applied").inc()
        elif engine.pushed is not None and answer.setting_id != engine.pushed.config_id:
            self._metrics.video_settings.labels("refused").inc()
            problems = "; ".join(answer.refused.values())
            reason = f"the engine refused it: {problems}"
            engine.lessons.pin(engine.pushed.config_id, reason, self._clock.unix_s())
            await self._note_pin(session, engine.pushed.config_id, reason)
        engine.dirty = True
        self.wake()

    async def on_chunks(self, session: AgentSession, reports: tuple[ChunkReport, ...]) -> None:
        """The fleet's callback: chunks were made."""
        engine = self._engine(session)
        policy = self._policies().for_plane(session.identity.kind, session.identity.deployment)
        known = {profile.setting_id: profile for profile in self._known(session, policy)} if policy else {}
        for report in reports:
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
                await self._note_pin(session, pin.arm_id, pin.reason)
                self.wake()
        engine.dirty = True

    async def _note_pin(self, session: AgentSession, setting_id: str, reason: str) -> None:
        _log.warning("setting out of use", extra={"setting_id": setting_id, "reason": reason})
        identity = session.identity
        document = {
            "kind": identity.kind, "deployment": identity.deployment, "agent_id": identity.agent_id,
            "arm_id": setting_id, "reason": reason,
        }  # fmt: skip
        await self._store.audit.append(AuditEvent.ARM_PINNED_OFF, json.dumps(document, sort_keys=True))

    # ------------------------------------------------------------------------------------ life

    async def restore(self) -> None:
        """Take over what an earlier process learned and pushed. Raises: StoreError."""
        for record in await self._store.posteriors.list(LESSONS_PREFIX):
            _, deployment, agent_id = record.key.split("/", 2)
            engine = _Engine(record_version=record.version)
            try:
                engine.lessons = EngineLessons.from_document(json.loads(record.document))
            except (ControldError, ValueError) as error:
                _log.warning("what engine %s taught is lost: %s", agent_id, error)
            self._engines[Selector(_KIND, deployment), agent_id] = engine
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
            for agent_id, configuration in settings.items():
                self._engines.setdefault((selector, agent_id), _Engine()).pushed = configuration

    async def start(self) -> None:
        """Publish once, and go on planning. Raises: StoreError."""
        await self.plan_once()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="video-planner")

    async def stop(self) -> None:
        """Write down what was learned, and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._checkpoint()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_REPLAN_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.plan_once()
            except Exception:  # noqa: BLE001 - the edge of the loop: engines keep their settings meanwhile
                _log.exception("planning video failed")
                self._metrics.internal_errors.labels("video_planner").inc()
            await asyncio.sleep(self._interval_s)

    # ------------------------------------------------------------------------------------ one round

    async def plan_once(self) -> int:
        """Decide for every engine, publish what changed; how many versions were published. Raises: StoreError."""
        if self._profiles_are_stale:
            await self._read_profiles()
        published = 0
        policies = self._policies()
        for policy in self._video_policies():
            try:
                published += await self._plan_policy(policy, policies.generation)
            except StoreError:
                raise
            except ControldError as error:
                self.alarms[selector_of(policy)] = f"not planned: {error}"
                _log.error("policy %s not planned: %s", policy.name, error, extra={"code": error.code})
        published += await self._withdraw(policies)
        if self._clock.monotonic_s() >= self._checkpoint_due_s:
            await self._checkpoint()
        return published

    async def _plan_policy(self, policy: Policy, generation: int) -> bool:
        selector = selector_of(policy)
        alarms = []
        for session in self._fleet.sessions():
            if Selector(session.identity.kind, session.identity.deployment) != selector:
                continue
            if session.identity.role == ENGINE_ROLE and session.telemetry is not None:
                alarms.append(await self._plan_engine(policy, session))
        self.alarms[selector] = "; ".join(alarm for alarm in alarms if alarm)
        engines = {name: engine for (each, name), engine in self._engines.items() if each == selector}
        settings = {name: engine.pushed for name, engine in engines.items() if engine.pushed is not None}
        rules = class_rules_of(policy)
        if self._published.get(selector) == (settings, rules) and self._fleet.desired(selector) is not None:
            return False
        resources = [
            Resource(engine_setting_name(name), EngineSetting(configuration=one, reason=engines[name].reason))
            for name, one in sorted(settings.items())
        ]
        version = await self._fleet.publish(
            selector,
            [*resources, Resource("class_rules", rules)],
            policy_generation=generation,
            explanations_json=plans_to_json({n: e.plan for n, e in engines.items() if e.plan is not None}),
        )
        self._published[selector] = settings, rules
        self._metrics.plans.labels("published").inc()
        self._metrics.published_version.set(version)
        return True

    async def _plan_engine(self, policy: Policy, session: AgentSession) -> str:
        """Decide for one engine; what the operator should know, or nothing."""
        engine, state = self._engine(session), session.telemetry.engine if session.telemetry else None
        if state is None:
            return f"{session.agent_id} says nothing of its engine"
        profiles = self._known(session, policy, state)
        if not profiles:
            return f"no profile of workload {', '.join(self._workloads(policy, state))} fits {session.agent_id}"
        view = self._view(policy, session, engine, state, profiles)
        goals = video_goals(policy, state.sessions)
        plan = await asyncio.to_thread(decide_video, goals, profiles, view, self._steering)
        engine.plan = plan
        if plan.setting is None:
            return f"{session.agent_id}: {plan.reason}"
        engine.pushed, engine.reason = plan.setting, plan.reason
        return "" if plan.meets_targets else f"{session.agent_id}: {plan.reason}"

    def _view(
        self,
        policy: Policy,
        session: AgentSession,
        engine: _Engine,
        state: EngineState,
        profiles: list[VideoProfile],
    ) -> EngineView:
        now_unix_s = self._clock.unix_s()
        lessons = engine.lessons
        named = {profile.setting_id: profile.configuration for profile in profiles}
        if engine.pushed is not None:
            named.setdefault(engine.pushed.config_id, engine.pushed)
        return EngineView(
            in_force=named.get(state.setting_id),
            in_force_s=self._clock.monotonic_s() - engine.since_s,
            facts=session.identity.engine,
            offered=offered_settings(session.identity.space_json, profiles),
            memory_limit_bytes=state.memory_limit_bytes,
            corrections=lessons.corrections(profiles, session.identity.hardware, now_unix_s),
            switch_seconds=dict(lessons.switch_seconds),
            keeps_kv=dict(lessons.keeps_kv),
            pins=lessons.pins.at(now_unix_s),
            motion=policy.guard.motion,
        )

    def _known(self, session: AgentSession, policy: Policy, state: EngineState | None = None) -> list[VideoProfile]:
        if state is None and session.telemetry is not None:
            state = session.telemetry.engine
        return engine_profiles(self._profiles, session.identity, self._workloads(policy, state))

    @staticmethod
    def _workloads(policy: Policy, state: EngineState | None) -> list[str]:
        served = {goal.service_class for goal in video_goals(policy, state.sessions if state else {})}
        return sorted({each.workload for each in policy.classes if each.name in served})

    async def _withdraw(self, policies: PolicySet) -> int:
        """Engines that no policy names any more are told nothing; they keep what they run under."""
        named = {selector_of(policy) for policy in self._video_policies()}
        gone = [selector for selector in self._published if selector not in named]
        for selector in gone:
            await self._fleet.publish(selector, [], policy_generation=policies.generation)
            del self._published[selector]
            self.alarms.pop(selector, None)
        return len(gone)

    async def _read_profiles(self) -> None:
        self._profiles_are_stale = False
        try:
            records = await self._store.profiles.list()
        except StoreError:
            self._profiles_are_stale = True
            raise
        found = []
        for record in records:
            if not is_video_document(record.document):
                continue
            try:
                found.append(VideoProfile.from_json(record.document))
            except ControldError as error:
                _log.error("video profile left out: %s", error, extra={"config_id": record.key.config_id})
        self._profiles = tuple(found)

    async def _checkpoint(self) -> None:
        self._checkpoint_due_s = self._clock.monotonic_s() + CHECKPOINT_INTERVAL_S
        for (selector, agent_id), engine in list(self._engines.items()):
            if not engine.dirty:
                continue
            engine.dirty = False
            text = json.dumps(engine.lessons.to_document(), sort_keys=True, separators=(",", ":"), allow_nan=False)
            key = f"{LESSONS_PREFIX}{selector.deployment}/{agent_id}"
            try:
                record = PosteriorRecord(key=key, version=engine.record_version, document=text)
                await self._store.posteriors.put([record])
            except StoreError:
                engine.dirty = True
                raise
            engine.record_version += 1

    # ------------------------------------------------------------------------------------ for people

    def plans(self) -> dict[tuple[Selector, str], VideoPlan]:
        """The last decision for each engine."""
        return {key: engine.plan for key, engine in self._engines.items() if engine.plan is not None}

    def _video_policies(self) -> list[Policy]:
        return [policy for policy in self._policies().policies if policy.kind is PlaneKind.LONGLIVE]

    def _engine(self, session: AgentSession) -> _Engine:
        key = Selector(session.identity.kind, session.identity.deployment), session.agent_id
        if key not in self._engines and len(self._engines) >= MAX_ENGINES:
            here = {(Selector(s.identity.kind, s.identity.deployment), s.agent_id) for s in self._fleet.sessions()}
            for gone in [known for known in self._engines if known not in here]:
                del self._engines[gone]
        return self._engines.setdefault(key, _Engine(since_s=self._clock.monotonic_s()))
