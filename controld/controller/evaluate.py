"""The gates and the choice of one class in every cell, vectorised: what passes, what wins, what is explored.

All arrays are indexed [arm, size, bandwidth, load]; arm 0 is raw. Deciding runs it on the whole grid, explaining on one
cell, so an explanation is the decision itself and not a second opinion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from controld.candidates.statistics import Z_95
from controld.controller.break_even import BreakEven
from controld.controller.choice import LOSS_SLACK_NATS, NEAR, Mask, choose
from controld.controller.energy import transfer_joules
from controld.controller.exploration import explore_units, log_variance
from controld.controller.fairness import Rival, fair_arms, largest_slowdown
from controld.controller.goals import ClassGoal, ClassInput, Objective
from controld.controller.grid import Points
from controld.controller.knobs.base import STAGES, Array, Corrections, Knob, Prediction, Stage
from controld.controller.never_worse import RAW_ROW, not_slower_at_corners, ranked


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One class in every cell.

    Args:
        prediction: at the middle of the cells, with posterior-mean corrections.
        rank_s: total seconds where stable; far above every stable arm, in the order of rho, where not.
        tail_s: total seconds at the SLO's percentile.
        lower_s: total seconds at the lower ends of all corrections, ranked like `rank_s`.
        cost: what the objective minimises.
        joules: estimated energy of a transfer, shape [arms, S, 1, 1].
        available: not pinned off; shape [arms].
        quality_ok: upper bound of the loss within the limit; shape [arms].
        never_worse: not slower than raw at the middle and at the corners of the cell.
        meets_slo: `tail_s` and what lies outside the transfer within the SLO; all true without one.
        within_cap: leaves the other classes their room; all true where everything fits.
        fair: false for an arm that passes the gates, but would slow some tenant down more than need be.
        largest_slowdown: weighted, of any class, with this class on the arm; one where nobody asks.
        near: in the last choice, within 3 % of the best.
        winner: row of the chosen arm, shape [S, B, L].
        raw_below_s, raw_below_s_per_byte: where raw keeps a part of the cell, see `contract.decision.Mixture`; else 0.
        explore_units: parts of 64 of the exploration share for each other arm.
    """

    prediction: Prediction
    rank_s: Array
    tail_s: Array
    lower_s: Array
    cost: Array
    joules: Array
    available: Mask
    quality_ok: Mask
    stable: Mask
    never_worse: Mask
    meets_slo: Mask
    within_cap: Mask
    fair: Mask
    largest_slowdown: Array
    near: Mask
    winner: NDArray[np.intp]
    raw_below_s: Array
    raw_below_s_per_byte: Array
    explore_units: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Against whom a class is weighed: its own tenant's relative weight, and the other classes."""

    weight: float
    rivals: list[Rival]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gates:
    """What arms must pass, named as in `Evaluation`.

    Args:
        usable: available, and good enough.
        allowed: passes all gates, as far as any arm of the cell can.
    """

    available: Mask
    quality_ok: Mask
    usable: Mask
    stable: Mask
    never_worse: Mask
    meets_slo: Mask
    within_cap: Mask
    fair: Mask
    largest_slowdown: Array
    allowed: Mask


def evaluate(
    item: ClassInput,
    knob: Knob,
    points: Points,
    incumbent: NDArray[np.intp],
    *,
    share: float = 1.0,
    other_work: Array | None = None,
    cap: Mask | None = None,
    tenants: Tenants | None = None,
) -> Evaluation:
    """Decide one class, without exploration yet. See `Evaluation` for shapes.

    Args:
        cap: arms that leave the other classes their room under overload, shape [arms, S, B, L]; None for all.
    """
    goal, models, factors = item.goal, item.models, item.corrections.factors()
    prediction = knob.predict(models, factors, points.middle, share=share, other_work=other_work)
    rank = ranked(prediction)
    tail = _tail(goal, prediction, item.corrections, rank)
    corners_ok = not_slower_at_corners(knob, models, factors, points, share=share, other_work=other_work)
    gates = _gates(
        item,
        prediction,
        incumbent,
        rank=rank,
        never_worse=(rank <= rank[RAW_ROW]) & corners_ok,
        meets=_meets_slo(goal, tail, points),
        cap=cap,
        tenants=tenants,
    )

    losses = np.array([candidate.loss_mean_nats for candidate in item.candidates])[:, None, None, None]
    wire_shares = models.wire_share * factors[:, STAGES.index(Stage.BYTES)]
    joules = transfer_joules(prediction, wire_shares, points.size).total_j
    wants_speed = goal.objective is Objective.LATENCY
    # A change of arm must earn its own cost: whoever is not in use is that much slower in the choice.
    time, violation = rank, tail
    if knob.switch_cost_s:
        switching = knob.switch_cost_s * _would_switch(rank.shape, incumbent)
        time, violation = rank + switching, tail + switching
    cost = time if wants_speed else _cost(goal.objective, rank, losses, wire_shares, joules)
    cost = _or_violation(cost, violation, gates.allowed & gates.meets_slo & gates.stable)
    winner, near = choose(cost, gates.allowed, losses, time, incumbent)
    border = None
    if goal.only_arm is not None:
        wanted = np.flatnonzero(gates.usable[1:]) + 1
        winner = np.full_like(winner, wanted[0] if len(wanted) else RAW_ROW)
    elif wants_speed and tenants is None and not knob.switch_cost_s:
        border = BreakEven.of(knob, models, factors, points, margin=NEAR)

    def best_end() -> Array:
        """Seconds at the corner at which codecs do best."""
        return ranked(knob.predict(models, factors, points.corners[-1], share=share, other_work=other_work))

    serves = gates.meets_slo | ~gates.meets_slo[RAW_ROW]
    open_to = gates.usable[:, None, None, None] & gates.within_cap & serves
    winner, raw_below_s, raw_below_s_per_byte = _divided(border, points, winner, best_end, open_to, losses, incumbent)
    return Evaluation(
        prediction=prediction,
        rank_s=rank,
        tail_s=tail,
        cost=cost,
        joules=joules,
        available=gates.available,
        quality_ok=gates.quality_ok,
        stable=gates.stable,
        never_worse=gates.never_worse,
        meets_slo=gates.meets_slo,
        within_cap=gates.within_cap,
        fair=gates.fair,
        largest_slowdown=gates.largest_slowdown,
        near=near,
        winner=winner,
        raw_below_s=raw_below_s,
        raw_below_s_per_byte=raw_below_s_per_byte,
        lower_s=rank,
        explore_units=np.zeros(rank.shape, dtype=np.uint8),
    )


def _gates(
    item: ClassInput,
    prediction: Prediction,
    incumbent: NDArray[np.intp],
    *,
    rank: Array,
    never_worse: Mask,
    meets: Mask,
    cap: Mask | None,
    tenants: Tenants | None,
) -> _Gates:
    """Which arms pass which gate, in which cell."""
    goal = item.goal
    pinned, wants_speed = goal.only_arm is not None, goal.objective is Objective.LATENCY
    available, quality_ok = _available(item), _quality_ok(item)
    usable, stable = available & quality_ok, prediction.rho < 1.0
    strictly = np.broadcast_to(usable[:, None, None, None], rank.shape)
    if wants_speed and not pinned:
        strictly = strictly & never_worse
    wishes = (cap, stable, None if goal.slo_s is None else meets)
    allowed = _passing(strictly, *(wish for wish in wishes if wish is not None))
    everywhere: Mask = np.broadcast_to(np.True_, rank.shape)
    fair, largest = everywhere, np.broadcast_to(1.0, rank.shape)
    if tenants is not None and not pinned:
        largest = largest_slowdown(prediction, usable, tenants.weight, tenants.rivals, wants_speed=wants_speed)
        fair = fair_arms(largest, allowed, incumbent, NEAR) | ~allowed
        allowed = allowed & fair
    return _Gates(
        available=available,
        quality_ok=quality_ok,
        usable=usable,
        stable=stable,
        never_worse=never_worse,
        meets_slo=meets,
        within_cap=everywhere if cap is None else cap,
        fair=fair,
        largest_slowdown=largest,
        allowed=allowed,
    )


def _passing(strictly: Mask, *wishes: Mask) -> Mask:
    """Arms that pass all gates; a wish that none of those left can meet in a cell is given up there."""
    allowed = strictly
    for wish in wishes:
        passing = allowed & wish
        allowed = passing | (allowed & ~passing.any(axis=0))
    return allowed


def _or_violation(cost: Array, violation: Array, serves: Mask) -> Array:
    """The cost; where no arm serves, the least violation counts, whatever the objective."""
    served = serves.any(axis=0)
    return cost if cost is violation or served.all() else np.where(served, cost, violation)


def _divided(
    border: BreakEven | None,
    points: Points,
    winner: NDArray[np.intp],
    best_end: Callable[[], Array],
    open_to: Mask,
    losses: Array,
    incumbent: NDArray[np.intp],
) -> tuple[NDArray[np.intp], Array, Array]:
    """Where raw has won a cell in a part of which another arm pays: that arm, and below which line raw stays.

    Args:
        border: None: no cell is divided.
        best_end: every arm's seconds at the end of the cell at which codecs do best, shape [arms, S, B, L]; asked for
            only where some cell is divided.
    """
    nowhere = np.zeros(winner.shape)
    if border is None:
        return winner, nowhere, nowhere
    paying = border.pays_somewhere(points)[:, :, :, None] & open_to
    paying[RAW_ROW] = False
    split = (winner == RAW_ROW) & paying.any(axis=0)
    if not split.any():
        return winner, nowhere, nowhere
    paying[RAW_ROW] = ~split
    seconds = best_end()
    best, _ = choose(seconds, paying, losses, seconds, incumbent)
    winner = np.where(split, best, winner)
    below_s, below_s_per_byte = border.lines(winner, points)
    return winner, np.where(split, below_s, 0.0), np.where(split, below_s_per_byte, 0.0)


def _tail(goal: ClassGoal, prediction: Prediction, corrections: Corrections, rank: Array) -> Array:
    """Seconds at the percentile for which the SLO holds; the mean where there is none."""
    if goal.slo_s is None or goal.slo_percentile == 50.0:
        return rank
    spread = np.sqrt(log_variance(prediction, corrections.variance + corrections.noise_variance))
    return np.asarray(rank * np.exp(NormalDist().inv_cdf(goal.slo_percentile / 100) * spread))


def _meets_slo(goal: ClassGoal, tail: Array, points: Points) -> Mask:
    if goal.slo_s is None:
        return np.broadcast_to(np.True_, tail.shape)
    outside = goal.outside.a_s + goal.outside.b_s_per_byte * points.size
    return np.asarray(tail + outside[None, :, None, None] <= goal.slo_s)


def _would_switch(shape: tuple[int, ...], incumbent: NDArray[np.intp]) -> Mask:
    """Arms that would take the place of another one in use, shape [arms, S, B, L]."""
    rows = np.arange(shape[0])[:, None, None, None]
    return np.asarray((incumbent >= 0)[None] & (rows != incumbent[None]))


def usable_arms(item: ClassInput) -> Mask:
    """Arms that are not out of use and within the quality limit, wherever; shape [arms]."""
    return _available(item) & _quality_ok(item)


def _available(item: ClassInput) -> Mask:
    available = np.array([not candidate.out_reason for candidate in item.candidates])
    if item.goal.only_arm is not None:
        available &= np.array([candidate.arm_id == item.goal.only_arm for candidate in item.candidates])
    available[RAW_ROW] = True
    return available


def _quality_ok(item: ClassInput) -> Mask:
    uppers = np.array([candidate.loss_upper_nats for candidate in item.candidates])
    quality_ok = uppers <= item.goal.max_quality_loss_nats
    quality_ok[RAW_ROW] = True
    return np.asarray(quality_ok)


def with_exploration(
    item: ClassInput,
    knob: Knob,
    points: Points,
    evaluation: Evaluation,
    *,
    share: float = 1.0,
    other_work: Array | None = None,
) -> Evaluation:
    """The same evaluation with what else is tried, where the class explores."""
    if item.goal.explore_share <= 0 or item.goal.only_arm is not None:
        return evaluation
    factors = item.corrections.lower_factors(Z_95)
    lower = ranked(knob.predict(item.models, factors, points.middle, share=share, other_work=other_work))
    variance = log_variance(evaluation.prediction, item.corrections.variance)
    passing = (evaluation.available & evaluation.quality_ok)[:, None, None, None]
    stable = evaluation.stable | ~evaluation.stable.any(axis=0)
    units = explore_units(evaluation.rank_s, lower, variance, evaluation.winner, passing & stable)
    return replace(evaluation, lower_s=lower, explore_units=units)


def _cost(objective: Objective, rank: Array, losses: Array, wire_shares: Array, joules: Array) -> Array:
    if objective is Objective.QUALITY:
        return np.broadcast_to(losses + LOSS_SLACK_NATS, rank.shape)
    if objective is Objective.BYTES:
        return np.broadcast_to(wire_shares[:, None, None, None], rank.shape)
    return np.broadcast_to(joules, rank.shape) if objective is Objective.ENERGY else rank
