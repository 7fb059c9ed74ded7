"""The controller's benchmark on a small scale: its scenarios run, and its figures are what they say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import controller as module

    yield module
    for name in ("controller", "controller_profiles", "controller_fairness"):
        sys.modules.pop(name, None)


def scenario_named(controller: Any, name: str, transfers: int = 60) -> Any:
    profiles = controller.smollm2_profiles()
    return next(one for one in controller.scenarios(profiles, transfers=transfers, seed=1) if one.name == name)


@pytest.mark.slow
def test_the_oracle_is_ahead_of_everybody_and_the_controller_of_raw(controller: Any) -> None:
    outcome = controller.run(scenario_named(controller, "best arm turns 4x slower"))
    assert 0 < outcome.regret < outcome.raw_regret
    assert min(outcome.kvserve_regret, outcome.kvserve_exploring_regret, outcome.best_static_regret) > -0.001
    assert 0.9 < outcome.worst_vs_static < 1.1


def test_every_scenario_has_segments_that_are_long_enough(controller: Any) -> None:
    found = list(controller.scenarios(controller.smollm2_profiles(), transfers=50, seed=0))
    assert len({one.name for one in found}) == len(found) > 8
    for one in found:
        assert all(b - a >= controller.LEAST_SEGMENT for a, b in one.segments)
        assert one.segments[-1][1] == len(one.arrivals)


@pytest.mark.slow
def test_the_last_line_leaves_out_what_is_extra(controller: Any) -> None:
    outcome = controller.run(scenario_named(controller, "best arm 4x slower than profiled"))
    extra = replace(outcome, is_extra=True, regret=9.0, worst_vs_static=9.0)
    fairness = [("p", controller.Fairness(name="both levers", jain=0.95, slowdown={}, mean_s=1.0))]
    assert controller.last_line([outcome, extra], fairness) == controller.last_line([outcome], fairness)
    assert controller.last_line([outcome], fairness).endswith("jain=0.95")


@pytest.mark.slow
def test_the_fair_queue_spares_the_modest_tenant(controller: Any) -> None:
    by_name = {one.name: one for one in controller.compare(controller.smollm2_profiles(), transfers=150, seed=2)}
    greedy, both = by_name["latency-greedy, order of arrival"], by_name["both levers"]
    assert greedy.jain < 0.8 < 0.9 < both.jain
    assert both.slowdown["modest"] < greedy.slowdown["modest"] / 3
    assert both.mean_s < greedy.mean_s
