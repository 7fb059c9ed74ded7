"""Quantities with units, at the edges only: `300ms`, `20MB`, `10Gbit`, `2%`. Inside: SI base units."""

from __future__ import annotations

import math
import re

from controld.contract.errors import FieldError

_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ%/]*)\s*")

_DURATION_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZE_BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_RATE_BYTES_PER_S = {
    **{
        f"{prefix}bit{suffix}": factor / 8
        for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
        for suffix in ("", "/s")
    },
    **{f"{prefix}B/s": factor for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
}
_SHARE = {"%": 0.01}


def _parse(text: object, units: dict[str, float], *, field: str, example: str) -> float:
    if not isinstance(text, str):
        raise FieldError(field, f"{text!r} has no unit", hint=f"write {example}", code="quantity.unit_missing")
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise FieldError(
            field, f"{text!r} is not a number with a unit", hint=f"write {example}", code="quantity.malformed"
        )
    number, unit = match.groups()
    if not unit:
        raise FieldError(field, f'"{text}" has no unit', hint=f"write {example}", code="quantity.unit_missing")
    if unit not in units:
        raise FieldError(
            field,
            f'"{text}" has an unknown unit "{unit}"',
            hint=f"units: {', '.join(units)}",
            code="quantity.unit_unknown",
        )
    value = float(number) * units[unit]
    if not math.isfinite(value):
        raise FieldError(field, f'"{text}" is not finite', code="quantity.malformed")
    if value < 0:
        raise FieldError(field, f'"{text}" is negative', code="quantity.negative")
    return value


def parse_duration_s(text: object, *, field: str) -> float:
    """`300ms` to seconds.

    Raises:
        FieldError: no unit, an unknown one, or a negative or non-finite value.
    """
    bare = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    example = f"{bare.group(1)}ms or {float(bare.group(1)) / 1000:g}s" if bare and not bare.group(2) else "300ms"
    return _parse(text, _DURATION_S, field=field, example=example)


def parse_size_bytes(text: object, *, field: str) -> float:
    """`20MB` to bytes; decimal prefixes, or binary ones when spelt `MiB`. Raises: FieldError."""
    return _parse(text, _SIZE_BYTES, field=field, example="20MB")


def parse_rate_bytes_per_s(text: object, *, field: str) -> float:
    """`10Gbit` (or `10Gbit/s`, `1GB/s`) to bytes per second. Raises: FieldError."""
    return _parse(text, _RATE_BYTES_PER_S, field=field, example="10Gbit")


def parse_share(text: object, *, field: str) -> float:
    """`2%` to 0.02. Raises: FieldError, also above 100 %."""
    value = _parse(text, _SHARE, field=field, example="2%")
    if value > 1:
        raise FieldError(field, f'"{text}" is above 100%', code="quantity.range")
    return value


def _format(value: float, units: tuple[tuple[float, float, str], ...]) -> str:
    """Three digits in the first unit, of (smallest value, divisor, name), whose smallest value is reached."""
    _, divisor, name = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    return f"{value / divisor:.3g} {name}"


def format_duration(seconds: float) -> str:
    """`0.31 s`, `21 ms`, `840 us`."""
    return (
        _format(seconds, ((120.0, 60.0, "min"), (0.1, 1.0, "s"), (1e-3, 1e-3, "ms"), (1e-6, 1e-6, "us")))
        if seconds
        else "0 s"
    )


def format_size(size_bytes: float) -> str:
    """`14 MB`."""
    return _format(size_bytes, ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (0.0, 1.0, "B")))


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second as bits: `78 Mbit/s`."""
    return _format(
        bytes_per_s * 8, ((1e9, 1e9, "Gbit/s"), (1e6, 1e6, "Mbit/s"), (1e3, 1e3, "kbit/s"), (0.0, 1.0, "bit/s"))
    )
