"""The status part of the admin API: whether the daemon serves, and one page about everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from controld import __version__
from controld.admin.agents import agent_summary
from controld.admin.backend import EngineBackend, Json
from controld.admin.candidates import Candidates
from controld.admin.decisions import count_rows
from controld.admin.learned import Learned
from controld.contract.clock import Clock
from controld.contract.effect import Half
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.planning.planner import Planner
from controld.planning.video_planner import VideoPlanner
from controld.policy.source import PolicySource
from controld.store.interface import Store
from controld.store.records import EffectColumn, EffectFilter


class Status:
    """Implements `StatusBackend`.

    Args:
        is_serving: whether the daemon does.
        policies, store, fleet, planner, video, clock: the running parts that are asked.
        engines, candidates, learned: other parts of the admin API, which have a place on the page.
    """

    def __init__(
        self,
        is_serving: Callable[[], bool],
        policies: PolicySource,
        store: Store,
        fleet: FleetServer,
        planner: Planner,
        video: VideoPlanner,
        clock: Clock,
        *,
        engines: EngineBackend,
        candidates: Candidates,
        learned: Learned,
    ) -> None:
        self._is_serving = is_serving
        self._policies = policies
        self._store = store
        self._fleet = fleet
        self._planner = planner
        self._video = video
        self._clock = clock
        self._engines = engines
        self._candidates = candidates
        self._learned = learned
        self._started_unix_s = clock.unix_s()

    def ready(self) -> tuple[bool, str]:
        # Serving is ready: components started, policies in force.
        return (True, "") if self._is_serving() else (False, "the daemon is starting or stopping")

    async def page(self) -> Json:
        sessions = self._fleet.sessions()
        columns = (EffectColumn.SERVICE_CLASS, EffectColumn.ARM_ID, EffectColumn.PATH)
        counts = await self._store.effects.counts(columns, EffectFilter(half=Half.SENDER))
        damage = self._store.damage
        unreadable = await self._candidates.unreadable()
        return {
            "version": __version__,
            "uptime_s": self._clock.unix_s() - self._started_unix_s,
            "policy_generation": self._policies.current.generation,
            "policy_problems": [problem.to_json() for problem in self._policies.problems],
            "published_version": self._fleet.last_version,
            "agents": [agent_summary(session) for session in sessions],
            "links": [
                {"agent_id": session.agent_id, **asdict(link)}
                for session in sessions
                if session.telemetry is not None
                for link in session.telemetry.links
            ],
            "guard": self._learned.guard_rows(),
            "engines": await self._engines.listing(),
            "transfers": count_rows(columns, counts),
            "sizes": {
                name: asdict(estimate)
                for name, estimate in self._planner.sizes.estimates(self._clock.monotonic_s()).items()
            },
            "tenants": [
                {
                    "kind": report.selector.kind,
                    "deployment": report.selector.deployment,
                    "jain_index": report.jain_index,
                    "tenants": [asdict(tenant) for tenant in report.tenants],
                }
                for report in self._planner.tenants()
            ],
            "feedback_refused": dict(self._planner.learning.refused),
            "alarms": [
                *_planning_alarms(self._planner.alarms),
                *_planning_alarms(self._video.alarms),
                *_rival_alarms(sessions),
                *self._learned.alarms(),
                *(
                    [{"where": "policies", "what": self._policies.last_good_problem}]
                    if self._policies.last_good_problem
                    else []
                ),
                *({"where": row.where, "what": row.what} for row in unreadable),
                *([{"where": "store", "what": damage.problem, "set_aside": damage.set_aside}] if damage else []),
            ],
        }


def _planning_alarms(alarms: Mapping[Selector, str]) -> list[Json]:
    return [{"where": f"{s.kind}/{s.deployment}", "what": text} for s, text in alarms.items() if text]


def _rival_alarms(sessions: Iterable[AgentSession]) -> list[Json]:
    return [
        {"where": f"{session.identity.kind}/{session.identity.deployment}/{session.agent_id}", "what": session.rivalry}
        for session in sessions
        if session.rivals
    ]
