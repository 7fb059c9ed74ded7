"""A configuration in a few characters: the same in tables, plots and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AXES = {"channel": "c", "token": "t"}


def configuration_label(values: Mapping[str, Any]) -> str:
    """`had s1 w32 K12/c64 V6/t64 zstd`: transform, tokens kept at both ends, levels by axis and group, coder.

    Of a video engine, its `setting_label`.
    """
    if "steps" in values and "quantise" not in values:
        return setting_label(values)
    part = dict(values)
    kept = {letter: part.pop(name, 0) for letter, name in (("s", "sink_tokens"), ("w", "window_tokens"))}
    kept_words = [f"{letter}{tokens}" for letter, tokens in kept.items() if tokens]
    if part.get("quantise") != "levels":
        words = [str(part.pop(name)) for name in ("quantise", "code") if name in part]
        transform = part.pop("transform", "none")
        front = [] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]
        rest = _words(part)
        if words[:1] == ["none"]:
            words[0] = "lossless"
        return " ".join(front + kept_words + words + rest) or "identity"
    part.pop("quantise")
    transform = part.pop("transform", "none")
    words = ([] if transform == "none" else ["had" if transform == "hadamard" else str(transform)]) + kept_words
    for name, letter in (("key", "K"), ("value", "V")):
        if f"{name}_levels" in part:
            axis = str(part.pop(f"{name}_axis", ""))
            group = part.pop(f"{name}_group", "")
            words.append(f"{letter}{part.pop(f'{name}_levels')}/{_AXES.get(axis, axis)}{group}")
    code = part.pop("code", None)
    return " ".join(words + _words(part) + ([str(code)] if code is not None else []))


def setting_label(configuration: Mapping[str, Any]) -> str:
    """`W4A4-like` in short: `nvfp4/nvfp4 kv=nvfp4 4 steps async`; the rest by name."""
    rest = dict(configuration)
    words = ["/".join(str(rest.pop(name)) for name in ("weights", "activations") if name in rest)]
    if "kv" in rest:
        words.append(f"kv={rest.pop('kv')}")
    if "steps" in rest:
        words.append(f"{rest.pop('steps')} steps")
    if "vae" in rest:
        words.append(str(rest.pop("vae")))
    words += [f"{name}={value}" for name, value in rest.items()]
    return " ".join(word for word in words if word)


def _words(rest: Mapping[str, Any]) -> list[str]:
    words = [str(value) for value in rest.values() if isinstance(value, str) and value != "none"]
    return words + [f"{name}={value}" for name, value in rest.items() if not isinstance(value, str)]
