"""The decision table: the right cell, the right share of arms, the same arm everywhere."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from controld.contract.decision import (
    Arm,
    ClassRule,
    DecisionTable,
    Mixture,
    is_sampled,
    match_class,
    sampled_index,
)
from controld.contract.errors import FieldError

CONFIGURATION = Configuration({"code": "bitpack", "key_levels": 12})
ARMS = (Arm("raw"), Arm(CONFIGURATION.config_id, CONFIGURATION))


def table(**changes: object) -> DecisionTable:
    fields: dict[str, object] = {
        "tier": "pd",
        "link_group": "default",
        "version": 7,
        "classes": ("chat", "default"),
        "size_edges_bytes": (1e6, 1e7),
        "bandwidth_edges_bytes_per_s": (1e6,),
        "load_edges": (0.5,),
        "arms": ARMS,
        "mixtures": (Mixture((0,), (1.0,)), Mixture((1, 0), (0.9, 0.1))),
        "cells": (0,) * 12 + (1,) * 12,
    }
    return DecisionTable(**{**fields, **changes})  # type: ignore[arg-type]


@given(
    st.sampled_from(["chat", "default", "unknown"]),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.floats(0, 10),
)
def test_every_context_has_a_cell_and_its_coordinates_lead_back(
    name: str, size: float, rate: float, load: float
) -> None:
    decisions = table()
    cell = decisions.cell_index(name, size, rate, load)
    service_class, size_bin, rate_bin, load_bin = decisions.cell_coordinates(cell)
    assert decisions.classes[service_class] == (name if name == "chat" else "default")
    assert size_bin == (size >= 1e6) + (size >= 1e7)
    assert rate_bin == (rate >= 1e6)
    assert load_bin == (load >= 0.5)


def test_draws_follow_the_weights_and_repeat() -> None:
    decisions = table()
    drawn = [decisions.draw(f"t{i}", "default", 5e6, 1e5, 0.1) for i in range(20_000)]
    share = Counter(d.arm.arm_id for d in drawn)["raw"] / len(drawn)
    assert share == pytest.approx(0.1, abs=0.01)
    assert all(d.explored == (d.arm.arm_id == "raw") for d in drawn)
    assert decisions.draw("t3", "default", 5e6, 1e5, 0.1) == drawn[3]
    other = dataclasses.replace(decisions, version=8)
    moved = sum(other.draw(f"t{i}", "default", 5e6, 1e5, 0.1).arm != drawn[i].arm for i in range(2_000))
    assert moved > 0, "another version must explore other transfers"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 0}, "version"),
        ({"classes": ("chat",)}, "classes"),
        ({"size_edges_bytes": (2.0, 1.0)}, "size_edges_bytes"),
        ({"load_edges": (float("nan"),)}, "load_edges"),
        ({"arms": (ARMS[1],)}, "arms"),
        ({"cells": (0,)}, "cells"),
        ({"cells": (5,) * 24}, "cells"),
        ({"mixtures": (Mixture((3,), (1.0,)),)}, "mixtures"),
        ({"prior_bandwidth_bytes_per_s": -1.0}, "prior_bandwidth"),
        ({"guard_sample": -0.1}, "guard_sample"),
        ({"guard_sample": float("nan")}, "guard_sample"),
    ],
)
def test_a_broken_table_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError, match=field):
        table(**changes)


@pytest.mark.parametrize(
    "mixture", [((), ()), ((0, 0), (0.5, 0.5)), ((0,), (0.9,)), ((0, 1), (1.0, 0.0)), ((0,), (float("nan"),))]
)
def test_a_broken_mixture_is_refused(mixture: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(FieldError, match="mixture"):
        Mixture(*mixture)


@pytest.mark.parametrize("line", [(math.nan, 0.0), (0.0, math.inf)])
def test_a_line_is_of_finite_numbers(line: tuple[float, float]) -> None:
    with pytest.raises(FieldError, match=r"mixture\.raw_below"):
        Mixture((0,), (1.0,), *line)


def test_in_a_divided_cell_what_is_below_the_line_goes_raw_and_is_no_exploration() -> None:
    """10 ms and 1 ns a byte: raw stays raw below 15 ms on the wire at 5 MB, and below 19 ms at 9 MB."""
    divided = Mixture((1,), (1.0,), 0.010, 1e-9)
    decisions = table(mixtures=(divided,), cells=(0,) * 24)
    for size, border_s in ((5e6, 0.015), (9e6, 0.019)):
        below = decisions.draw("t", "chat", size, size / (border_s - 1e-4), 0.1)
        above = decisions.draw("t", "chat", size, size / (border_s + 1e-4), 0.1)
        assert (below.arm.arm_id, below.explored) == ("raw", False)
        assert above.arm == ARMS[1]
        assert below.cell == above.cell


def test_an_arm_is_what_its_id_says() -> None:
    with pytest.raises(FieldError):
        Arm("0123456789abcdef", CONFIGURATION)
    with pytest.raises(FieldError):
        Arm("raw", CONFIGURATION)
    with pytest.raises(FieldError):
        Arm(CONFIGURATION.config_id)


def test_the_first_matching_class_wins() -> None:
    rules = (ClassRule("chat", "class=chat"), ClassRule("urgent", None, 5), ClassRule("default"))
    assert match_class(rules, extra_key="class=chat", priority=5) == "chat"
    assert match_class(rules, extra_key="other", priority=5) == "urgent"
    assert match_class(rules, extra_key=None, priority=None) is None


def test_the_sampled_share_of_transfers_is_the_same_everywhere_and_blind_to_the_arm() -> None:
    decisions = table()
    names = [f"t{i}" for i in range(20_000)]
    sampled = [name for name in names if is_sampled(name, 0.05)]
    assert len(sampled) / len(names) == pytest.approx(0.05, abs=0.006)
    assert sampled == [name for name in names if is_sampled(name, 0.05)]
    assert set(sampled) <= {name for name in names if is_sampled(name, 0.06)}, "more is more of the same"
    assert not any(is_sampled(name, 0.0) for name in names)
    assert all(is_sampled(name, 1.0) for name in names)
    explored = sum(decisions.draw(name, "default", 5e6, 1e5, 0.1).explored for name in sampled)
    assert explored / len(sampled) == pytest.approx(0.1, abs=0.04)
    pieces = Counter(sampled_index(name, 4) for name in sampled)
    assert sorted(pieces) == [0, 1, 2, 3]
    assert min(pieces.values()) > 0.15 * len(sampled)
