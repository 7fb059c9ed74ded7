"""From policy, profiles and posteriors to a plan. Pure: the same inputs give the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from controld.contract.decision import Mixture
from controld.contract.errors import FieldError
from controld.controller.evaluate import Evaluation
from controld.controller.exploration import EXPLORE_UNITS
from controld.controller.goals import Candidate, ClassInput, TableRequest
from controld.controller.grid import Grid
from controld.controller.knobs.base import Array, Knob
from controld.controller.knobs.remembering import Remembering
from controld.controller.knobs.tiers import knob_for_tier
from controld.controller.plan import Indices, Plan, TablePlan, compact
from controld.controller.posterior import StageCorrection
from controld.controller.sweeps import evaluate_classes

_STEADY_LOG = 0.01
_STEADY_SPREAD = 1.25


def decide(
    requests: Sequence[TableRequest],
    *,
    knob: Knob | None = None,
    grid: Grid | None = None,
    previous: Plan | None = None,
    policy_generation: int = 0,
    now_unix_s: float = 0.0,
) -> Plan:
    """Decide every cell of every table.

    Args:
        knob: for every table; None takes each tier's own.
        previous: the plan in force; its choices are what is "in use".

    Raises:
        FieldError: two requests for one table, or a request that contradicts itself.
    """
    grid = grid or Grid()
    keys = [(request.tier, request.link_group) for request in requests]
    if len(set(keys)) != len(keys):
        raise FieldError("table_requests", "a tier and link group come twice")
    tables = tuple(
        _decide_table(request, knob or knob_for_tier(request.tier), grid, previous.table(*key) if previous else None)
        for request, key in zip(requests, keys, strict=True)
    )
    return Plan(tables=tables, policy_generation=policy_generation, decided_unix_s=now_unix_s)


def _decide_table(request: TableRequest, knob: Knob, grid: Grid, previous: TablePlan | None) -> TablePlan:
    inputs = _steady(request.class_inputs(), previous)
    if not inputs:
        raise FieldError("table_request.goals", "is empty")
    if previous is not None and _same_question(previous, request, inputs, knob, grid):
        # The old answer is a fixed point; only what is shown as evidence moves on.
        return replace(previous, classes=inputs, guard_sample=request.guard_sample)
    arms = list({candidate.arm_id: candidate.arm for item in inputs for candidate in item.candidates}.values())
    position = {arm.arm_id: index for index, arm in enumerate(arms)}
    in_use = np.concatenate([_in_use(item, position, grid, previous) for item in inputs])
    cells = int(np.prod(grid.shape))
    incumbents = [
        _rows(item, position, len(arms))[in_use[index * cells : (index + 1) * cells]].reshape(grid.shape)
        for index, item in enumerate(inputs)
    ]
    evaluations = evaluate_classes(inputs, Remembering(knob), grid.points, incumbents)
    shares, winners = zip(
        *(_cell_shares(item, e, position, len(arms)) for item, e in zip(inputs, evaluations, strict=True)),
        strict=True,
    )
    raw_below = np.concatenate(
        [np.column_stack((e.raw_below_s.ravel(), e.raw_below_s_per_byte.ravel())) for e in evaluations]
    )
    mixtures, mixture_of_cell = _mixtures(np.concatenate(shares), np.concatenate(winners), raw_below, inputs, cells)
    return TablePlan(
        tier=request.tier,
        link_group=request.link_group,
        grid=grid,
        knob=knob,
        classes=inputs,
        arms=tuple(arms),
        mixtures=mixtures,
        cells=compact(mixture_of_cell),
        in_use=compact(in_use),
        prior_bandwidth_bytes_per_s=request.prior_bandwidth_bytes_per_s,
        guard_sample=request.guard_sample,
    )


def _steady(inputs: tuple[ClassInput, ...], previous: TablePlan | None) -> tuple[ClassInput, ...]:
    """Corrections that hardly moved since the previous plan stay what they were, so that small news make no new table.

    They are compared with what was used, not with what was learned, so the error never adds up.
    """
    if previous is None:
        return inputs
    used = {
        (item.goal.name, candidate.arm_id): candidate.corrections
        for item in previous.classes
        for candidate in item.candidates
    }
    return tuple(
        ClassInput(
            item.goal,
            tuple(
                replace(
                    candidate,
                    corrections=tuple(
                        _kept(old, new)
                        for old, new in zip(
                            used.get((item.goal.name, candidate.arm_id), candidate.corrections),
                            candidate.corrections,
                            strict=True,
                        )
                    ),
                )
                for candidate in item.candidates
            ),
        )
        for item in inputs
    )


def _same_question(
    previous: TablePlan, request: TableRequest, inputs: tuple[ClassInput, ...], knob: Knob, grid: Grid
) -> bool:
    """Whether nothing that decides has changed since the previous plan."""

    def deciding(items: tuple[ClassInput, ...]) -> list[object]:
        return [
            (item.goal, [(_ALL_BUT_CORRECTIONS(c), [_NUMBERS(s) for s in c.corrections]) for c in item.candidates])
            for item in items
        ]

    return (
        (previous.knob, previous.grid) == (knob, grid)
        and previous.prior_bandwidth_bytes_per_s == request.prior_bandwidth_bytes_per_s
        and deciding(previous.classes) == deciding(inputs)
    )


_ALL_BUT_CORRECTIONS = attrgetter(*(field.name for field in fields(Candidate) if field.name != "corrections"))
_NUMBERS = attrgetter("mean_log", "variance", "noise_variance")
"""What of a correction decides: not how many observations are behind it, which only explanations show."""


def _kept(old: StageCorrection, new: StageCorrection) -> StageCorrection:
    """The old correction with the new count of observations, where the two are close."""
    if not _close(old, new):
        return new
    return old if old.observations == new.observations else replace(old, observations=new.observations)


def _close(old: StageCorrection, new: StageCorrection) -> bool:
    return (
        abs(old.mean_log - new.mean_log) <= _STEADY_LOG
        and new.variance <= old.variance * _STEADY_SPREAD
        and old.variance <= new.variance * _STEADY_SPREAD
        and new.noise_variance <= old.noise_variance * _STEADY_SPREAD
        and old.noise_variance <= new.noise_variance * _STEADY_SPREAD
    )


def _in_use(item: ClassInput, position: dict[str, int], grid: Grid, previous: TablePlan | None) -> Indices:
    """The previous plan's choice in each cell of a class as an index into the new arms; -1 where there was none."""
    cells = int(np.prod(grid.shape))
    nothing = np.full(cells, -1, dtype=np.intp)
    if previous is None or previous.grid != grid:
        return nothing
    names = [old.goal.name for old in previous.classes]
    if item.goal.name not in names:
        return nothing
    start = names.index(item.goal.name) * cells
    translate = np.array([position.get(arm.arm_id, -1) for arm in previous.arms], dtype=np.intp)
    return translate[previous.winners[start : start + cells]]


def _rows(item: ClassInput, position: dict[str, int], arms: int) -> Indices:
    """From an index into the table's arms to a class's row; the extra last entry answers for index -1."""
    rows = np.full(arms + 1, -1, dtype=np.intp)
    for row, candidate in enumerate(item.candidates):
        rows[position[candidate.arm_id]] = row
    return rows


def _cell_shares(
    item: ClassInput, evaluation: Evaluation, position: dict[str, int], arms: int
) -> tuple[NDArray[np.uint8], Indices]:
    """Exploration units of each cell over the table's arms, shape [cells, arms], and the winner as a table arm."""
    columns = np.array([position[candidate.arm_id] for candidate in item.candidates], dtype=np.intp)
    by_row = evaluation.explore_units.reshape(len(columns), -1).T
    units = np.zeros((by_row.shape[0], arms), dtype=np.uint8)
    units[:, columns] = by_row
    return units, columns[evaluation.winner.reshape(-1)]


def _mixtures(
    units: NDArray[np.uint8], winners: Indices, raw_below: Array, inputs: Sequence[ClassInput], cells: int
) -> tuple[tuple[Mixture, ...], Indices]:
    """The distinct mixtures, and which one each cell has; `raw_below` has shape [cells, 2]."""
    split = np.flatnonzero(raw_below.any(axis=1))
    _, line_of_split = np.unique(raw_below[split], axis=0, return_inverse=True)
    line_of_cell = np.zeros(len(raw_below), dtype=np.int64)
    line_of_cell[split] = 1 + line_of_split.reshape(-1)
    shares = np.array([item.goal.explore_share for item in inputs])
    kinds, kind_of_class = np.unique(shares, return_inverse=True)
    # A cell's row is the kind of its class, its line, its winner, and a byte of units for each arm, in whole words.
    rows = np.zeros((len(units), 3 + -(-units.shape[1] // 8)), dtype=np.int64)
    rows.view(np.uint8)[:, 24 : 24 + units.shape[1]] = units
    # The share of a class without any exploration in a cell does not matter: one mixture serves all.
    rows[:, 0] = np.where(rows[:, 3:].any(axis=1), np.repeat(kind_of_class, cells), 0)
    rows[:, 1] = line_of_cell
    rows[:, 2] = winners
    first, mixture_of_cell = _distinct_rows(rows)
    mixtures = _distinct_mixtures(units[first], winners[first], kinds[rows[first, 0]], raw_below[first])
    return mixtures, mixture_of_cell


def _distinct_rows(rows: NDArray[np.int64]) -> tuple[Indices, Indices]:
    """Where each distinct row first appears, in that order, and which of them each row is; by a hash of each row."""
    multipliers = np.random.default_rng(0).integers(1, 2**61, size=rows.shape[1], dtype=np.int64) | 1
    with np.errstate(over="ignore"):
        hashes = (rows * multipliers).sum(axis=1)
    # Cells side by side mostly are alike, and sorting is what costs: one of each run is enough.
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    _, first, inverse = np.unique(hashes[starts], return_index=True, return_inverse=True)
    first, inverse = starts[first], np.repeat(inverse.reshape(-1), np.diff(np.append(starts, len(rows))))
    if not np.array_equal(rows[first[inverse]], rows):
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


def _distinct_mixtures(
    units: NDArray[np.uint8], winners: Indices, explore_shares: NDArray[np.float64], raw_below: Array
) -> tuple[Mixture, ...]:
    """One for each row: the winner, then what is explored, most units first; raw below the line of the row."""
    order = np.argsort(-units.astype(np.int16), axis=1, kind="stable")
    weights = explore_shares[:, None] * np.take_along_axis(units, order, axis=1) / EXPLORE_UNITS
    kept = 1.0 - np.cumsum(weights, axis=1)[:, -1]
    explored = (units > 0).sum(axis=1)
    columns = (winners, order, kept, weights, explored, raw_below)
    return tuple(
        Mixture((winner, *arms[:count]), (rest, *parts[:count]), *line)
        for winner, arms, rest, parts, count, line in zip(*(column.tolist() for column in columns), strict=True)
    )
