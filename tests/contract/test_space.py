"""A strategy space enumerates exactly what it validates."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration, Value
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


def test_a_part_has_fewer_values_and_more_rules_and_nothing_else() -> None:
    fewer = SPACE.restrict({"levels": (4,)})
    stricter = replace(fewer, forbidden=(*SPACE.forbidden, Forbidden(values={"code": ("none",)}, reason="slow")))
    stricter.require_part_of(SPACE)
    levels = SPACE.parameters[1]
    with_five = replace(SPACE, parameters=(SPACE.parameters[0], replace(levels, values=(4, 5)), SPACE.parameters[2]))
    categorical = replace(SPACE, parameters=(SPACE.parameters[0], replace(levels, ordered=False), SPACE.parameters[2]))
    for other, named in (
        (SPACE, "space.parameters.levels.values: 8"),
        (with_five, "space.parameters.levels.values: 5"),
        (categorical, "space.parameters.levels: differs"),
        (replace(SPACE, parameters=SPACE.parameters[::-1], conditions=()), "space.parameters: are not those"),
        (replace(SPACE, conditions=()), "space.conditions"),
        (replace(SPACE, forbidden=()), "space.forbidden: lacks a rule .*: four levels are always packed"),
    ):
        with pytest.raises(FieldError, match=named):
            other.require_part_of(fewer if other is SPACE else SPACE)


@pytest.mark.parametrize("part", ["parameters", "conditions", "forbidden"])
def test_an_unknown_key_is_refused(part: str) -> None:
    data = json.loads(SPACE.to_json())
    data[part][0]["extra"] = 1
    with pytest.raises(FieldError, match="extra"):
        StrategySpace.from_json(json.dumps(data))


def test_an_unknown_key_of_the_space_itself_is_refused_by_name() -> None:
    data = {**json.loads(SPACE.to_json()), "constraints": []}
    with pytest.raises(FieldError, match="unknown key 'constraints'"):
        StrategySpace.from_json(json.dumps(data))


def test_a_boolean_is_not_an_integer() -> None:
    space = StrategySpace(parameters=(Parameter(name="depth", values=(1, 2)),))
    with pytest.raises(FieldError, match="depth"):
        space.validate({"depth": True})


WITH_DEFAULT = StrategySpace(
    parameters=(
        Parameter(name="quantise", values=("none", "levels")),
        Parameter(name="window", values=(0, 64), ordered=True, default=0),
        Parameter(name="fade", values=(1, 2)),
        Parameter(name="code", values=("none", "zstd"), lossy=False, default="zstd"),
    ),
    conditions=(
        Condition(parameter="window", parent="quantise", parent_values=("levels",)),
        Condition(parameter="fade", parent="window", parent_values=(0,)),
    ),
    forbidden=(Forbidden(values={"window": (0,), "fade": (2,), "code": ("zstd",)}, reason="too faint"),),
)


def test_a_parameter_at_its_default_is_left_out_and_still_counts() -> None:
    assert {c.canonical_json for c in WITH_DEFAULT.enumerate()} == {
        '{"code":"none","quantise":"none"}',
        '{"quantise":"none"}',
        '{"code":"none","fade":1,"quantise":"levels"}',
        '{"fade":1,"quantise":"levels"}',
        '{"code":"none","fade":2,"quantise":"levels"}',
        '{"code":"none","quantise":"levels","window":64}',
        '{"quantise":"levels","window":64}',
    }
    assert WITH_DEFAULT.count() == 7
    assert WITH_DEFAULT.is_active("fade", {"quantise": "levels"})
    assert not WITH_DEFAULT.is_active("fade", {"quantise": "none"})
    coders = WITH_DEFAULT.coders({"quantise": "levels", "fade": 2})
    assert [dict(c) for c in coders] == [{"code": "none", "fade": 2, "quantise": "levels"}]
    assert WITH_DEFAULT.coders({"quantise": "levels", "window": 0, "fade": 1}) == ()


def test_a_default_that_is_written_is_refused() -> None:
    with pytest.raises(FieldError, match=r"configuration\.window.*leave it out") as caught:
        WITH_DEFAULT.validate({"quantise": "levels", "window": 0, "fade": 1})
    assert caught.value.code == "configuration.default"
    with pytest.raises(FieldError, match="too faint"):
        WITH_DEFAULT.validate({"quantise": "levels", "fade": 2})


def test_a_new_parameter_with_a_default_keeps_old_ids() -> None:
    grown = StrategySpace(
        parameters=(*SPACE.parameters, Parameter(name="window", values=(0, 64), default=0)),
        conditions=SPACE.conditions,
        forbidden=SPACE.forbidden,
    )
    assert {c.config_id for c in SPACE.enumerate()} < {c.config_id for c in grown.enumerate()}


def test_a_space_without_the_key_default_is_read() -> None:
    assert "default" not in SPACE.to_json()
    data = json.loads(WITH_DEFAULT.to_json())
    assert StrategySpace.from_json(json.dumps(data)) == WITH_DEFAULT
    for parameter in data["parameters"]:
        parameter.pop("default", None)
    assert StrategySpace.from_json(json.dumps(data)).count() == 7


def test_restriction_keeps_what_is_left_valid() -> None:
    narrow = SPACE.restrict({"quantise": ["levels"], "levels": (8,)})
    assert [dict(c) for c in narrow.enumerate(lossy_only=True)] == [{"quantise": "levels", "levels": 8}]
    # A parent without the values that a child needs: the child stays and is never active.
    assert [dict(c) for c in SPACE.restrict({"quantise": ["none"]}).enumerate(lossy_only=True)] == [
        {"quantise": "none"}
    ]
    always = WITH_DEFAULT.restrict({"window": (64,), "quantise": ("levels",), "code": ("zstd",)})
    assert [dict(c) for c in always.enumerate()] == [{"quantise": "levels", "window": 64}]
    with pytest.raises(FieldError, match="is missing"):
        always.validate({"quantise": "levels"})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"depth": (1,)}, "restrict.depth: unknown parameter"),
        ({"levels": (8, 5)}, "restrict.levels: 5 is not a value"),
        ({"levels": (True,)}, "restrict.levels: True is not a value"),
        ({"levels": ()}, "levels: has no values"),
    ],
)
def test_a_restriction_names_what_is_wrong(values: dict[str, tuple[Value, ...]], named: str) -> None:
    with pytest.raises(FieldError, match=named):
        SPACE.restrict(values)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ((Parameter(name="a", values=(1, 1)),), "a: a value occurs twice"),
        ((Parameter(name="a", values=(1, 2), default=3),), "a.default: 3 is none"),
        ((Parameter(name="a", values=(1, 2), default=True),), "a.default: True is none"),
    ],
)
def test_a_space_that_contradicts_itself_is_refused(parameters: tuple[Parameter, ...], named: str) -> None:
    with pytest.raises(FieldError, match=named):
        StrategySpace(parameters=parameters)


def test_quality_does_not_depend_on_a_lossless_parameter() -> None:
    with pytest.raises(FieldError, match="depends on a lossless parameter"):
        StrategySpace(
            parameters=(Parameter(name="code", values=("a", "b"), lossy=False), Parameter(name="x", values=(1, 2))),
            conditions=(Condition(parameter="x", parent="code", parent_values=("a",)),),
        )


def test_a_rule_about_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(FieldError, match="unknown parameter 'depth'"):
        StrategySpace(parameters=SPACE.parameters, forbidden=(Forbidden(values={"depth": (1,)}, reason="r"),))


def test_a_large_space_is_counted_without_walking_it() -> None:
    space = StrategySpace(
        parameters=tuple(Parameter(name=f"p{index}", values=tuple(range(10))) for index in range(30)),
        conditions=tuple(
            Condition(parameter=f"p{index}", parent=f"p{index - 1}", parent_values=(0, 1)) for index in range(1, 30)
        ),
    )
    # Each parameter ends the chain in 8 of its 10 values, and the last one in all of them.
    assert space.count() == sum(8 * 2**index for index in range(29)) + 10 * 2**29


@st.composite
def spaces(draw: st.DrawFn) -> StrategySpace:
    """Small spaces with every feature."""
    parameters: list[Parameter] = []
    for index in range(draw(st.integers(1, 5))):
        values = tuple(range(draw(st.integers(1, 3))))
        default = draw(st.sampled_from((None, *values)))
        parameters.append(Parameter(name=f"p{index}", values=values, lossy=draw(st.booleans()), default=default))
    conditions, forbidden = [], []
    for index, parameter in enumerate(parameters):
        parents = [p for p in parameters[:index] if p.lossy or not parameter.lossy]
        for parent in (
            draw(st.lists(st.sampled_from(parents), max_size=2, unique_by=lambda p: p.name)) if parents else []
        ):
            wanted = tuple(draw(st.sets(st.sampled_from(parent.values))))
            conditions.append(Condition(parameter=parameter.name, parent=parent.name, parent_values=wanted))
    for _ in range(draw(st.integers(0, 2))):
        named = draw(st.lists(st.sampled_from(parameters), min_size=1, max_size=3, unique_by=lambda p: p.name))
        rule = {p.name: tuple(draw(st.sets(st.sampled_from(p.values), min_size=1))) for p in named}
        forbidden.append(Forbidden(values=rule, reason="drawn"))
    return StrategySpace(parameters=tuple(parameters), conditions=tuple(conditions), forbidden=tuple(forbidden))


def accepted(space: StrategySpace) -> set[str]:
    """By brute force over every assignment, written or left out."""
    found = set()
    for choice in itertools.product(*((None, *parameter.values) for parameter in space.parameters)):
        values = {p.name: value for p, value in zip(space.parameters, choice, strict=True) if value is not None}
        try:
            space.validate(values)
        except FieldError:
            continue
        found.add(Configuration(values).canonical_json)
    return found


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_any_space_counts_and_enumerates_what_it_validates(space: StrategySpace) -> None:
    listed = [c.canonical_json for c in space.enumerate()]
    assert len(listed) == len(set(listed)) == space.count()
    assert set(listed) == accepted(space)
    lossless = {parameter.name for parameter in space.parameters if not parameter.lossy}
    parts = list(space.enumerate(lossy_only=True))
    assert len(parts) == len(set(parts)) == space.count(lossy_only=True)
    assert [c.canonical_json for part in parts for c in space.coders(part)] == listed
    assert all(not lossless & set(part) for part in parts)


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_any_space_survives_json(space: StrategySpace) -> None:
    assert StrategySpace.from_json(space.to_json()) == space


@settings(max_examples=60, deadline=None)
@given(spaces(), st.data())
def test_any_restriction_is_a_part_of_the_space(space: StrategySpace, data: st.DataObject) -> None:
    values = {
        parameter.name: tuple(data.draw(st.sets(st.sampled_from(parameter.values), min_size=1)))
        for parameter in space.parameters
        if data.draw(st.booleans())
    }
    narrow = space.restrict(values)
    inside = list(narrow.enumerate())
    for configuration in inside:
        space.validate(configuration)
    wide = [
        c for c in space.enumerate() if all(space.value_of(name, c) in (None, *kept) for name, kept in values.items())
    ]
    assert inside == wide
    assert space.restrict({parameter.name: parameter.values for parameter in space.parameters}) == space
    narrow.require_part_of(space)
