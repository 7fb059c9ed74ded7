"""The gates and the choice of one class in every cell, vectorised: what passes, what wins, what is explored.

All arrays are indexed [arm, size, bandwidth, load]; arm 0 is raw. Deciding runs it on the whole grid, explaining on one
cell, so an explanation is the decision itself and not a second opinion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from controld.candidates.statistics import Z_95
from controld.controller.break_even import BreakEven
from controld.controller.choice import LOSS_SLACK_NATS, NEAR, Mask, choose
from controld.controller.energy import transfer_joules
from controld.controller.exploration import explore_units, log_variance
from controld.controller.fairness import Rival, fair_arms, largest_slowdown, relative_weights, rival_of
from controld.controller.goals import ClassGoal, ClassInput, Objective
from controld.controller.grid import Points
from controld.controller.knobs.base import STAGES, Array, Corrections, Knob, Prediction, Stage
from controld.controller.never_worse import RAW_ROW, not_slower_at_corners, ranked
from controld.controller.overload import SUPPLY, quality_caps, within_caps

_SWEEPS = 5
_MOST_RIVALS = 16


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


def evaluate_classes(
    inputs: Sequence[ClassInput], knob: Knob, points: Points, incumbents: Sequence[NDArray[np.intp]]
) -> list[Evaluation]:
    """Decide all classes of one table.

    Where the classes' shares of the load are known, each class sees the work of the others at their current arms; at
    most five sweeps settle that. Where more is offered than fits then, classes are capped (see `overload`) and as many
    sweeps settle it again. Where shares are not known, each class takes all load for its own.

    Where classes of several tenants share the load, each class chooses among the arms that pass its gates (its own
    quality limit, never worse than raw, its SLO) from those with which the largest weighted slowdown of any class is
    least: weighted max-min. Nobody's limit is relaxed for another.

    Args:
        incumbents: for each class the row of the arm in use in each cell, -1 where there is none; shape [S, B, L].
    """
    shares = [item.goal.offered_share for item in inputs]
    if len(inputs) == 1 or any(share is None for share in shares):
        return [
            _with_exploration(item, knob, points, evaluate(item, knob, points, used))
            for item, used in zip(inputs, incumbents, strict=True)
        ]
    known = [float(share or 0.0) for share in shares]
    sweeps = _Sweeps(inputs, knob, points, incumbents, known)
    sweeps.settle()
    caps = _overload_caps(inputs, sweeps.evaluations, known, sum(sweeps.work, start=sweeps.nothing))
    if caps is not None:
        sweeps.settle(caps)
    return [
        _with_exploration(
            item, knob, points, sweeps.evaluations[index], share=known[index], other_work=sweeps.others(index)
        )
        for index, item in enumerate(inputs)
    ]


class _Sweeps:
    """Classes that are decided in turn, each seeing the others' work at their current arms.

    What a cell ends at depends on that cell alone: sweeping goes on until no cell can change any more, and a cell that
    cannot change is not changed by the sweeps that others still need. So one cell, decided alone to explain it, ends
    where it ended in the table.
    """

    def __init__(
        self,
        inputs: Sequence[ClassInput],
        knob: Knob,
        points: Points,
        incumbents: Sequence[NDArray[np.intp]],
        shares: Sequence[float],
    ) -> None:
        self._inputs = inputs
        self._knob = knob
        self._points = points
        self._incumbents = incumbents
        self._shares = shares
        self._weights = _weights(inputs)
        self._rivals: list[Rival | None] = [None] * len(inputs)
        self._loudest = set(sorted(range(len(inputs)), key=lambda index: -shares[index])[:_MOST_RIVALS])
        self.nothing: Array = np.zeros((len(knob.work_stages), 1, 1, 1, 1))
        self.work: list[Array] = [self.nothing] * len(inputs)
        self.evaluations: list[Evaluation] = []
        self._asked: list[_Asked | None] = [None] * len(inputs)

    def others(self, index: int) -> Array:
        """Offered work of all classes but one."""
        return sum((work for other, work in enumerate(self.work) if other != index), start=self.nothing)

    def settle(self, caps: Sequence[Mask] | None = None) -> None:
        """Sweep until nothing can change any more, at most five times."""
        # A rival's prediction is of the sweep before, so with tenants one sweep without a change may be chance.
        needed = 2 if self._weights else 1
        unchanged = 0
        self._asked = [None] * len(self._inputs)
        for _ in range(_SWEEPS):
            before = [evaluation.winner for evaluation in self.evaluations]
            self._sweep(caps)
            same = before and all(np.array_equal(a, e.winner) for a, e in zip(before, self.evaluations, strict=True))
            unchanged = unchanged + 1 if same else 0
            if unchanged == needed:
                return

    def _sweep(self, caps: Sequence[Mask] | None) -> None:
        evaluations = []
        for index, (item, used) in enumerate(zip(self._inputs, self._incumbents, strict=True)):
            against = [rival for other, rival in enumerate(self._rivals) if rival is not None and other != index]
            asked = _Asked(self.others(index), against)
            if asked.same_as(self._asked[index]):
                evaluations.append(self.evaluations[index])
                continue
            self._asked[index] = asked
            evaluation = evaluate(
                item,
                self._knob,
                self._points,
                used,
                share=self._shares[index],
                other_work=asked.other_work,
                cap=caps[index] if caps else None,
                tenants=_Tenants(self._weights[index], against) if self._weights else None,
            )
            evaluations.append(evaluation)
            self.work[index] = _work_of(evaluation, self._shares[index])
            if self._weights and index in self._loudest:
                self._rivals[index] = _rival(item, evaluation, self._weights[index])
        self.evaluations = evaluations


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a class was last decided against."""

    other_work: Array
    rivals: list[Rival]

    def same_as(self, before: _Asked | None) -> bool:
        return (
            before is not None
            and len(self.rivals) == len(before.rivals)
            and all(a is b for a, b in zip(self.rivals, before.rivals, strict=True))
            and np.array_equal(self.other_work, before.other_work)
        )


def _rival(item: ClassInput, evaluation: Evaluation, weight: float) -> Rival:
    usable = evaluation.available & evaluation.quality_ok
    wants_speed = item.goal.objective is Objective.LATENCY and item.goal.only_arm is None
    return rival_of(evaluation.prediction, usable, evaluation.winner, weight, wants_speed=wants_speed)


def _overload_caps(
    inputs: Sequence[ClassInput], evaluations: Sequence[Evaluation], shares: Sequence[float], work: Array
) -> list[Mask] | None:
    """For each class the arms within its cap, all of them where everything fits; None where it fits everywhere."""
    overloaded = work.max(axis=0) >= SUPPLY
    if not overloaded.any():
        return None
    shape = evaluations[0].rank_s.shape[1:]
    demands, losses, usable = [], [], []
    for item, evaluation, share in zip(inputs, evaluations, shares, strict=True):
        p = evaluation.prediction
        demands.append(np.broadcast_to(share * p.transfers_per_s[None] * p.server_s, (*p.server_s.shape[:2], *shape)))
        losses.append(np.array([candidate.loss_mean_nats for candidate in item.candidates]))
        mask = (evaluation.available & evaluation.quality_ok)[:, None, None, None]
        usable.append(np.broadcast_to(mask, evaluation.rank_s.shape))
    caps = quality_caps(demands, losses, usable)
    return [within_caps(demand, rows) | ~overloaded for demand, rows in zip(demands, caps, strict=True)]


@dataclass(frozen=True, slots=True)
class _Tenants:
    """Against whom a class is weighed: its own tenant's relative weight, and the other classes."""

    weight: float
    rivals: list[Rival]


def _weights(inputs: Sequence[ClassInput]) -> list[float]:
    """For each class its tenant's relative weight; nothing where one tenant has the link alone."""
    by_tenant = {item.goal.tenant: item.goal.tenant_weight for item in inputs}
    if len(by_tenant) < 2:
        return []
    relative = relative_weights(by_tenant)
    return [relative[item.goal.tenant] for item in inputs]


def _work_of(evaluation: Evaluation, share: float) -> Array:
    """Offered work of a class at its chosen arms, shape [servers, 1, S, B, L]."""
    prediction = evaluation.prediction
    server_s = np.take_along_axis(prediction.server_s, evaluation.winner[None, None], axis=1)
    return np.asarray(share * prediction.transfers_per_s[None] * server_s)


def evaluate(
    item: ClassInput,
    knob: Knob,
    points: Points,
    incumbent: NDArray[np.intp],
    *,
    share: float = 1.0,
    other_work: Array | None = None,
    cap: Mask | None = None,
    tenants: _Tenants | None = None,
) -> Evaluation:
    """Decide one class, without exploration yet. See `Evaluation` for shapes.

    Args:
        cap: arms that leave the other classes their room under overload, shape [arms, S, B, L]; None for all.
    """
    goal, models, corrections = item.goal, item.models, item.corrections
    factors = corrections.factors()
    prediction = knob.predict(models, factors, points.middle, share=share, other_work=other_work)
    rank = ranked(prediction)
    never_worse = rank <= rank[RAW_ROW]
    never_worse &= not_slower_at_corners(knob, models, factors, points, share=share, other_work=other_work)

    available, quality_ok = _available(item), _quality_ok(item)
    usable = available & quality_ok
    losses = np.array([candidate.loss_mean_nats for candidate in item.candidates])[:, None, None, None]
    tail = _tail(goal, prediction, corrections, rank)
    meets = _meets_slo(goal, tail, points)
    wire_shares = models.wire_share * factors[:, STAGES.index(Stage.BYTES)]
    joules = transfer_joules(prediction, wire_shares, points.size).total_j

    pinned = goal.only_arm is not None
    wants_speed = goal.objective is Objective.LATENCY
    stable = prediction.rho < 1.0
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
        allowed &= fair
    # A change of arm must earn its own cost: whoever is not in use is that much slower in the choice.
    cost = _cost(goal.objective, rank, losses, wire_shares, joules)
    time, violation = rank, tail
    if knob.switch_cost_s:
        switching = knob.switch_cost_s * _would_switch(rank.shape, incumbent)
        time, violation = rank + switching, tail + switching
        cost = time if wants_speed else cost
    cost = _or_violation(cost, violation, allowed & meets & stable)
    winner, near = choose(cost, allowed, losses, time, incumbent)
    border = None
    if pinned:
        wanted = np.flatnonzero(usable[1:]) + 1
        winner = np.full_like(winner, wanted[0] if len(wanted) else RAW_ROW)
    elif wants_speed and tenants is None and not knob.switch_cost_s:
        border = BreakEven.of(knob, models, factors, points, margin=NEAR)

    def best_end() -> Array:
        """Seconds at the corner at which codecs do best."""
        return ranked(knob.predict(models, factors, points.corners[-1], share=share, other_work=other_work))

    within_cap = everywhere if cap is None else cap
    open_to = usable[:, None, None, None] & within_cap & (meets | ~meets[RAW_ROW])
    winner, raw_below_s, raw_below_s_per_byte = _divided(border, points, winner, best_end, open_to, losses, incumbent)
    return Evaluation(
        prediction=prediction,
        rank_s=rank,
        tail_s=tail,
        cost=cost,
        joules=joules,
        available=available,
        quality_ok=quality_ok,
        stable=stable,
        never_worse=never_worse,
        meets_slo=meets,
        within_cap=within_cap,
        fair=fair,
        largest_slowdown=largest,
        near=near,
        winner=winner,
        raw_below_s=raw_below_s,
        raw_below_s_per_byte=raw_below_s_per_byte,
        lower_s=rank,
        explore_units=np.zeros(rank.shape, dtype=np.uint8),
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


def _with_exploration(
    item: ClassInput,
    knob: Knob,
    points: Points,
    evaluation: Evaluation,
    *,
    share: float = 1.0,
    other_work: Array | None = None,
) -> Evaluation:
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
