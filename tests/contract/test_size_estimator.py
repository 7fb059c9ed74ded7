from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.errors import FieldError
from controld.contract.size_estimator import OTHER_CLASSES, RELATIVE_ERROR, SizeEstimator


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1.0, 2.0**53), min_size=1, max_size=60))
def test_quantiles_are_right_within_the_stated_error(sizes: list[float]) -> None:
    estimator = SizeEstimator()
    for size in sizes:
        estimator.observe(5.0, "chat", size)
    found = estimator.estimate(5.0, "chat")
    assert found is not None
    for share, told in ((0.5, found.median_bytes), (0.9, found.p90_bytes), (0.99, found.p99_bytes)):
        true = sorted(sizes)[math.ceil(share * len(sizes) - 1e-9) - 1]
        assert told == pytest.approx(true, rel=RELATIVE_ERROR * 1.0001)
    assert found.mean_bytes == pytest.approx(float(np.mean(sizes)), rel=1e-9)
    assert (found.count, found.weight) == (len(sizes), pytest.approx(len(sizes)))


def test_a_known_distribution_is_found() -> None:
    draw = random.Random(3)
    estimator = SizeEstimator(half_life_s=1e9)
    for second in range(20_000):
        estimator.observe(float(second), "chat", 14e6 * math.exp(draw.gauss(0, 0.8)))
    found = estimator.estimate(20_000.0, "chat")
    assert found is not None
    # 20,000 draws leave a standard error of 0.7 % on the median and 1 % on P90.
    assert found.median_bytes == pytest.approx(14e6, rel=0.05)
    assert found.p90_bytes == pytest.approx(14e6 * math.exp(0.8 * 1.2816), rel=0.05)


def test_what_is_older_counts_less_and_a_new_mix_takes_over() -> None:
    estimator = SizeEstimator(half_life_s=100.0)
    for second in range(1000):
        estimator.observe(float(second), "chat", 1e6)
    for second in range(1000, 1100):
        estimator.observe(float(second), "chat", 50e6)
    at_half_life = estimator.estimate(1100.0, "chat")
    assert at_half_life is not None
    assert at_half_life.weight == pytest.approx(100 / math.log(2), rel=0.02)
    assert estimator.estimate(1200.0, "chat").weight == pytest.approx(at_half_life.weight / 2)  # type: ignore[union-attr]
    for second in range(1100, 1300):
        estimator.observe(float(second), "chat", 50e6)
    later = estimator.estimate(1300.0, "chat")
    assert later is not None
    assert later.median_bytes == pytest.approx(50e6, rel=RELATIVE_ERROR)
    assert later.mean_bytes == pytest.approx(50e6 - 49e6 / 8, rel=0.01)


def test_years_of_traffic_neither_overflow_nor_grow() -> None:
    estimator = SizeEstimator(half_life_s=10.0)
    for step in range(3000):
        estimator.observe(step * 3600.0, "chat", 1e3 * 1.008**step)
    found = estimator.estimate(3000 * 3600.0, "chat")
    assert found is not None
    assert found.median_bytes == pytest.approx(1e3 * 1.008**2999, rel=RELATIVE_ERROR)
    assert len(estimator._sketches["chat"].weights) < 50


def test_classes_are_apart_and_bounded() -> None:
    estimator = SizeEstimator(max_classes=2)
    for name, size in (("a", 1e6), ("b", 2e6), ("c", 3e6), ("d", 3e6)):
        estimator.observe(0.0, name, size)
    assert list(estimator.estimates(0.0)) == ["a", "b", OTHER_CLASSES]
    assert estimator.estimate(0.0, "nobody") is None
    assert estimator.estimates(7.0)[OTHER_CLASSES].count == 2
    assert estimator.estimates(7.0)["a"].age_s == 7.0


@pytest.mark.parametrize(("now", "size"), [(math.nan, 1.0), (0.0, math.nan), (0.0, -1.0), (0.0, math.inf)])
def test_what_is_no_size_is_refused_and_changes_nothing(now: float, size: float) -> None:
    estimator = SizeEstimator()
    estimator.observe(0.0, "a", 5.0)
    before = estimator.estimates(1.0)
    with pytest.raises(FieldError):
        estimator.observe(now, "a", size)
    estimator.observe(0.0, "a", 0.0)
    assert estimator.estimates(1.0) == before
    with pytest.raises(FieldError):
        SizeEstimator(half_life_s=0.0)
