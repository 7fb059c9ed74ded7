"""The engines part of the admin API: what video engines serve, which setting is in force, and why."""

from __future__ import annotations

from dataclasses import asdict

from controld.admin.backend import Json
from controld.admin.problem import NotFoundError
from controld.contract.video import Applied
from controld.controller.video_plan import VideoPlan
from controld.controller.video_text import plan_text
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.planning.video_planner import VideoPlanner


class Engines:
    """Implements `EngineBackend`.

    Args:
        fleet: whose sessions are shown.
        video: what was decided.
    """

    def __init__(self, fleet: FleetServer, video: VideoPlanner) -> None:
        self._fleet = fleet
        self._video = video

    async def listing(self) -> list[Json]:
        sessions = {session.agent_id: session for session in self._fleet.sessions() if session.identity.engine}
        plans = {agent_id: plan for (_, agent_id), plan in self._video.plans().items()}
        return [_summary(name, sessions.get(name), plans.get(name)) for name in sorted({*sessions, *plans})]

    async def explain(self, agent_id: str) -> Json:
        plans = self._video.plans()
        plan = next((plan for (_, name), plan in plans.items() if name == agent_id), None)
        if plan is None:
            known = ", ".join(name for _, name in plans) or "none"
            raise NotFoundError(f"nothing was decided for an engine {agent_id}", hint=f"engines: {known}")
        session = next((s for s in self._fleet.sessions(include_gone=True) if s.agent_id == agent_id), None)
        applied = session.setting_applied if session is not None else None
        return {
            "text": plan_text(agent_id, plan, _answer_text(applied)),
            **_summary(agent_id, session, plan),
            "plan": plan.to_document(),
        }


def _summary(agent_id: str, session: AgentSession | None, plan: VideoPlan | None) -> Json:
    """One line's worth.

    Args:
        session: None: not connected.
        plan: None: nothing was decided for it yet.
    """
    state = session.telemetry.engine if session is not None and session.telemetry is not None else None
    chosen = plan.chosen if plan is not None else None
    return {
        "agent_id": agent_id,
        "connected": session is not None and session.connected,
        "instance_id": session.identity.instance_id if session is not None else None,
        "rivals": [asdict(rival) for rival in session.rivals] if session is not None else [],
        "deployment": session.identity.deployment if session is not None else None,
        "state": asdict(state) if state is not None else None,
        "applied": _applied(session.setting_applied if session is not None else None),
        "wanted": None if chosen is None else chosen.setting_id,
        "wanted_label": None if chosen is None else chosen.label,
        "meets_targets": plan is not None and plan.meets_targets,
        "reason": plan.reason if plan is not None else "nothing was decided yet",
    }


def _applied(applied: Applied | None) -> Json | None:
    return None if applied is None else {**asdict(applied), "transition": applied.transition.name.lower()}


def _answer_text(applied: Applied | None) -> str:
    if applied is None:
        return "the engine has not answered any setting yet"
    if applied.refused:
        return f"version {applied.version} refused: {'; '.join(applied.refused.values())}"
    kept = "history kept" if applied.keeps_kv else "history lost"
    how = f"{applied.transition.name.lower()}, {applied.seconds:.3g} s, {kept}"
    return f"in force: {applied.setting_id[:4]} from chunk {applied.chunk} by version {applied.version} ({how})"
