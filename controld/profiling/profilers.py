"""The profiling workers that are connected, as the study service needs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from controld.contract.trial import TrialTask
from controld.fleet.session import AgentSession

PROFILER_ROLE = "profiler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiler:
    """One worker.

    Args:
        instance_id: another one means another process, which knows nothing of the trials of the last.
        hardware: what its codec times are valid for.
        space_json: the strategy space that it can measure.
    """

    agent_id: str
    instance_id: str
    kind: str
    deployment: str
    model_name: str
    model_fingerprint: str
    hardware: str
    space_json: str


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
        )
        for session in sessions
        if session.connected and session.identity.role == PROFILER_ROLE
    ]
    return tuple(sorted(found, key=lambda profiler: profiler.agent_id))
