"""Small writes tell the same bandwidth as large ones, on fast links and on slow ones."""

from __future__ import annotations

import pytest

from dataplanes.sglang.pd.transfer import WireSpan
from dataplanes.sglang.pd.write_overhead import LARGEST_S, WriteOverhead


def _rate(tracker: WriteOverhead, wire_bytes: int, *, bandwidth: float, overhead_s: float) -> float:
    span = tracker.without(WireSpan(5.0, 5.0 + overhead_s + wire_bytes / bandwidth, wire_bytes))
    assert span.end_s == 5.0 + overhead_s + wire_bytes / bandwidth
    return wire_bytes / (span.end_s - span.start_s)


def test_small_writes_agree_with_large_ones_once_both_were_seen() -> None:
    tracker = WriteOverhead()
    alone = _rate(tracker, 300_000, bandwidth=250e6, overhead_s=0.001)
    assert alone == pytest.approx(300_000 / 0.0022)
    _rate(tracker, 12_000_000, bandwidth=250e6, overhead_s=0.001)
    for _ in range(5):
        assert _rate(tracker, 300_000, bandwidth=250e6, overhead_s=0.001) == pytest.approx(250e6, rel=0.05)
        assert _rate(tracker, 12_000_000, bandwidth=250e6, overhead_s=0.001) == pytest.approx(250e6, rel=0.03)


def test_a_slower_link_is_not_taken_for_overhead() -> None:
    tracker = WriteOverhead()
    _rate(tracker, 12_000_000, bandwidth=250e6, overhead_s=0.0)
    for _ in range(300):
        rate = _rate(tracker, 300_000, bandwidth=1.6e6, overhead_s=0.001)
        assert 1.55e6 < rate < 1.65e6
    assert LARGEST_S < 0.02 * 300_000 / 1.6e6


def test_half_a_span_always_stays_and_empty_ones_pass() -> None:
    tracker = WriteOverhead()
    _rate(tracker, 10_000_000, bandwidth=1e9, overhead_s=0.0)
    span = tracker.without(WireSpan(1.0, 1.001, 100))
    assert span.end_s - span.start_s == pytest.approx(0.0005)
    assert tracker.without(WireSpan(1.0, 1.0, 0)) == WireSpan(1.0, 1.0, 0)
