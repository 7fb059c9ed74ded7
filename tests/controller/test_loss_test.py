"""Losses that probes measure again: healthy arms stay, worse ones break, and three segments at least condemn one."""

from __future__ import annotations

import numpy as np
import pytest

from controld.controller.loss_test import LossTest, spread_of

LIMIT_NATS, SPREAD_NATS = 0.02, 0.004


def segments_until_broken(losses: list[float], limit: float = LIMIT_NATS, spread: float = SPREAD_NATS) -> int | None:
    test = LossTest()
    for number, loss in enumerate(losses, start=1):
        test = test.observe(loss, limit, spread)
        if test.suspicion > 1:
            return number
    return None


def test_an_arm_a_spread_below_its_limit_never_breaks_in_ten_thousand_segments() -> None:
    draw = np.random.default_rng(5)
    assert segments_until_broken(draw.normal(LIMIT_NATS - SPREAD_NATS, SPREAD_NATS, 10_000).tolist()) is None


def test_an_arm_at_its_very_limit_breaks_about_as_seldom_as_said() -> None:
    draw = np.random.default_rng(6)
    runs = [segments_until_broken(draw.normal(LIMIT_NATS, SPREAD_NATS, 30_000).tolist()) for _ in range(30)]
    assert None not in runs
    assert 1_300 < np.mean([run for run in runs if run is not None]) < 5_000


@pytest.mark.parametrize(("spreads_above", "at_most"), [(1.0, 40), (2.0, 8), (4.0, 4)])
def test_a_worse_arm_breaks_within(spreads_above: float, at_most: int) -> None:
    draw = np.random.default_rng(7)
    found = segments_until_broken(draw.normal(LIMIT_NATS + spreads_above * SPREAD_NATS, SPREAD_NATS, 200).tolist())
    assert found is not None and 3 <= found <= at_most


def test_no_two_segments_condemn_however_bad_and_three_do() -> None:
    assert segments_until_broken([1e6, 1e6]) is None
    assert segments_until_broken([1e6, 1e6, 1e6]) == 3


def test_what_should_lose_nothing_may_lose_what_rounding_does() -> None:
    assert segments_until_broken([1e-5, -2e-6, 4e-5] * 500, limit=0.0, spread=0.0) is None
    assert segments_until_broken([0.001] * 3, limit=0.0, spread=0.0) == 3


def test_the_mean_is_of_the_run_that_broke_it() -> None:
    test = LossTest()
    for loss in (0.0, 0.0, 0.04, 0.06):
        test = test.observe(loss, LIMIT_NATS, SPREAD_NATS)
    assert (test.samples, test.run_samples) == (4, 2)
    assert test.mean_nats == pytest.approx(0.05)
    assert spread_of(0.001, 16) == pytest.approx(0.004)
