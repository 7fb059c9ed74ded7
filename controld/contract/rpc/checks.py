"""What any number, name or enumeration that came over the wire must be."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from controld.contract.errors import FieldError

MAX_COUNT = 2**53
MAX_NAME_CHARACTERS = 256
MAX_TEXT_CHARACTERS = 4096

_E = TypeVar("_E", bound=StrEnum)


def checked_count(value: int, field: str) -> int:
    """An integer that can be a count, size or version. Raises: FieldError."""
    if not 0 <= value <= MAX_COUNT:
        raise FieldError(field, f"{value} is not in [0, 2^53]", code="rpc.number")
    return value


def checked_text(value: str, field: str, limit: int = MAX_NAME_CHARACTERS) -> str:
    """A text of bounded length without control characters (but line breaks and tabs). Raises: FieldError."""
    if len(value) > limit:
        raise FieldError(field, f"has {len(value)} characters, more than {limit}", code="rpc.text")
    if not value.isprintable() and any(ord(c) < 32 and c not in "\n\t\r" for c in value):
        raise FieldError(field, "holds control characters", code="rpc.text")
    return value


def checked_enum(kind: type[_E], value: str, field: str) -> _E:
    """A member of an enumeration by its value. Raises: FieldError."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise FieldError(field, f"{value!r} is unknown", hint=f"one of {allowed}", code="rpc.enum") from None
