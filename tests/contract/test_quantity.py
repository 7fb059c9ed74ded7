"""Quantities carry units; anything else is refused with what to write instead."""

from __future__ import annotations

import pytest

from controld.contract.errors import FieldError
from controld.contract.quantity import (
    format_duration,
    format_rate,
    format_size,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_share,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_duration_s, "300ms", 0.3),
        (parse_duration_s, "0.3s", 0.3),
        (parse_size_bytes, "20MB", 20e6),
        (parse_size_bytes, "2MiB", 2 * 2**20),
        (parse_rate_bytes_per_s, "10Gbit", 1.25e9),
        (parse_rate_bytes_per_s, "80Mbit/s", 1e7),
        (parse_rate_bytes_per_s, "1GB/s", 1e9),
        (parse_share, "2%", 0.02),
    ],
)
def test_parses(parse, text, value) -> None:  # type: ignore[no-untyped-def]
    assert parse(text, field="x") == pytest.approx(value)


@pytest.mark.parametrize(
    "bad", [300, "300", "ms", "300 parsecs", "-3ms", "1e999s", "NaNs", None, True, "3ms3", "٣00ms"]
)
def test_refuses_with_the_field_and_an_example(bad: object) -> None:
    with pytest.raises(FieldError, match=r"slo\.ttft"):
        parse_duration_s(bad, field="slo.ttft")


def test_the_hint_is_the_users_own_number() -> None:
    with pytest.raises(FieldError) as caught:
        parse_duration_s("300", field="slo.ttft")
    assert str(caught.value) == 'slo.ttft: "300" has no unit (write 300ms or 0.3s)'


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(FieldError, match="above"):
        parse_share("120%", field="explore")


def test_formats_for_people() -> None:
    assert format_duration(0.021) == "21 ms"
    assert format_duration(0.31) == "0.31 s"
    assert format_size(14e6) == "14 MB"
    assert format_rate(78e6 / 8) == "78 Mbit/s"
