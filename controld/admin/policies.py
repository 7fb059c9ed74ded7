"""The policies part of the admin API: the set in force, what an edit would change, and reading the files again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from controld.admin.backend import Json, PolicyEdit
from controld.planning.planner import Planner
from controld.planning.policy_diff import edited_set, policy_changes
from controld.planning.policy_diff_text import changes_text
from controld.policy.loader import SourceFile, parse_policies
from controld.policy.source import PolicySource, ReloadOutcome
from controld.store.interface import Store


class Policies:
    """Implements `PolicyBackend`.

    Args:
        source: the set in force.
        planner, store: an edit's decisions are compared with theirs.
        reload: reads the files again, given who asked.
    """

    def __init__(
        self, source: PolicySource, planner: Planner, store: Store, reload: Callable[[str], Awaitable[ReloadOutcome]]
    ) -> None:
        self._source = source
        self._planner = planner
        self._store = store
        self._reload = reload

    async def in_force(self) -> Json:
        current = self._source.current
        return {
            "generation": current.generation,
            "content_hash": current.content_hash,
            "policies": [asdict(policy) for policy in current.policies],
            "problems": [problem.to_json() for problem in self._source.problems],
        }

    async def compare(self, edit: PolicyEdit) -> Json:
        sources = [SourceFile(file, content) for file, content in edit.files]
        given = await asyncio.to_thread(parse_policies, sources)
        in_force = self._source.current
        edited = edited_set(in_force, given, whole=edit.whole)
        changes = await policy_changes(self._planner, self._store, in_force, edited)
        return {
            "generation": in_force.generation,
            "text": changes_text(changes, in_force.generation),
            "policies": [change.to_document() for change in changes],
        }

    async def reload(self) -> tuple[bool, Json]:
        outcome = await self._reload("admin API")
        return outcome.accepted, outcome.to_json()
