"""What a simulated agent knows of its link is what a real one would."""

from __future__ import annotations

import random

import pytest

from controld.sim.deciders.link_view import TICK_S, LinkView
from dataplanes.agent.links import Link


def test_both_know_the_same_after_the_same_spans_and_arrivals() -> None:
    chance = random.Random(5)
    mine, real = LinkView(prior_bytes_per_s=7e6), Link(("pd", "default"))
    now_s, ticked_s = 0.0, 0.0
    assert mine.bandwidth_bytes_per_s(now_s) == 7e6 and real.bandwidth_bytes_per_s == 0.0
    for step in range(60):
        now_s += chance.expovariate(1.0)
        while ticked_s + TICK_S <= now_s:
            ticked_s += TICK_S
            real.refresh(ticked_s)
        size = chance.randrange(10**6, 10**7)
        mine.offered(now_s, size)
        real.offered(now_s, size)
        rate = 1e7 if step < 30 else 2e6
        start_s, now_s = now_s, now_s + size / rate * chance.uniform(0.9, 1.2)
        mine.wire_span(start_s, now_s, size)
        real.observe_wire(start_s, now_s, size)
        while ticked_s + TICK_S <= now_s:
            ticked_s += TICK_S
            real.refresh(ticked_s)
        if real.bandwidth_bytes_per_s:
            assert mine.bandwidth_bytes_per_s(now_s) == pytest.approx(real.bandwidth_bytes_per_s)
            expected = real.offered_bytes_per_s / real.bandwidth_bytes_per_s
            assert mine.load(now_s) == pytest.approx(expected)
    assert real.bandwidth_bytes_per_s == pytest.approx(2e6, rel=0.3)


def test_what_a_write_costs_beside_its_bytes_is_taken_off() -> None:
    plain, told = LinkView(), LinkView(overhead_s=2e-3)
    for view in (plain, told):
        for index in range(20):
            view.wire_span(index * 1.0, index * 1.0 + 2e-3 + 1e4 / 1e6, 1e4)
    assert told.bandwidth_bytes_per_s(20.0) == pytest.approx(1e6, rel=0.02)
    assert plain.bandwidth_bytes_per_s(20.0) == pytest.approx(1e4 / 12e-3, rel=0.02)
    short = LinkView(overhead_s=1.0)
    for index in range(20):
        short.wire_span(index * 1.0, index * 1.0 + 0.01, 1e4)
    assert short.bandwidth_bytes_per_s(20.0) == pytest.approx(2e6, rel=0.02)
