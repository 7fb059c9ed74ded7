"""Features tell parts apart, and what is drawn is in the space."""

from __future__ import annotations

import numpy as np
import pytest

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.profiling.search.encoding import MAX_ENUMERATED, SpaceEncoding

SPACE = StrategySpace(
    parameters=(
        Parameter(name="transform", values=("none", "hadamard")),
        Parameter(name="quantise", values=("levels", "fp8", "none")),
        Parameter(name="levels", values=(4, 8, 16, 32), ordered=True),
        Parameter(name="window", values=(0, 64), ordered=True, default=0),
        Parameter(name="code", values=("bitpack", "entropy"), lossy=False),
    ),
    conditions=(
        Condition(parameter="levels", parent="quantise", parent_values=("levels",)),
        Condition(parameter="window", parent="quantise", parent_values=("levels", "fp8")),
    ),
    forbidden=(Forbidden(values={"transform": ("hadamard",), "quantise": ("none",)}, reason="nothing to rotate for"),),
)


@pytest.fixture
def encoding() -> SpaceEncoding:
    return SpaceEncoding(SPACE)


def test_every_part_has_features_of_its_own_in_the_unit_cube(encoding: SpaceEncoding) -> None:
    parts = encoding.enumerated()
    assert parts is not None and len(parts) == SPACE.count(lossy_only=True)
    features = encoding.encode(parts)
    assert features.shape == (len(parts), encoding.columns)
    assert features.min() >= 0 and features.max() <= 1
    assert len(np.unique(features, axis=0)) == len(parts)


def test_ordered_numbers_keep_their_ratios(encoding: SpaceEncoding) -> None:
    rows = encoding.encode([{"transform": "none", "quantise": "levels", "levels": n} for n in (4, 8, 16, 32)])
    steps = np.diff(rows, axis=0)
    assert steps[np.nonzero(steps)] == pytest.approx([1 / 3] * 3)


def test_a_default_and_an_inactive_parameter_are_not_the_same(encoding: SpaceEncoding) -> None:
    left_out, inactive = encoding.encode(
        [{"transform": "none", "quantise": "fp8"}, {"transform": "none", "quantise": "none"}]
    )
    assert left_out[-1] == 0.0 and inactive[-1] == 0.5


def test_a_value_outside_the_space_is_refused_by_name(encoding: SpaceEncoding) -> None:
    with pytest.raises(FieldError, match="levels"):
        encoding.encode([{"transform": "none", "quantise": "levels", "levels": 5}])


def test_what_is_drawn_is_valid_and_reaches_everything(encoding: SpaceEncoding) -> None:
    random = np.random.default_rng(1)
    drawn = {part for row in random.random((500, 4)) if (part := encoding.draw(row)) is not None}
    assert drawn == set(encoding.enumerated() or ())


def test_neighbours_are_valid_and_differ(encoding: SpaceEncoding) -> None:
    part = Configuration({"transform": "hadamard", "quantise": "levels", "levels": 8})
    near = list(encoding.neighbours(part))
    assert part not in near
    assert {one["levels"] for one in near if "levels" in one and one["levels"] != 8} == {4, 16}
    assert any(one.get("window") == 64 for one in near)
    assert all(one in (encoding.enumerated() or ()) for one in near)
    assert not any(one["quantise"] == "none" for one in near)


def test_a_large_space_is_not_walked() -> None:
    many = tuple(range(1, 200))
    space = StrategySpace(
        parameters=(
            *(Parameter(name=name, values=many, ordered=True) for name in ("a", "b", "c")),
            Parameter(name="code", values=("x",), lossy=False),
        )
    )
    assert SpaceEncoding(space).enumerated() is None
    assert space.count(lossy_only=True) > MAX_ENUMERATED
