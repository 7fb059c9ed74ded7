"""The strategy spaces that connected agents advertise, each once, with its size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from controld.contract.errors import ControldError
from controld.contract.space import StrategySpace
from controld.fleet.session import AgentSession


def describe_spaces(sessions: Iterable[AgentSession]) -> list[dict[str, Any]]:
    """One entry for each plane, model and space, by plane; agents that advertise none are left out.

    Returns:
        Entries with `kind`, `deployment`, `model`, `agents`, `lossy_parts` and `configurations` (counts), `space` (the
        space as its JSON has it) and `problem`. Where a space cannot be read, `problem` says why and the counts and the
        space are null.
    """
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for session in sessions:
        identity = session.identity
        if session.connected and identity.space_json:
            key = (identity.kind, identity.deployment, identity.model_name, identity.space_json)
            groups.setdefault(key, []).append(session.agent_id)
    return [
        {
            "kind": kind,
            "deployment": deployment,
            "model": model,
            "agents": sorted(agents),
            **_describe(space_json),
        }
        for (kind, deployment, model, space_json), agents in sorted(groups.items())
    ]


def _describe(space_json: str) -> dict[str, Any]:
    try:
        space = StrategySpace.from_json(space_json)
    except ControldError as error:
        return {"lossy_parts": None, "configurations": None, "space": None, "problem": error.message}
    return {
        "lossy_parts": space.count(lossy_only=True),
        "configurations": space.count(),
        "space": json.loads(space.to_json()),
        "problem": "",
    }
