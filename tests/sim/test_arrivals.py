"""Traffic that is made up is what was asked for, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from controld.contract.errors import FieldError
from controld.sim.arrivals import MixShift, TrafficClass, gap_for_load, generate, one_after_another

CLASSES = (
    TrafficClass(name="chat", tenant="a", median_bytes=2e6, log_sd=0.5, share=3.0),
    TrafficClass(name="batch", tenant="b", median_bytes=20e6, share=1.0, peer=1),
)


def test_shares_sizes_and_gaps_are_as_asked_for() -> None:
    arrivals = generate(CLASSES, count=8_000, gap_s=0.1, seed=1)
    chat = [a for a in arrivals if a.service_class == "chat"]
    assert len(chat) / len(arrivals) == pytest.approx(0.75, abs=0.02)
    assert np.median([a.raw_bytes for a in chat]) == pytest.approx(2e6, rel=0.04)
    assert {(a.tenant, a.peer) for a in chat} == {("a", 0)}
    assert {a.raw_bytes for a in arrivals if a.peer == 1} == {20_000_000}
    gaps = np.diff([a.at_s for a in arrivals])
    assert gaps.mean() == pytest.approx(0.1, rel=0.04)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)


def test_load_is_offered_bytes_over_bandwidth() -> None:
    gap_s = gap_for_load(CLASSES, load=0.8, bandwidth_bytes_per_s=1e7)
    arrivals = generate(CLASSES, count=8_000, gap_s=gap_s, seed=2)
    offered = sum(a.raw_bytes for a in arrivals) / arrivals[-1].at_s
    assert offered / 1e7 == pytest.approx(0.8, rel=0.06)


def test_the_mix_shifts_where_it_should() -> None:
    shift = MixShift(400, (0.0, 1.0), rate_factor=4.0)
    arrivals = generate(CLASSES, count=800, gap_s=1.0, seed=3, shifts=[shift], is_poisson=False)
    assert {a.service_class for a in arrivals[400:]} == {"batch"}
    assert {a.service_class for a in arrivals[:400]} == {"chat", "batch"}
    assert arrivals[399].at_s == pytest.approx(400.0)
    assert arrivals[-1].at_s == pytest.approx(500.0)


def test_equal_seeds_give_equal_arrivals() -> None:
    assert generate(CLASSES, count=50, gap_s=1.0, seed=4) == generate(CLASSES, count=50, gap_s=1.0, seed=4)
    assert generate(CLASSES, count=50, gap_s=1.0, seed=4) != generate(CLASSES, count=50, gap_s=1.0, seed=5)
    pauses = one_after_another(CLASSES, count=50, pause_s=0.5, seed=4)
    assert {a.at_s for a in pauses} == {0.5}
    sizes = [a.raw_bytes for a in generate(CLASSES, count=50, gap_s=1.0, seed=4)]
    assert [a.raw_bytes for a in pauses] == sizes


def test_traffic_that_cannot_be_is_refused() -> None:
    with pytest.raises(FieldError, match=r"traffic\.default\.median_bytes"):
        TrafficClass(median_bytes=0)
    with pytest.raises(FieldError, match="2 shares"):
        generate(CLASSES, count=2, gap_s=1.0, seed=0, shifts=[MixShift(1, (1.0,))])
    with pytest.raises(FieldError, match="no class has a share"):
        generate([TrafficClass(share=0.0)], count=1, gap_s=1.0, seed=0)
    with pytest.raises(FieldError, match="load"):
        gap_for_load(CLASSES, load=0.0, bandwidth_bytes_per_s=1.0)
