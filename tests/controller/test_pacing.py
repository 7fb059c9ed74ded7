"""When the next plan may be made: after an interval, or at once on a surprise, as long as there is credit."""

from __future__ import annotations

import math

import pytest

from controld.contract.errors import FieldError
from controld.controller.pacing import CREDIT, CREDIT_INTERVALS, SURPRISE_LOG, Pace

BIG, SMALL = 2 * SURPRISE_LOG, SURPRISE_LOG / 2


def test_the_first_plan_waits_for_nothing_and_the_next_one_an_interval() -> None:
    pace = Pace(1.0)
    assert pace.earliest_s(5.0, 0.0) == 5.0
    pace.planned(5.0)
    assert pace.earliest_s(5.2, SMALL) == 6.0
    assert pace.earliest_s(7.5, SMALL) == 7.5


def test_a_surprise_does_not_wait_whichever_way_it_goes() -> None:
    pace = Pace(1.0)
    pace.planned(5.0)
    assert pace.earliest_s(5.2, BIG) == 5.2
    assert pace.earliest_s(5.2, -BIG) == 5.2


def test_surprises_without_end_use_up_the_credit_and_it_comes_back_slowly() -> None:
    pace = Pace(1.0)
    pace.planned(0.0)
    for number in range(1, CREDIT + 1):
        now_s = number / 100
        assert pace.earliest_s(now_s, BIG) == now_s
        pace.planned(now_s)
    last_s = CREDIT / 100
    assert pace.earliest_s(last_s + 0.01, BIG) == pytest.approx(last_s + 1.0)
    pace.planned(last_s + CREDIT_INTERVALS)
    assert pace.earliest_s(last_s + CREDIT_INTERVALS + 0.01, BIG) == last_s + CREDIT_INTERVALS + 0.01


def test_in_the_long_run_there_are_few_more_plans_than_intervals() -> None:
    pace, plans, now_s = Pace(1.0), 0, 0.0
    while now_s < 200:
        pace.planned(now_s)
        plans += 1
        now_s = max(pace.earliest_s(now_s + 0.01, BIG), now_s + 0.01)
    assert 200 <= plans <= 200 * (1 + 1 / CREDIT_INTERVALS) + CREDIT + 1


@pytest.mark.parametrize("interval_s", [-1.0, math.nan, math.inf])
def test_an_interval_is_a_time(interval_s: float) -> None:
    with pytest.raises(FieldError, match="interval_s"):
        Pace(interval_s)
