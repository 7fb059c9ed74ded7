"""A strategy space enumerates exactly what it validates."""

from __future__ import annotations

import itertools

import pytest

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace

SPACE = StrategySpace(
    parameters=(
        Parameter(name="quantise", values=("none", "levels")),
        Parameter(name="levels", values=(4, 8), ordered=True),
        Parameter(name="code", values=("none", "zstd"), lossy=False),
    ),
    conditions=(Condition(parameter="levels", parent="quantise", parent_values=("levels",)),),
    forbidden=(Forbidden(values={"levels": (4,), "code": ("none",)}, reason="four levels are always packed"),),
)


def test_enumeration_is_exactly_what_validates() -> None:
    listed = {configuration.canonical_json for configuration in SPACE.enumerate()}
    choices = [[None, "none", "levels", "x"], [None, 4, 8, 16], [None, "none", "zstd"]]
    accepted = set()
    for quantise, levels, code in itertools.product(*choices):
        values = {k: v for k, v in {"quantise": quantise, "levels": levels, "code": code}.items() if v is not None}
        try:
            SPACE.validate(values)
        except FieldError:
            continue
        accepted.add(Configuration(values).canonical_json)
    assert listed == accepted
    assert len(listed) == 5


def test_lossy_parts_come_once_and_have_their_coders() -> None:
    parts = list(SPACE.enumerate(lossy_only=True))
    assert len(parts) == 3
    coders = {part.get("levels"): [c["code"] for c in SPACE.coders(part)] for part in parts}
    assert coders == {None: ["none", "zstd"], 4: ["zstd"], 8: ["none", "zstd"]}


def test_json_round_trip_and_refusal() -> None:
    assert StrategySpace.from_json(SPACE.to_json()) == SPACE
    for text in ("", "[]", "{}", '{"parameters": [{"name": "x"}], "conditions": [], "forbidden": []}'):
        with pytest.raises(FieldError):
            StrategySpace.from_json(text)


def test_a_boolean_is_not_an_integer() -> None:
    space = StrategySpace(parameters=(Parameter(name="depth", values=(1, 2)),))
    with pytest.raises(FieldError, match="depth"):
        space.validate({"depth": True})
