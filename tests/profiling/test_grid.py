"""The curated grid fits the space that it is asked of."""

from __future__ import annotations

import pytest

from controld.contract.configuration import Configuration
from controld.contract.space import Forbidden, Parameter, StrategySpace
from controld.profiling.grid import GridSize, curated_grid, nearest


@pytest.mark.parametrize("size", list(GridSize))
def test_every_point_is_of_the_space_and_comes_once(space: StrategySpace, size: GridSize) -> None:
    points = curated_grid(space, size)
    assert len({point.lossy.config_id for point in points}) == len(points) >= 5
    for point in points:
        assert point.coders
        for code in point.coders:
            space.validate(point.lossy.with_coder(code))


def test_the_grid_spans_lossless_to_coarse(space: StrategySpace) -> None:
    quantisers = {point.lossy["quantise"] for point in curated_grid(space)}
    assert quantisers == {"none", "levels", "fp8_e4m3", "nvfp4"}
    levels = [int(point.lossy["key_levels"]) for point in curated_grid(space) if "key_levels" in point.lossy]
    assert min(levels) <= 8 and max(levels) >= 32


def test_the_quick_grid_is_a_part_of_the_full_one(space: StrategySpace) -> None:
    quick = {point.lossy for point in curated_grid(space, GridSize.QUICK)}
    full = {point.lossy for point in curated_grid(space, GridSize.FULL)}
    assert quick < full


def test_a_number_that_is_not_offered_moves_to_the_nearest_ratio(space: StrategySpace) -> None:
    part = nearest(space, {"transform": "none", "quantise": "levels", "key_levels": 20, "value_levels": 5})
    assert part is not None
    assert part["key_levels"] == 16  # 20/16 is less than 32/20
    assert part["value_levels"] == 6  # 6/5 is less than 5/4


def test_a_category_that_is_not_offered_drops_the_wish(space: StrategySpace) -> None:
    assert nearest(space, {"transform": "none", "quantise": "vector"}) is None


def test_a_space_of_another_kind_gets_a_spread_of_its_own() -> None:
    video = StrategySpace(
        parameters=(
            Parameter(name="precision", values=tuple(f"p{index}" for index in range(40))),
            Parameter(name="code", values=("none", "zstd"), lossy=False),
        )
    )
    points = curated_grid(video)
    assert len(points) == 12
    assert points[0].lossy == Configuration({"precision": "p0"})
    assert points[-1].lossy == Configuration({"precision": "p39"})


def test_a_forbidden_neighbour_is_passed_over() -> None:
    space = StrategySpace(
        parameters=(
            Parameter(name="quantise", values=("levels",)),
            Parameter(name="value_axis", values=("channel", "token")),
            Parameter(name="value_group", values=(16, 32, 64), ordered=True),
            Parameter(name="code", values=("entropy",), lossy=False),
        ),
        forbidden=(Forbidden(values={"value_axis": ("token",), "value_group": (64,)}, reason="heads of 32"),),
    )
    wish = {"quantise": "levels", "value_axis": "token", "value_group": 64}
    assert nearest(space, wish) == Configuration({"quantise": "levels", "value_axis": "token", "value_group": 32})


def test_a_wish_that_leaves_a_parameter_open_takes_its_default() -> None:
    space = StrategySpace(
        parameters=(
            Parameter(name="quantise", values=("levels",)),
            Parameter(name="window_tokens", values=(0, 64, 128), ordered=True, default=0),
            Parameter(name="code", values=("entropy",), lossy=False),
        )
    )
    assert nearest(space, {"quantise": "levels"}) == Configuration({"quantise": "levels"})
    assert nearest(space, {"quantise": "levels", "window_tokens": 0}) == Configuration({"quantise": "levels"})
    nearby = nearest(space, {"quantise": "levels", "window_tokens": 80})
    assert nearby == Configuration({"quantise": "levels", "window_tokens": 64})
