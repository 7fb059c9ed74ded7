"""The admin API's answers, made from the running daemon's parts."""

from __future__ import annotations

from collections.abc import Callable

from controld.admin.agents import Agents
from controld.admin.backend import AdminBackend
from controld.admin.candidates import Candidates
from controld.admin.decisions import Decisions
from controld.admin.engines import Engines
from controld.admin.learned import Learned
from controld.admin.policies import Policies
from controld.admin.status import Status
from controld.contract.clock import Clock
from controld.daemon import Daemon
from controld.fleet.server import FleetServer
from controld.planning.planner import Planner
from controld.planning.video_planner import VideoPlanner
from controld.policy.source import PolicySource
from controld.profiling.service import StudyService
from controld.store.interface import Store


def build_backend(
    daemon: Daemon,
    policies: PolicySource,
    store: Store,
    fleet: FleetServer,
    planner: Planner,
    video: VideoPlanner,
    studies: StudyService,
    clock: Clock,
    *,
    on_profiles: Callable[[], None],
) -> AdminBackend:
    """All parts of the admin API over a daemon's.

    Args:
        on_profiles: called once profiles were added or deleted, durably.
    """
    candidates = Candidates(store, fleet.sessions, on_profiles, clock)
    engines = Engines(fleet, video)
    learned = Learned(planner, video, clock)
    return AdminBackend(
        status=Status(
            lambda: daemon.is_serving, policies, store, fleet, planner, video, clock,
            engines=engines, candidates=candidates, learned=learned,
        ),
        agents=Agents(fleet),
        engines=engines,
        candidates=candidates,
        decisions=Decisions(store, planner, candidates),
        learned=learned,
        policies=Policies(policies, planner, store, daemon.reload),
        studies=studies,
    )  # fmt: skip
