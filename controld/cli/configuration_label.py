"""A configuration in a few characters, for tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controld.contract.configuration import Configuration

_AXES = {"channel": "c", "token": "t"}


def configuration_label(values: Mapping[str, Any]) -> str:
    """`had K12/c64 V6/t64 entropy`: transform, levels with axis and group, coder. Other knobs in words."""
    part = dict(values)
    if part.get("quantise") != "levels":
        words = [str(part.pop(name)) for name in ("quantise", "code") if name in part]
        transform = part.pop("transform", "none")
        front = [] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]
        rest = _words(part)
        if words[:1] == ["none"]:
            words[0] = "lossless"
        return " ".join(front + words + rest) or "identity"
    part.pop("quantise")
    transform = part.pop("transform", "none")
    words = [] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]
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
