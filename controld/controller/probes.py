"""Which arm is measured again next. Pure: the profiling worker's probes are asked for elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from controld.candidates.profile import Profile
from controld.controller.plan import Plan

ProbedArm = tuple[str, str]
"""Workload and arm id: what a loss is measured of; classes of one workload share it."""


def arms_in_use(plan: Plan) -> Counter[ProbedArm]:
    """Of each coded arm that is some cell's choice, in how many cells."""
    found: Counter[ProbedArm] = Counter()
    for table in plan.tables:
        by_class = table.winners.reshape(len(table.classes), -1)
        for item, winners in zip(table.classes, by_class, strict=True):
            for index, cells in enumerate(np.bincount(winners, minlength=len(table.arms)).tolist()):
                if cells and table.arms[index].configuration is not None:
                    found[item.goal.workload, table.arms[index].arm_id] += cells
    return found


def next_probe(plan: Plan, profiles: Iterable[Profile], probed: Mapping[ProbedArm, float]) -> Profile | None:
    """The profile to measure again: of an arm in use, the one whose turn was longest ago; of equal ones, the most used.

    Args:
        probed: when each arm was probed last; what is missing never was.
    """
    used = arms_in_use(plan)
    known = {(profile.workload, profile.arm_id): profile for profile in profiles}
    open_to = [arm for arm in used if arm in known]
    if not open_to:
        return None
    return known[min(open_to, key=lambda arm: (probed.get(arm, -np.inf), -used[arm], arm))]
