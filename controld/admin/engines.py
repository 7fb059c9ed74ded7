"""Video engines for people: what they serve, which setting is in force, and why."""

from __future__ import annotations

from dataclasses import asdict

from controld.admin.backend import Json
from controld.contract.video import Applied
from controld.controller.video_plan import VideoPlan
from controld.controller.video_text import plan_text
from controld.fleet.session import AgentSession


def engine_summary(agent_id: str, session: AgentSession | None, plan: VideoPlan | None) -> Json:
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


def engine_document(agent_id: str, session: AgentSession | None, plan: VideoPlan) -> Json:
    """The whole decision with its text."""
    applied = session.setting_applied if session is not None else None
    return {
        "text": plan_text(agent_id, plan, _answer_text(applied)),
        **engine_summary(agent_id, session, plan),
        "plan": plan.to_document(),
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
