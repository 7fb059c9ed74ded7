"""What planning and explaining cost, on one table: the benchmark's figures are of what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import replan

from controld.controller.decide import decide
from controld.controller.plan import plan_equal


def test_a_table_is_as_large_as_it_says_and_still_when_nothing_moved() -> None:
    asked = replan.request(3)
    [table] = decide([asked]).tables
    assert len(table.classes) == replan.CLASSES
    assert all(len(item.candidates) == replan.CANDIDATES + 1 for item in table.classes)
    used = {table.arms[arm].arm_id for arm in set(table.winners.tolist())}
    assert len(used) >= 5, "a table in which one arm wins everywhere would be no measure"


@pytest.mark.slow
def test_figures_are_positive_and_news_make_another_plan() -> None:
    found = replan.measure(1)
    assert 0 < found["still_s"] < found["first_s"]
    assert 0 < found["explain_median_s"] < 0.05
    assert found["plan_bytes"] == found["cells"] * 3 * 2
    plan = decide([replan.request(0)])
    assert plan_equal(plan, decide([replan.request(0)], previous=plan))
    assert not plan_equal(plan, decide([replan.request(0, moved=0.3)], previous=plan))
