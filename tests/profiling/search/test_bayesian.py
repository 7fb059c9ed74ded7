"""The engine finds fronts, and goes on whatever it is told."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from controld.candidates.pareto import hypervolume, log_objectives
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.worker.bayesian import BayesianSearcher

pytestmark = pytest.mark.slow

LEVELS = (4, 6, 8, 12, 16, 24)
SPACE = StrategySpace(
    parameters=(
        Parameter(name="transform", values=("none", "hadamard")),
        Parameter(name="quantise", values=("levels", "fp8")),
        Parameter(name="key_levels", values=LEVELS, ordered=True),
        Parameter(name="key_axis", values=("channel", "token")),
        Parameter(name="value_levels", values=LEVELS, ordered=True),
        Parameter(name="sinks", values=(0, 1, 4), ordered=True, default=0),
        Parameter(name="code", values=("bitpack", "entropy"), lossy=False),
    ),
    conditions=tuple(
        Condition(parameter=name, parent="quantise", parent_values=("levels",))
        for name in ("key_levels", "key_axis", "value_levels")
    ),
)
PARTS = list(SPACE.enumerate(lossy_only=True))


def measured(part: Configuration, *, segments: int = 2, as_part: Configuration | None = None) -> Observation:
    """A made-up but smooth truth; told of another part where one is given."""
    rotated = part["transform"] == "hadamard"
    if part["quantise"] == "fp8":
        loss, bits = 0.002, 8.0
    else:
        key, value = float(part["key_levels"]), float(part["value_levels"])
        loss = 3 / key**2 * (0.3 if part["key_axis"] == "channel" else 1) * (0.6 if rotated else 1) + 0.8 / value**2
        bits = (math.log2(key) + math.log2(value)) / 2 + 0.4
    sinks = int(part.get("sinks", 0))
    loss, bits = loss * {0: 1.5, 1: 1.0, 4: 0.95}[sinks], bits + 0.02 * sinks
    seconds = 1e-9 * (2 if rotated else 1)
    return Observation(
        lossy=as_part or part, loss=loss, loss_se=loss / 10, segments=segments,
        costs=(
            VariantCost(variant="bitpack", size_ratio=1.1 * bits / 16, seconds_per_unit=seconds),
            VariantCost(variant="entropy", size_ratio=0.9 * bits / 16, seconds_per_unit=2 * seconds),
        ),
    )  # fmt: skip


def points(observations: list[Observation]) -> np.ndarray:
    return log_objectives([(o.loss, cost.seconds_per_unit, cost.size_ratio) for o in observations for cost in o.costs])


def test_it_finds_the_front_in_a_fraction_of_the_trials() -> None:
    everything = points([measured(part) for part in PARTS])
    scale = {"ideal": everything.min(axis=0), "nadir": everything.max(axis=0)}
    searcher, told = BayesianSearcher(SPACE, seed=3), []
    for _ in range(50):
        (proposal,) = searcher.ask(1)
        told.append(measured(proposal.lossy))
        searcher.tell(told[-1])
    assert len({one.lossy for one in told}) == 50
    share = hypervolume(points(told), **scale) / hypervolume(everything, **scale)
    random = np.random.default_rng(3).permutation(len(PARTS))[:50]
    by_chance = hypervolume(points([measured(PARTS[i]) for i in random]), **scale) / hypervolume(everything, **scale)
    assert share > 0.99 > by_chance


def tell_start(searcher: BayesianSearcher, change: Callable[[int, Observation], Observation]) -> list[Configuration]:
    parts = [proposal.lossy for proposal in searcher.ask(20)]
    for number, part in enumerate(parts):
        searcher.tell(change(number, measured(part)))
    return parts


def altered(one: Observation, loss: float, scale: float = 1.0) -> Observation:
    costs = tuple(
        VariantCost(variant=c.variant, size_ratio=c.size_ratio * scale, seconds_per_unit=c.seconds_per_unit * scale)
        for c in one.costs
    )
    return Observation(lossy=one.lossy, loss=loss, loss_se=0.0, segments=2, costs=costs)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, one: altered(one, 0.5), id="constant"),
        pytest.param(lambda _, one: altered(one, 0.0, 0.0), id="all zero"),
        pytest.param(lambda _, one: altered(one, float("nan")), id="all infeasible"),
        pytest.param(lambda n, one: altered(one, float("nan") if n % 2 else one.loss), id="half infeasible"),
        pytest.param(lambda n, one: altered(one, 1e-9 if n % 2 else 1e9, 1e9 if n % 3 else 1e-9), id="far apart"),
        pytest.param(lambda n, one: altered(one, one.loss if n < 2 else float("nan")), id="two points"),
        pytest.param(lambda _, one: Observation(
            lossy=one.lossy, loss=one.loss, loss_se=0.0, segments=2, costs=()), id="no costs"),
    ],
)  # fmt: skip
def test_degenerate_data_stops_nothing(change: Callable[[int, Observation], Observation]) -> None:
    searcher = BayesianSearcher(SPACE, seed=1)
    known = set(tell_start(searcher, change))
    for _ in range(3):
        (proposal,) = searcher.ask(1)
        assert proposal.lossy not in known
        assert proposal.source == "model" or searcher.detail
        known.add(proposal.lossy)
        searcher.tell(change(len(known), measured(proposal.lossy)))


def test_pending_parts_are_not_proposed_again_and_a_batch_holds_different_ones() -> None:
    searcher = BayesianSearcher(SPACE, seed=2)
    known = tell_start(searcher, lambda _, one: one)
    first = [proposal.lossy for proposal in searcher.ask(4)]
    second = [proposal.lossy for proposal in searcher.ask(4, pending=first)]
    assert len({*known, *first, *second}) == 28


def test_a_coder_that_only_few_parts_have_is_tried() -> None:
    space = StrategySpace(
        parameters=(
            *(p for p in SPACE.parameters if p.lossy and p.name != "quantise"),
            Parameter(name="code", values=("bitpack", "entropy", "rare"), lossy=False),
        ),
        forbidden=(
            Forbidden(values={"code": ("rare",), "transform": ("none",)}, reason="rotated parts only"),
            Forbidden(values={"code": ("rare",), "key_levels": LEVELS[1:]}, reason="the coarsest only"),
            Forbidden(values={"code": ("rare",), "key_axis": ("token",)}, reason="one axis only"),
        ),
    )
    searcher = BayesianSearcher(space, seed=0)
    rare = {"transform": "hadamard", "key_levels": LEVELS[0], "key_axis": "channel"}
    others = [one for one in space.enumerate(lossy_only=True) if not rare.items() <= one.items()]
    for part in others[:: len(others) // 24]:
        searcher.tell(measured(Configuration({**part, "quantise": "levels"}), as_part=part))
    (proposal,) = searcher.ask(1)
    assert rare.items() <= proposal.lossy.items()


def test_nothing_is_left_in_the_end() -> None:
    space = SPACE.restrict({"key_levels": [4, 8], "value_levels": [4], "sinks": [0]})
    searcher = BayesianSearcher(space, seed=0, start_trials=4)
    count = space.count(lossy_only=True)
    for _ in range(count):
        (proposal,) = searcher.ask(1)
        searcher.tell(measured(proposal.lossy))
    assert searcher.ask(1) == []


def test_uncertain_parts_of_the_front_are_refined_up_to_the_limit() -> None:
    searcher = BayesianSearcher(SPACE, seed=4, segments=2, max_segments=8)
    tell_start(searcher, lambda _, one: one)
    refined: dict[Configuration, int] = {}
    for _ in range(12):
        for proposal in searcher.ask(1):
            if proposal.source == "refine":
                assert proposal.segments == 2 * refined.get(proposal.lossy, 2) <= 8
                refined[proposal.lossy] = proposal.segments
            searcher.tell(measured(proposal.lossy, segments=proposal.segments))
    assert 0 < len(refined) <= 6


def test_a_part_of_another_space_is_refused() -> None:
    foreign = Configuration({**PARTS[0], "transform": "klt"})
    with pytest.raises(FieldError, match="transform"):
        BayesianSearcher(SPACE, seed=0).tell(Observation(lossy=foreign, loss=0.1, loss_se=0.0, segments=1, costs=()))
