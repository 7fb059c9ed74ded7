from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import StageTime
from controld.contract.errors import FieldError
from controld.controller.envelope import Interval, Lines, lower_envelope
from controld.controller.goals import TableRequest
from controld.controller.knobs.base import Context
from controld.controller.knobs.kv_transfer import KvTransfer

Build = Callable[..., Any]


def lines(*arms: tuple[float, float]) -> Lines:
    """Single lines (intercept, slope), one size."""
    table = np.array(arms, dtype=np.float64)
    return Lines(intercept_s=table[:, :1, None], slope_bytes=table[:, 1:, None])


def test_two_lines_cross_where_arithmetic_says() -> None:
    # (0.3 - 0) s over (10 - 4) MB: equal at 20 MB/s.
    [intervals] = lower_envelope(lines((0.0, 10e6), (0.3, 4e6)))
    assert [i.arm for i in intervals] == [0, 1]
    assert intervals[0].low_bytes_per_s == intervals[1].high_bytes_per_s == pytest.approx(20e6, rel=1e-12)
    assert (intervals[0].high_bytes_per_s, intervals[1].low_bytes_per_s) == (math.inf, 0.0)


def test_intervals_are_cut_at_crossings_of_neighbours_and_not_where_coding_begins_to_pay() -> None:
    # A slow codec with the best ratio begins to pay (against raw) at a higher rate than it begins to win: between the
    # two another codec does. An interval table cut at break-evens names the wrong one there.
    raw, quick, small = (0.0, 100e6), (0.05, 20e6), (0.2, 10e6)
    [intervals] = lower_envelope(lines(raw, quick, small))
    assert [i.arm for i in intervals] == [0, 1, 2]
    break_even = (small[1] - raw[1]) / (raw[0] - small[0])
    crossing = (small[1] - quick[1]) / (quick[0] - small[0])
    assert intervals[2].high_bytes_per_s == pytest.approx(crossing) == pytest.approx(66.7e6, rel=1e-2)
    assert break_even == pytest.approx(450e6)


def test_equal_and_dominated_arms_do_not_appear_and_the_first_of_equals_does() -> None:
    for arms in ([(0.1, 1.0), (0.1, 1.0)], [(0.1, 1.0), (0.2, 1.0)], [(0.1, 1.0), (0.1, 2.0)]):
        assert lower_envelope(lines(*arms)) == ((Interval(arm=0, low_bytes_per_s=0.0, high_bytes_per_s=math.inf),),)


def test_three_lines_through_one_point_leave_no_sliver() -> None:
    [intervals] = lower_envelope(lines((0.0, 3.0), (0.1, 2.0), (0.2, 1.0)))
    assert [i.arm for i in intervals] == [0, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_numbers_that_are_no_times_are_refused_by_name(bad: float) -> None:
    with pytest.raises(FieldError, match="slope_bytes"):
        lines((0.0, bad))
    with pytest.raises(FieldError, match="intercept_s"):
        lines((bad, 0.0))
    with pytest.raises(FieldError, match="no arm"):
        Lines(intercept_s=np.zeros((0, 1, 1)), slope_bytes=np.zeros((0, 1, 1)))


@st.composite
def some_lines(draw: st.DrawFn) -> Lines:
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 2), st.integers(1, 3)))
    count = int(np.prod(shape))
    # Few distinct values, so that equal and parallel lines are common.
    intercepts = draw(
        st.lists(st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.07, 0.5, 3.0]), min_size=count, max_size=count)
    )
    slopes = draw(st.lists(st.floats(0.0, 1e9) | st.sampled_from([1e6, 2e6]), min_size=count, max_size=count))
    return Lines(intercept_s=np.array(intercepts).reshape(shape), slope_bytes=np.array(slopes).reshape(shape))


@settings(max_examples=40, deadline=None)
@given(some_lines())
def test_the_winner_of_a_dense_scan_is_never_faster(arms: Lines) -> None:
    envelope = lower_envelope(arms)
    assert len(envelope) == arms.intercept_s.shape[2]
    rates = np.geomspace(1e-2, 1e16, 300)
    for size, intervals in enumerate(envelope):
        assert intervals[0].high_bytes_per_s == math.inf
        assert intervals[-1].low_bytes_per_s == 0.0
        for upper, lower in itertools.pairwise(intervals):
            assert upper.low_bytes_per_s == lower.high_bytes_per_s
            assert upper.arm != lower.arm
        seconds = arms.seconds(np.repeat((1 / rates)[:, None], arms.intercept_s.shape[2], axis=1))[:, :, size]
        lows = np.array([i.low_bytes_per_s for i in reversed(intervals)])
        named = np.array([i.arm for i in reversed(intervals)])[np.searchsorted(lows, rates, side="right") - 1]
        best = seconds.min(axis=0)
        assert (seconds[named, np.arange(len(rates))] <= best * (1 + 1e-7) + 1e-15).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(
    numbers=st.lists(
        st.tuples(st.floats(0, 0.05), st.floats(0, 1e-7), st.floats(0, 0.05), st.floats(0, 1e-7), st.floats(0.8, 12)),
        min_size=1, max_size=5,
    ),
    chunk_bytes=st.sampled_from([1e5, 1.5e6, 1e12]),
)  # fmt: skip
def test_at_rest_the_lines_are_the_cost_model_itself(
    profile: Build, request_for: Build, numbers: list[tuple[float, ...]], chunk_bytes: float
) -> None:
    profiles = [
        profile(4 + i, encode=StageTime(ea, eb), decode=StageTime(da, db), ratio=ratio)
        for i, (ea, eb, da, db, ratio) in enumerate(numbers)
    ]
    request: TableRequest = request_for(*profiles)
    [item] = request.class_inputs()
    knob, factors = KvTransfer(chunk_bytes=chunk_bytes), item.corrections.factors()
    sizes, rates = np.array([3e5, 1e6, 14e6, 2e8]), np.geomspace(1e5, 1e12, 30)
    context = Context(sizes_bytes=sizes, bandwidths_bytes_per_s=rates, loads=np.zeros(1))
    predicted = knob.predict(item.models, factors, context).total_s[:, :, :, 0]
    told = knob.lines(item.models, factors, sizes).seconds(np.repeat(1 / rates[:, None], len(sizes), axis=1))
    np.testing.assert_allclose(told.transpose(0, 2, 1), predicted, rtol=1e-9)
