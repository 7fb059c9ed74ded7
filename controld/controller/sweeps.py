"""All classes of one table: each is decided against what the others take, until nothing changes any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controld.controller.choice import Mask
from controld.controller.evaluate import Evaluation, Tenants, evaluate, with_exploration
from controld.controller.fairness import Rival, relative_weights, rival_of
from controld.controller.goals import ClassInput, Objective
from controld.controller.grid import Points
from controld.controller.knobs.base import Array, Knob
from controld.controller.overload import SUPPLY, quality_caps, within_caps

_SWEEPS = 5
_MOST_RIVALS = 16


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
            with_exploration(item, knob, points, evaluate(item, knob, points, used))
            for item, used in zip(inputs, incumbents, strict=True)
        ]
    known = [float(share or 0.0) for share in shares]
    sweeps = _Sweeps(inputs, knob, points, incumbents, known)
    sweeps.settle()
    caps = _overload_caps(inputs, sweeps.evaluations, known, sum(sweeps.work, start=sweeps.nothing))
    if caps is not None:
        sweeps.settle(caps)
    return [
        with_exploration(
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
                tenants=Tenants(self._weights[index], against) if self._weights else None,
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
