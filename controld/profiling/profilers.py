"""The profiling workers that are connected, as the study service needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controld.contract.trial import TrialTask
from controld.fleet.session import AgentSession
from controld.profiling.errors import StudyRefusedError
from controld.profiling.request import StudyRequest

PROFILER_ROLE = "profiler"
VIDEO_TIER = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiler:
    """One worker.

    Args:
        instance_id: another one means another process, which knows nothing of the trials of the last.
        hardware: what its codec times are valid for.
        space_json: the strategy space that it can measure.
        is_video: whether it measures clips; else KV.
    """

    agent_id: str
    instance_id: str
    kind: str
    deployment: str
    model_name: str
    model_fingerprint: str
    hardware: str
    space_json: str
    is_video: bool


class TrialFleet(Protocol):
    """What is asked of the fleet server."""

    def sessions(self) -> tuple[AgentSession, ...]:
        """The agents that are connected now."""
        ...

    def request_trial(self, agent_id: str, task: TrialTask) -> None:
        """Raises: FleetError: it is not connected."""
        ...

    def cancel_trial(self, agent_id: str, study_id: str, trial_id: str = "") -> None:
        """Raises: FleetError: it is not connected."""
        ...


def profilers_among(sessions: Iterable[AgentSession]) -> tuple[Profiler, ...]:
    """The connected workers, by agent id."""
    found = [
        Profiler(
            agent_id=session.identity.agent_id,
            instance_id=session.identity.instance_id,
            kind=session.identity.kind,
            deployment=session.identity.deployment,
            model_name=session.identity.model_name,
            model_fingerprint=session.identity.model_fingerprint,
            hardware=session.identity.hardware,
            space_json=session.identity.space_json,
            is_video=VIDEO_TIER in session.identity.tiers,
        )
        for session in sessions
        if session.connected and session.identity.role == PROFILER_ROLE
    ]
    return tuple(sorted(found, key=lambda profiler: profiler.agent_id))


def choose_profiler(request: StudyRequest, connected: Sequence[Profiler]) -> Profiler:
    """The worker whose model a study is about.

    Raises:
        StudyRefusedError: none fits, or those that fit have several models.
    """
    fitting = [
        profiler
        for profiler in connected
        if profiler.kind == request.plane
        and request.deployment in ("", profiler.deployment)
        and request.model in ("", profiler.model_fingerprint)
    ]
    if not fitting:
        raise StudyRefusedError(
            f"no profiling worker for {request.plane} is connected",
            code="study.no_profiler",
            hint=f"start one: python -m dataplanes.{request.plane}.profiler --address ADDRESS (--help tells the rest)",
        )
    models = {profiler.model_fingerprint: profiler.model_name for profiler in fitting}
    if len(models) > 1:
        raise StudyRefusedError(
            f"profiling workers of {len(models)} models are connected",
            code="study.ambiguous_model",
            hint="say which: " + ", ".join(f"model={mark} ({name})" for mark, name in sorted(models.items())),
        )
    return fitting[0]
