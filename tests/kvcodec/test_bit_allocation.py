"""RateQuant's closed form is the optimum, and never worse than equal bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.kvcodec.bit_allocation import Bits, Numbers, allocate_bits, fit_decay, water_filling


def weighted_error(importance: Numbers, bits: Numbers | Bits, decay: float) -> float:
    return float((importance * decay ** -np.asarray(bits, np.float64)).sum())


@st.composite
def problems(draw: st.DrawFn, *, heads: int) -> tuple[Numbers, float]:
    count, spread = draw(st.integers(1, heads)), draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    return generator.lognormal(0, spread, count), draw(st.sampled_from([1.5, 3.6, 5.3, 40.0]))


@settings(deadline=None, max_examples=200)
@given(problem=problems(heads=90), mean=st.sampled_from([2.0, 2.25, 2.5, 3.0, 3.7, 6.0, 8.0]))
def test_real_bits_meet_the_budget_and_the_optimality_conditions(problem: tuple[Numbers, float], mean: float) -> None:
    importance, decay = problem
    bits = water_filling(importance, mean, decay)
    assert bits.min() >= 2
    assert bits.max() <= 8
    assert bits.mean() == pytest.approx(mean)
    # What one more bit would save is the same for all heads between the limits, less at the lower, more at the upper.
    saving = np.log(importance) - bits * np.log(decay)
    inside = (bits > 2 + 1e-9) & (bits < 8 - 1e-9)
    if inside.any():
        level = saving[inside].mean()
        assert np.allclose(saving[inside], level)
        assert (saving[bits <= 2 + 1e-9] <= level + 1e-6).all()
        assert (saving[bits >= 8 - 1e-9] >= level - 1e-6).all()


@settings(deadline=None, max_examples=200)
@given(problem=problems(heads=90), mean=st.sampled_from([2.0, 2.5, 3.0, 3.7, 6.0, 8.0]))
def test_whole_bits_never_lose_to_equal_bits(problem: tuple[Numbers, float], mean: float) -> None:
    importance, decay = problem
    bits = allocate_bits(importance, mean, decay)
    total = int(bits.sum())
    assert total == int(np.floor(mean * importance.size + 0.5))
    assert bits.min() >= 2
    assert bits.max() <= 8
    # Equal bits, and the rest of the budget spent as well as it can be.
    equal = np.full(importance.size, total // importance.size)
    equal[np.argsort(-importance)[: total - int(equal.sum())]] += 1
    assert weighted_error(importance, bits, decay) <= weighted_error(importance, equal, decay) * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(problem=problems(heads=5), total=st.integers(4, 10))
def test_whole_bits_are_the_best_there_are(problem: tuple[Numbers, float], total: int) -> None:
    importance, decay = problem
    heads = importance.size
    mean = min(max(total / heads, 2), 4)
    bits = allocate_bits(importance, mean, decay, most=4)
    best = min(
        weighted_error(importance, np.array(choice), decay)
        for choice in itertools.product(range(2, 5), repeat=heads)
        if sum(choice) == bits.sum()
    )
    assert weighted_error(importance, bits, decay) == pytest.approx(best)


def test_much_of_the_gap_to_many_bits_is_recovered_where_heads_differ() -> None:
    importance = np.random.default_rng(0).lognormal(0, 2, 90)
    equal = weighted_error(importance, np.full(90, 3), 5)
    assert weighted_error(importance, allocate_bits(importance, 3, 5), 5) < 0.5 * equal


def test_a_larger_decay_spreads_less() -> None:
    importance = np.random.default_rng(0).lognormal(0, 1, 90)
    assert allocate_bits(importance, 4, 2).std() > allocate_bits(importance, 4, 8).std()


def test_decay_is_found_in_the_errors_it_made() -> None:
    amplitude, decay = fit_decay([2, 3, 4, 6], [0.3 * 4.7**-bits for bits in (2, 3, 4, 6)])
    assert (amplitude, decay) == (pytest.approx(0.3), pytest.approx(4.7))
    with pytest.raises(ValueError, match="decay"):
        fit_decay([2, 3], [0.1, 0.2])


@pytest.mark.parametrize(
    ("importance", "mean", "decay"),
    [([1.0], 1.0, 5.0), ([1.0], 9.0, 5.0), ([1.0], 3.0, 1.0), ([0.0], 3.0, 5.0), ([np.nan], 3.0, 5.0), ([], 3.0, 5.0)],
)
def test_nonsense_is_refused(importance: list[float], mean: float, decay: float) -> None:
    with pytest.raises(ValueError):
        allocate_bits(np.array(importance), mean, decay)
