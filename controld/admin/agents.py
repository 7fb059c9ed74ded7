"""The agents part of the admin API: who is connected, and what they advertise."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from controld.admin.backend import Json
from controld.admin.spaces import describe_spaces
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession


class Agents:
    """Implements `AgentBackend`.

    Args:
        fleet: whose sessions are shown.
    """

    def __init__(self, fleet: FleetServer) -> None:
        self._fleet = fleet

    async def dataplanes(self) -> list[Json]:
        return [_agent_details(session) for session in self._fleet.sessions(include_gone=True)]

    async def spaces(self) -> list[Json]:
        # A space may be large, and counting it takes a while.
        return await asyncio.to_thread(describe_spaces, self._fleet.sessions())


def agent_summary(session: AgentSession) -> Json:
    """One line's worth."""
    identity = session.identity
    return {
        "agent_id": session.agent_id,
        "kind": identity.kind,
        "deployment": identity.deployment,
        "role": identity.role,
        "rank": identity.rank,
        "attached": session.attached,
        "attach_reason": session.not_attached_reason,
        "effective_version": session.effective_version,
        "degraded": session.degraded,
    }


def _agent_details(session: AgentSession) -> Json:
    identity, failed = session.identity, session.last_failed
    details: dict[str, Any] = {
        **agent_summary(session),
        "connected": session.connected,
        "connected_since_unix_s": session.connected_since_unix_s,
        "peer": session.peer,
        "instance_id": identity.instance_id,
        "rivals": [asdict(rival) for rival in session.rivals],
        "model": identity.model_name,
        "model_fingerprint": identity.model_fingerprint,
        "kv_dtype": identity.kv_dtype,
        "kv_bytes_per_token": identity.kv_bytes_per_token,
        "hardware": identity.hardware,
        "tiers": list(identity.tiers),
        "desired_version": session.desired_version,
        "artefacts_held": sorted(session.artefacts_held),
        "acked_version": session.acked_version,
        "effective_is_known": session.effective_is_known,
        "last_failed": asdict(failed) if failed else None,
        "effects_acked_up_to": session.effects_acked_up_to,
        "telemetry_unix_s": session.telemetry_unix_s,
        "stream_counters": dict(session.counters),
    }
    if session.telemetry is not None:
        details["counters"] = dict(session.telemetry.counters)
        details["links"] = [asdict(link) for link in session.telemetry.links]
        details["lease_left_s"] = session.telemetry.lease_left_s
    return details
