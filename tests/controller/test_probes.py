"""Which arm's turn it is to be measured again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from controld.controller.decide import decide
from controld.controller.goals import ClassGoal, Objective
from controld.controller.probes import arms_in_use, next_probe

Build = Callable[..., Any]


def test_arms_take_turns_and_raw_and_unused_ones_have_none(profile: Build, request_for: Build) -> None:
    fast, small, lossy = profile(12), profile(8, ratio=12.0, loss_mean_nats=0.012), profile(4, loss_mean_nats=0.5)
    names = {"default": Objective.LATENCY, "batch": Objective.BYTES}
    goals = tuple(
        ClassGoal(name=name, workload="dialogue", objective=objective, max_quality_loss_nats=0.02, explore_share=0.0)
        for name, objective in names.items()
    )
    plan = decide([request_for(fast, small, lossy, goals=goals)])
    used = arms_in_use(plan)
    assert {arm for _, arm in used} <= {fast.arm_id, small.arm_id}
    assert small.arm_id in {arm for _, arm in used}, "fewest bytes"
    profiles = [fast, small, lossy]
    probed: dict[tuple[str, str], float] = {}
    turns = []
    for at_s in range(4):
        found = next_probe(plan, profiles, probed)
        assert found is not None
        turns.append(found.arm_id)
        probed[found.workload, found.arm_id] = float(at_s)
    assert turns[0] == used.most_common(1)[0][0][1], "the most used one first"
    assert turns[:2] == turns[2:] if len(used) == 2 else set(turns) == {turns[0]}


def test_nothing_is_probed_where_everything_is_raw_or_nothing_is_known(profile: Build, request_for: Build) -> None:
    assert next_probe(decide([request_for()]), [profile()], {}) is None
    assert next_probe(decide([request_for(profile())]), [], {}) is None
