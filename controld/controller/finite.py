"""Values as JSON can hold them."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any


def finite(value: Any) -> Any:
    """The value with every infinity and NaN in it as None, tuples as lists, and enums as their values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value
