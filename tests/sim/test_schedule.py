"""The link's rate over time, and the link itself."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.errors import FieldError
from controld.sim.link import FifoLink, LinkTruth
from controld.sim.schedule import Drift, RateSchedule, Trait, drift_factor

MBIT = 125e3


@pytest.mark.parametrize(
    ("text", "moment", "transfers", "rate"),
    [
        ("100Mbit", 1e9, 10**6, 100),
        ("0s=2Gbit,60s=100Mbit", 59.9, 500, 2000),
        ("0s=2Gbit,60s=100Mbit", 60.0, 0, 100),
        ("0=2Gbit,50=100Mbit", 1e6, 49, 2000),
        ("0=2Gbit,50=100Mbit", 0.0, 50, 100),
        ("0s=100Mbit,10s~200Mbit,20s~0.1Gbit", 5.0, 0, 150),
        ("0s=100Mbit,10s~200Mbit,20s~0.1Gbit", 15.0, 0, 150),
        ("0s=100Mbit,10s~200Mbit,20s~0.1Gbit", 99.0, 0, 100),
        (" 0 = 2Gbit , 1min = 100Mbit ", 61.0, 0, 100),
    ],
)
def test_schedules_are_read(text: str, moment: float, transfers: int, rate: float) -> None:
    assert RateSchedule.parse(text).rate(moment, transfers) == pytest.approx(rate * MBIT)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fast", "not a number"),
        ("100", "has no unit"),
        ("0Mbit", "no rate"),
        ("5s=1Gbit", "begins at 0"),
        ("0s=1Gbit,5s=1Mbit,5s=2Mbit", "does not come after"),
        ("0s=1Gbit,5=1Mbit,7s=1Mbit", "some points are moments"),
        ("0=1Gbit,5~1Mbit", "over time, not over transfers"),
        ("0s=1Gbit,10Mbit", "not a moment and a rate"),
        ("0s=1Gbit,1x=10Mbit", "unknown unit"),
    ],
)
def test_schedules_that_say_nothing_are_refused(text: str, problem: str) -> None:
    with pytest.raises(FieldError, match=problem) as raised:
        RateSchedule.parse(text)
    assert raised.value.field.startswith("link")


@settings(max_examples=50, deadline=None)
@given(
    start_s=st.floats(0, 40),
    size_bytes=st.floats(1, 1e9),
    rates=st.lists(st.tuples(st.floats(1e5, 1e8), st.booleans()), min_size=1, max_size=6),
)
def test_bytes_are_the_integral_of_the_rate(start_s: float, size_bytes: float, rates: list[tuple[float, bool]]) -> None:
    text = ",".join(
        f"{index * 7}s{'~' if ramp and index else '='}{rate * 8:.3f}bit" for index, (rate, ramp) in enumerate(rates)
    )
    schedule = RateSchedule.parse(text)
    end_s = schedule.finish_s(start_s, size_bytes, 0)
    # By trapezia between all corners: exact for lines, and steps are taken at their middle.
    corners = sorted({start_s, end_s, *(p.at for p in schedule.points if start_s < p.at < end_s)})
    carried = sum(schedule.rate((low + high) / 2, 0) * (high - low) for low, high in itertools.pairwise(corners))
    assert carried == pytest.approx(size_bytes, rel=1e-6)


def test_the_link_is_slow_after_a_rest_and_only_then() -> None:
    truth = LinkTruth(schedule=RateSchedule.constant(1e8), rtt_s=0.02, initial_window_bytes=14_600, rest_s=0.5)
    link = FifoLink(truth)
    first_s = link.send(0.0, 1e6, 0)[1]
    second_start, second_end = link.send(0.0, 1e6, 0)
    assert second_start == first_s
    later_start, later_end = link.send(second_end + 0.4, 1e6, 0)
    rested_start, rested_end = link.send(later_end + 0.6, 1e6, 0)
    assert later_end - later_start == pytest.approx(1e6 / 1e8)
    assert rested_end - rested_start == pytest.approx(first_s)
    # 14,600 bytes in the first round trip, then twice as many in each: 1 MB takes log2(1 + 1e6 ln 2 / W) of them.
    assert first_s == pytest.approx(0.02 * math.log2(1 + 1e6 * math.log(2) / 14_600))


def test_slow_start_ends_at_the_link_s_rate() -> None:
    truth = LinkTruth(schedule=RateSchedule.constant(1e7), rtt_s=0.02, initial_window_bytes=14_600)
    slow_for_s = 0.02 * math.log2(1e7 * 0.02 / 14_600)
    while_slow = (1e7 * 0.02 - 14_600) / math.log(2)
    _, end_s = FifoLink(truth).send(0.0, 5e6, 0)
    assert end_s == pytest.approx(slow_for_s + (5e6 - while_slow) / 1e7)


def test_a_copy_of_a_link_changes_nothing() -> None:
    link = FifoLink(LinkTruth(schedule=RateSchedule.constant(1e6)))
    link.send(0.0, 1e6, 0)
    before = link.copy().send(0.0, 1e6, 0)
    link.copy().send(0.0, 5e6, 0)
    assert link.send(0.0, 1e6, 0) == before


def test_drifts_multiply_where_they_hold() -> None:
    drifts = (
        Drift(factor=2.0, arm_id="a", traits=(Trait.ENCODE,), from_s=10.0),
        Drift(factor=3.0, traits=(Trait.ENCODE, Trait.LOSS), from_transfer=5, until_transfer=7),
    )
    assert drift_factor(drifts, Trait.ENCODE, "a", 11.0, 6) == 6.0
    assert drift_factor(drifts, Trait.ENCODE, "a", 9.0, 6) == 3.0
    assert drift_factor(drifts, Trait.ENCODE, "b", 11.0, 7) == 1.0
    assert drift_factor(drifts, Trait.DECODE, "a", 11.0, 6) == 1.0
    with pytest.raises(FieldError, match=r"drift\.factor"):
        Drift(factor=0.0)
