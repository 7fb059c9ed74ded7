from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from controld.candidates.pareto import hypervolume, log_objectives, non_dominated

POINTS = arrays(np.float64, st.tuples(st.integers(1, 12), st.just(3)), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]))


def brute_force(points: np.ndarray) -> list[bool]:
    def dominates(a: np.ndarray, b: np.ndarray) -> bool:
        return bool((a <= b).all() and (a < b).any())

    return [not any(dominates(other, point) for other in points) for point in points]


@given(POINTS)
def test_the_set_is_what_the_definition_says(points: np.ndarray) -> None:
    assert non_dominated(points).tolist() == brute_force(points)


def test_nan_neither_enters_nor_dominates() -> None:
    points = [[0.5, 0.5], [math.nan, 0.0], [0.0, math.nan], [math.nan, math.nan]]
    assert non_dominated(points).tolist() == [True, False, False, False]


def test_infinity_is_a_value_like_others() -> None:
    assert non_dominated([[math.inf, 0.0], [1.0, 1.0], [math.inf, 1.0]]).tolist() == [True, True, False]


def test_an_empty_set_is_empty() -> None:
    assert non_dominated(np.zeros((0, 3))).tolist() == []


@given(POINTS)
def test_hypervolume_agrees_with_counting_grid_cells(points: np.ndarray) -> None:
    # All coordinates lie on this grid, so the union of boxes is a union of whole cells.
    ticks = np.array([0.0, 0.25, 0.5, 1.0, 1.1])
    width = np.diff(ticks)
    total = 0.0
    for i, x in enumerate(ticks[:-1]):
        for j, y in enumerate(ticks[:-1]):
            for k, z in enumerate(ticks[:-1]):
                if (points <= [x, y, z]).all(axis=1).any():
                    total += width[i] * width[j] * width[k]
    assert hypervolume(points, ideal=[0, 0, 0], nadir=[1, 1, 1]) == pytest.approx(total)


def test_hypervolume_of_one_ideal_point_is_the_whole_box() -> None:
    assert hypervolume([[2.0, 3.0, 4.0]], ideal=[2, 3, 4], nadir=[4, 4, 5]) == pytest.approx(1.1**3)
    assert hypervolume([[math.nan, 3.0, 4.0]], ideal=[2, 3, 4], nadir=[4, 4, 5]) == 0.0


def test_the_axes_are_log_loss_ratio_and_log_seconds() -> None:
    assert log_objectives([[0.0, 1e-8, 0.25]])[0] == pytest.approx([-6.0, 0.25, -8.0])
