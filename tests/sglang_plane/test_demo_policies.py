"""Which configurations count as published methods, and that one of them is among the static arms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dataplanes.sglang.demo.plan import EVIDENCE
from dataplanes.sglang.demo.policies import choose_statics, is_published


def candidate(ratio: float, **configuration: Any) -> Mapping[str, Any]:
    line = {"a_s": 0.0, "b_s_per_byte": 1e-9}
    return {"configuration": configuration, "ratio": ratio, "loss_upper_nats": 0.01, "encode": line, "decode": line}


@pytest.mark.parametrize(
    ("transform", "quantise", "expected"),
    [
        ("klt", "uniform", False),
        ("hadamard", "levels", False),
        ("none", "levels", True),
        ("hadamard", "head_levels", True),
        ("none", "absmax_levels", True),
        ("hadamard", "lloyd_max", True),
        ("hadamard", "nvfp4", True),
        ("none", "none", True),
    ],
)
def test_published_methods(transform: str, quantise: str, expected: bool) -> None:
    assert is_published({"transform": transform, "quantise": quantise}) is expected


def test_the_best_published_method_takes_the_last_place_where_none_is_among_the_best() -> None:
    ours = [candidate(ratio, transform="klt", quantise="uniform", step=ratio) for ratio in (30.0, 25.0, 20.0)]
    theirs = [candidate(ratio, transform="none", quantise="levels", key_levels=ratio) for ratio in (4.0, 5.0)]
    assert list(choose_statics([*theirs, *ours], EVIDENCE, 1000).values()) == [ours[0], ours[1], theirs[1]]


def test_no_place_is_given_away_where_one_of_the_best_is_published() -> None:
    ours = [candidate(ratio, transform="klt", quantise="uniform", step=ratio) for ratio in (30.0, 20.0)]
    theirs = [candidate(ratio, transform="none", quantise="levels", key_levels=ratio) for ratio in (4.0, 25.0)]
    assert list(choose_statics([*theirs, *ours], EVIDENCE, 1000).values()) == [ours[0], theirs[1], ours[1]]
