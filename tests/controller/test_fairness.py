from __future__ import annotations

import math

import pytest

from controld.contract.errors import FieldError
from controld.controller.fairness import jain_index, normalised_weights


def test_weights_become_shares() -> None:
    assert normalised_weights({"acme": 3.0, "default": 1.0}) == {"acme": 0.75, "default": 0.25}


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"a": math.nan}, {"a": math.inf}])
def test_impossible_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(FieldError):
        normalised_weights(weights)


def test_jains_index() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert math.isnan(jain_index([]))
    assert math.isnan(jain_index([0.0]))
