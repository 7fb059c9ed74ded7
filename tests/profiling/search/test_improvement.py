"""Expected improvement against hypervolume itself."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from controld.candidates.pareto import hypervolume
from controld.profiling.search.improvement import exclusive_area, expected_improvement

ZERO, ONE = np.zeros(3), np.ones(3)


def gain(front: np.ndarray, point: np.ndarray) -> float:
    """What a point really adds."""
    before = hypervolume(front, ideal=ZERO, nadir=ONE) if len(front) else 0.0
    return hypervolume(np.vstack((front, point)), ideal=ZERO, nadir=ONE) - before


@pytest.mark.parametrize("points", [0, 1, 7, 40])
def test_with_a_certain_loss_it_is_the_gain_in_hypervolume(points: int) -> None:
    random = np.random.default_rng(points)
    front = random.random((points, 3))
    candidates = random.random((20, 3))
    expected = [gain(front, candidate) for candidate in candidates]
    got = expected_improvement(front, candidates[:, 1:], candidates[:, 0], np.full(20, 1e-6), slices=4000)
    assert got == pytest.approx(expected, abs=2e-3)


def test_with_an_uncertain_loss_it_is_the_mean_gain() -> None:
    random = np.random.default_rng(5)
    front, cost = random.random((6, 3)), np.array([[0.3, 0.2]])
    losses = [NormalDist(0.5, 0.2).inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    mean = np.mean([gain(front, np.array([max(loss, 0.0), 0.3, 0.2])) for loss in losses])
    got = expected_improvement(front, cost, np.array([0.5]), np.array([0.2]), slices=400)
    assert got[0] == pytest.approx(mean, rel=0.01)


def test_a_dominated_point_gains_nothing_and_one_beyond_the_reference_neither() -> None:
    front = np.array([[0.1, 0.1, 0.1]])
    costs = np.array([[0.5, 0.5], [1.2, 0.0], [0.0, 1.2]])
    assert expected_improvement(front, costs, np.full(3, 0.9), np.full(3, 1e-6)) == pytest.approx([0, 0, 0])


def test_exclusive_area_of_a_staircase() -> None:
    front = np.array([[0.2, 0.6], [0.6, 0.2], [0.7, 0.7]])
    # Below the reference (1.1, 1.1), right of and above (0.4, 0.4): the square up to the steps.
    assert exclusive_area(front, np.array([[0.4, 0.4]]))[0] == pytest.approx(0.2 * 0.2)
    assert exclusive_area(np.empty((0, 2)), np.array([[0.1, 0.6]]))[0] == pytest.approx(1.0 * 0.5)
