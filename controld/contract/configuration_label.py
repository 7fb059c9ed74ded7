"""A configuration in a few characters: the same in tables, plots and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AXES = {"channel": "c", "token": "t"}


def configuration_label(values: Mapping[str, Any]) -> str:
    """`had s1 K12/c64 V6/t64 entropy`: transform, sink tokens, levels with axis and group, coder; the rest in words."""
    part = dict(values)
    sink_tokens = part.pop("sink_tokens", 0)
    sink = [f"s{sink_tokens}"] if sink_tokens else []
    if part.get("quantise") != "levels":
        words = [str(part.pop(name)) for name in ("quantise", "code") if name in part]
        transform = part.pop("transform", "none")
        front = [] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]
        rest = _words(part)
        if words[:1] == ["none"]:
            words[0] = "lossless"
        return " ".join(front + sink + words + rest) or "identity"
    part.pop("quantise")
    transform = part.pop("transform", "none")
    words = ([] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]) + sink
    for name, letter in (("key", "K"), ("value", "V")):
        if f"{name}_levels" in part:
            axis = str(part.pop(f"{name}_axis", ""))
            group = part.pop(f"{name}_group", "")
            words.append(f"{letter}{part.pop(f'{name}_levels')}/{_AXES.get(axis, axis)}{group}")
    code = part.pop("code", None)
    return " ".join(words + _words(part) + ([str(code)] if code is not None else []))


def _words(rest: Mapping[str, Any]) -> list[str]:
    words = [str(value) for value in rest.values() if isinstance(value, str) and value != "none"]
    return words + [f"{name}={value}" for name, value in rest.items() if not isinstance(value, str)]
