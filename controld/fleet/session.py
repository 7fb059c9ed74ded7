"""An agent as others see it: a frozen view, made anew at each look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controld.contract.telemetry import Telemetry
from controld.contract.video import Applied
from controld.fleet.delivery import Failure
from controld.fleet.identity import AgentIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another instance under the same agent id, which is turned away because it is not the newer one.

    Args:
        deployment, kind, peer: of it; they may differ from those of the instance that is served.
        started_unix_s: when its process began, as it says.
        seen_unix_s: when it last tried.
    """

    instance_id: str
    deployment: str
    kind: str
    peer: str
    started_unix_s: float
    seen_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One agent.

    Args:
        connected: whether it has a stream now.
        connected_since_unix_s: when its current or last stream began.
        attached: whether it said, from inside the hooked class, that it moves KV through us, and is still heard.
        not_attached_reason: why not; empty where it is.
        desired_version, acked_version, effective_version: what it should have, acknowledged, and says it draws from;
            0: none.
        effective_is_known: false where it draws from a version that this controld never published.
        last_failed: the last version that it refused, with its error.
        degraded: it refuses what it should have and keeps what it had.
        artefacts_held: SHA-256 by resource name of the calibrated artefacts that it acknowledged on its present stream.
        telemetry, telemetry_unix_s: its last report, and when that came (0: never).
        effects_acked_up_to: the sequence number up to which its effects are durable.
        setting_applied: a video engine's last answer to a setting.
        rivals: other instances that go on trying under this agent's id while it is connected.
        counters: what was received, refused and ignored on its streams.
    """

    identity: AgentIdentity
    peer: str
    connected: bool
    connected_since_unix_s: float
    attached: bool
    not_attached_reason: str
    desired_version: int
    acked_version: int
    effective_version: int
    effective_is_known: bool
    last_failed: Failure | None
    degraded: bool
    artefacts_held: Mapping[str, str]
    telemetry: Telemetry | None
    telemetry_unix_s: float
    effects_acked_up_to: int
    counters: Mapping[str, int]
    setting_applied: Applied | None = None
    rivals: tuple[Rival, ...] = ()

    @property
    def agent_id(self) -> str:
        """Short for the identity's."""
        return self.identity.agent_id

    @property
    def rivalry(self) -> str:
        """One line for the operator where several processes have this agent's id; empty where none has."""
        if not self.rivals:
            return ""
        others = ", ".join(
            f"{rival.instance_id} ({rival.kind}/{rival.deployment}, {rival.peer})" for rival in self.rivals
        )
        return (
            f"several processes have the agent id {self.agent_id}: {self.identity.instance_id} ({self.peer}) is served,"
            f" turned away: {others}; give each an agent id of its own"
        )
