"""A configuration in a few characters, for tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controld.contract.configuration import Configuration

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
    from controld.controller.goals import describe_configuration

    return [describe_configuration(Configuration(rest))] if rest else []
