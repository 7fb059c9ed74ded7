"""Where a codec stops being faster than raw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from break_even import CodecSpeed

speeds = st.floats(1e6, 1e10)
ratios = st.floats(1.01, 100)


@given(ratio=ratios, encode=speeds, decode=speeds)
def test_at_break_even_both_ways_take_as_long(ratio: float, encode: float, decode: float) -> None:
    speed = CodecSpeed(ratio=ratio, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
    for limit, gain in (
        (speed.sequential_bytes_per_s, speed.sequential_gain),
        (speed.overlapped_bytes_per_s, speed.overlapped_gain),
    ):
        assert gain(limit) == pytest.approx(1)
        assert gain(limit / 1.1) > 1 > gain(limit * 1.1)
    assert speed.sequential_bytes_per_s < speed.overlapped_bytes_per_s


def test_by_hand() -> None:
    """100 MB/s both ways and half the bytes: 0.5 / (2 / 100) MB/s; on 12.5 MB/s 8 s for 4 s and twice 1 s."""
    speed = CodecSpeed(ratio=2, encode_bytes_per_s=100e6, decode_bytes_per_s=100e6)
    assert speed.sequential_bytes_per_s == pytest.approx(25e6)
    assert speed.overlapped_bytes_per_s == 100e6
    assert speed.sequential_gain(12.5e6) == pytest.approx(8 / 6)
    assert speed.overlapped_gain(12.5e6) == pytest.approx(2)
    assert speed.overlapped_gain(80e6) == pytest.approx(1.25)


@pytest.mark.parametrize("ratio", [0.99, 1.0])
def test_a_codec_that_saves_nothing_never_wins(ratio: float) -> None:
    speed = CodecSpeed(ratio=ratio, encode_bytes_per_s=1e9, decode_bytes_per_s=1e9)
    assert (speed.sequential_bytes_per_s, speed.overlapped_bytes_per_s) == (0, 0)
    assert speed.sequential_gain(1e6) < 1
    assert speed.overlapped_gain(1e6) <= 1


@pytest.mark.parametrize("field", ["ratio", "encode_bytes_per_s", "decode_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_speed_is_refused(field: str, value: float) -> None:
    fields = {"ratio": 2.0, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9, field: value}
    with pytest.raises(ValueError, match=f"^{field}: "):
        CodecSpeed(**fields)
