"""Planes that ask the same share one decision: deciding is pure, so the answer is the same.

Many deployments of one model on equal machines ask the same until their own traffic has taught them something.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controld.controller.decide import decide
from controld.controller.goals import TableRequest
from controld.controller.plan import Plan, TablePlan

REMEMBERED: Final = 8
"""Decisions of a round that are looked through: a plan is large, and kinds of planes are few."""


@dataclass(frozen=True, slots=True)
class _Decision:
    requests: tuple[TableRequest, ...]
    previous: tuple[TablePlan, ...]
    tables: tuple[TablePlan, ...]

    def answers(self, requests: tuple[TableRequest, ...], previous: tuple[TablePlan, ...]) -> bool:
        # Tables are compared by identity, which is what planes that shared one before have in common.
        same_past = len(previous) == len(self.previous) and all(
            a is b for a, b in zip(previous, self.previous, strict=True)
        )
        return same_past and requests == self.requests


class SharedDecisions:
    """`decide`, but equal questions are answered once. May be called from several threads."""

    def __init__(self) -> None:
        self._known: deque[_Decision] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()
        self.decided = 0
        """How many questions were not answered before."""

    def decide(
        self,
        requests: Sequence[TableRequest],
        *,
        previous: Plan | None = None,
        policy_generation: int = 0,
        now_unix_s: float = 0.0,
    ) -> Plan:
        """See `controller.decide.decide`. Raises: FieldError."""
        asked, before = tuple(requests), () if previous is None else previous.tables
        with self._lock:
            known = next((one for one in self._known if one.answers(asked, before)), None)
        if known is not None:
            return Plan(tables=known.tables, policy_generation=policy_generation, decided_unix_s=now_unix_s)
        plan = decide(asked, previous=previous, policy_generation=policy_generation, now_unix_s=now_unix_s)
        with self._lock:
            self.decided += 1
            self._known.append(_Decision(asked, before, plan.tables))
        return plan
