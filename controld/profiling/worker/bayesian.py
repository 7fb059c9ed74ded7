"""The Bayesian search: a Gaussian process for the loss, cheap models for what coders cost, exact expected improvement.

Only the loss is expensive, and it is the only objective that is treated as random. What the coders of an unmeasured
part carry and take is predicted from those measured. See `controld.profiling.search.improvement` for the acquisition.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from controld.candidates.pareto import LOSS_FLOOR_NATS, log_objectives, non_dominated
from controld.contract.configuration import Configuration
from controld.contract.space import StrategySpace
from controld.profiling.search.encoding import SpaceEncoding
from controld.profiling.search.improvement import expected_improvement
from controld.profiling.search.observation import Observation, Proposal
from controld.profiling.worker.gaussian_process import FIT_ERRORS, GaussianProcess, Prediction

Array = NDArray[np.float64]

START_TRIALS = 20
"""Quasi-random trials before the first model."""

_SAMPLED = 6_000
_SCREENED = 400
_SCREENING_SLICES = 12
_SMALLEST_DEVIATION = 1e-4
_SOBOL_TRIES = 4_096

REFINED_SHARE = 0.25
"""At most this share of the measured parts is measured again on more texts."""


@dataclass(frozen=True, slots=True)
class Points:
    """What the coders of some lossy parts would give: one row for each (part, coder).

    Args:
        part: index of the part, `[n]`.
        costs: bytes ratio and log10 seconds a byte, `[n, 2]`.
    """

    part: NDArray[np.int64]
    costs: Array


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the models expect of a pool.

    Args:
        loss: log10 of the loss of each part.
        points: what their coders would cost.
        pending: (log10 loss, bytes ratio, log10 seconds) of what is under way, `[n, 3]`.
    """

    loss: Prediction
    points: Points
    pending: Array


class BayesianSearcher:
    """See `controld.profiling.search.searcher.Searcher`.

    Args:
        space: the lossy parts and their coders.
        seed: of the quasi-random start and of what is sampled of large spaces.
        segments: the first fidelity of a part.
        max_segments: a part on the front whose loss is uncertain is measured again, up to so many; the same as
            `segments` where every part is measured once.
        start_trials: quasi-random trials before the first model.
        loss_floor: see `log_objectives`.
    """

    def __init__(
        self,
        space: StrategySpace,
        *,
        seed: int,
        segments: int = 2,
        max_segments: int | None = None,
        start_trials: int = START_TRIALS,
        loss_floor: float = LOSS_FLOOR_NATS,
    ) -> None:
        torch.set_num_threads(1)
        self._encoding = SpaceEncoding(space)
        self._segments = segments
        self._max_segments = segments if max_segments is None else max_segments
        self._start_trials = start_trials
        self._loss_floor = loss_floor
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._all = self._encoding.enumerated()
        self._features_of_all = self._encoding.encode(self._all) if self._all is not None else None
        self._observed: dict[Configuration, Observation] = {}
        self._loss_model = GaussianProcess()
        self._cost_models: dict[str, GaussianProcess] = defaultdict(GaussianProcess)
        self._known_costs: dict[str, Array] = {}
        self._untried_cost: Array = np.zeros(2)
        self.detail = ""

    def tell(self, observation: Observation) -> None:
        """Replaces what was told of the same part. Raises FieldError where a value is none of the space's."""
        self._encoding.encode([observation.lossy])
        self._observed[observation.lossy] = observation

    def restart(self, observations: Iterable[Observation]) -> None:
        """Know these observations and no others; hyperparameters are kept."""
        self._observed = {}
        for observation in observations:
            self.tell(observation)

    def ask(self, count: int, pending: Sequence[Configuration] = ()) -> list[Proposal]:
        """See the protocol. Where no model can be fitted, `detail` says why and the proposals are quasi-random."""
        self.detail = ""
        taken = {*self._observed, *pending}
        missing = self._start_trials - len(taken)
        if missing > 0:
            return self._quasi_random(min(count, missing), taken)
        told = [one for one in self._observed.values() if math.isfinite(one.loss) and one.costs]
        pool, features = self._pool(taken, told)
        if not pool:
            return self._to_refine(told, set(pending))[:count]
        try:
            outlook = self._outlook(told, pool, features, pending)
        except FIT_ERRORS as error:
            self.detail = f"no model: {error}"
            return self._quasi_random(count, taken)
        refined = self._to_refine(told, set(pending))[: min(count, 1)]
        chosen = self._most_promising(count - len(refined), told, outlook)
        return [*refined, *self._proposals([pool[index] for index in chosen], "model")]

    # ------------------------------------------------------------------------------------------ without a model

    def _quasi_random(self, count: int, taken: set[Configuration]) -> list[Proposal]:
        """Sobol points that are no one's yet; what is left of an enumerated space where Sobol finds none."""
        columns = len(self._encoding.parameters)
        engine = torch.quasirandom.SobolEngine(columns, scramble=True, seed=self._seed)  # type: ignore[no-untyped-call]
        chosen: list[Configuration] = []
        seen = set(taken)
        for _ in range(_SOBOL_TRIES // 64):
            for point in engine.draw(64).tolist():
                part = self._encoding.draw(point)
                if part is not None and part not in seen:
                    seen.add(part)
                    chosen.append(part)
                if len(chosen) == count:
                    return self._proposals(chosen, "sobol")
        if self._all is not None:
            left = [part for part in self._all if part not in seen]
            order = self._random.permutation(len(left))[: count - len(chosen)]
            chosen += [left[index] for index in order]
        return self._proposals(chosen, "sobol")

    def _proposals(self, parts: Sequence[Configuration], source: str) -> list[Proposal]:
        return [Proposal(lossy=part, segments=self._segments, source=source) for part in parts]

    # ------------------------------------------------------------------------------------------ with a model

    def _outlook(
        self,
        told: Sequence[Observation],
        pool: Sequence[Configuration],
        features: Array,
        pending: Sequence[Configuration],
    ) -> Outlook:
        """Raises: one of `FIT_ERRORS`."""
        self._fit(told)
        believed = [self._believed(part) for part in pending]
        return Outlook(
            loss=self._loss_model.predict(features),
            points=self._predicted_points(pool, features),
            pending=np.concatenate(believed) if believed else np.empty((0, 3)),
        )

    def _most_promising(self, count: int, told: Sequence[Observation], outlook: Outlook) -> list[int]:
        """Indices in the pool, each with what is chosen before it taken as measured."""
        points, measured = outlook.points, self._points_of(told)
        low, high = _ranges(measured, outlook.loss, points.costs, self._loss_floor)
        span = np.where(high > low, high - low, 1.0)
        front = (np.vstack((measured, outlook.pending)) - low) / span
        front = front[non_dominated(front)]
        mean = (outlook.loss.mean[:, 0] - low[0]) / span[0]
        deviation = np.maximum(outlook.loss.deviation[:, 0] / span[0], _SMALLEST_DEVIATION)
        costs = (points.costs - low[1:]) / span[1:]
        rows = self._screen(front, costs, mean, deviation, points.part)
        chosen: list[int] = []
        while len(chosen) < count and len(rows):
            gains = expected_improvement(front, costs[rows], mean[points.part[rows]], deviation[points.part[rows]])
            best = int(points.part[rows[int(np.argmax(gains))]])
            chosen.append(best)
            mine = points.part == best
            front = np.vstack((front, np.column_stack((np.full(int(mine.sum()), mean[best]), costs[mine]))))
            rows = rows[points.part[rows] != best]
        return chosen

    def _to_refine(self, told: Sequence[Observation], pending: set[Configuration]) -> list[Proposal]:
        """Parts of the front to measure on twice as many texts, the least certain first; few against the new ones."""
        finer = sum(one.segments > self._segments for one in told)
        if self._max_segments <= self._segments or finer >= REFINED_SHARE * (len(told) - self._start_trials + 1):
            return []
        open_ones = [
            one for one in self._front_of(told) if one.segments < self._max_segments and one.lossy not in pending
        ]
        open_ones.sort(key=lambda one: one.loss_se / (max(one.loss, 0.0) + self._loss_floor), reverse=True)
        return [
            Proposal(lossy=one.lossy, segments=min(2 * one.segments, self._max_segments), source="refine")
            for one in open_ones
        ]

    def _pool(self, taken: set[Configuration], told: Sequence[Observation]) -> tuple[list[Configuration], Array]:
        if self._all is not None and self._features_of_all is not None:
            free = [index for index, part in enumerate(self._all) if part not in taken]
            return [self._all[index] for index in free], self._features_of_all[free]
        drawn = (self._encoding.draw(row) for row in self._random.random((_SAMPLED, len(self._encoding.parameters))))
        near = (other for one in self._front_of(told) for other in self._encoding.neighbours(one.lossy))
        parts = [part for part in dict.fromkeys((*near, *(p for p in drawn if p is not None))) if part not in taken]
        return parts, self._encoding.encode(parts)

    def _front_of(self, told: Sequence[Observation]) -> list[Observation]:
        owner = [index for index, one in enumerate(told) for _ in one.costs]
        keep = non_dominated(self._points_of(told))
        return [told[index] for index in dict.fromkeys(np.array(owner)[keep].tolist())]

    def _points_of(self, told: Sequence[Observation]) -> Array:
        """(log10 loss, bytes ratio, log10 seconds), one row for each coder of each observation."""
        return log_objectives(
            [(max(one.loss, 0.0), cost.seconds_per_unit, cost.size_ratio) for one in told for cost in one.costs],
            loss_floor=self._loss_floor,
        )

    def _fit(self, told: Sequence[Observation]) -> None:
        features = self._encoding.encode([one.lossy for one in told])
        losses = np.log10(np.maximum([one.loss for one in told], 0.0) + self._loss_floor)
        self._loss_model.fit(features, losses[:, None], 1.0 / np.maximum([one.segments for one in told], 1))
        rows: dict[str, list[int]] = defaultdict(list)
        values: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row, one in enumerate(told):
            for cost in one.costs:
                if cost.size_ratio > 0 and cost.seconds_per_unit > 0:
                    rows[cost.variant].append(row)
                    values[cost.variant].append((math.log10(cost.size_ratio), math.log10(cost.seconds_per_unit)))
        if not values:
            raise ValueError("no coder was measured")
        everything = np.array([pair for pairs in values.values() for pair in pairs])
        # A coder that nobody has tried may be the best of all.
        self._untried_cost = everything.min(axis=0)
        self._known_costs = {code: np.array(pairs) for code, pairs in values.items()}
        for code, pairs in self._known_costs.items():
            if len(pairs) > 1:
                self._cost_models[code].fit(features[rows[code]], pairs)

    def _predicted_points(self, parts: Sequence[Configuration], features: Array) -> Points:
        coders = [self._encoding.coders.of(part) for part in parts]
        owners, costs = [], []
        for code in sorted(frozenset[str]().union(*coders)):
            mine = np.array([index for index, codes in enumerate(coders) if code in codes], np.int64)
            mean = self._predicted_cost(code, features[mine])
            owners.append(mine)
            costs.append(np.column_stack((10 ** mean[:, 0], mean[:, 1])))
        return Points(np.concatenate(owners), np.concatenate(costs))

    def _predicted_cost(self, code: str, features: Array) -> Array:
        """log10 of bytes ratio and seconds a byte, `[n, 2]`."""
        known = self._known_costs.get(code)
        if known is None or len(known) < 2:
            return np.tile(self._untried_cost if known is None else known[0], (len(features), 1))
        return self._cost_models[code].predict_mean(features)

    def _believed(self, part: Configuration) -> Array:
        """What a part that is under way will probably give, as `_points_of`."""
        features = self._encoding.encode([part])
        loss = self._loss_model.predict_mean(features)[0, 0]
        points = self._predicted_points([part], features)
        return np.column_stack((np.full(len(points.costs), loss), points.costs))

    @staticmethod
    def _screen(
        front: Array, costs: Array, mean: Array, deviation: Array, part: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of the most promising points."""
        gains = expected_improvement(front, costs, mean[part], deviation[part], slices=_SCREENING_SLICES)
        return np.argsort(-gains, kind="stable")[:_SCREENED]


def _ranges(measured: Array, loss: Prediction, costs: Array, loss_floor: float) -> tuple[Array, Array]:
    """Best and worst of each axis, over what was measured and what may well be."""
    # A loss below the best expected one must count as a gain too.
    best_loss = float((loss.mean - 2 * loss.deviation).min())
    both = np.vstack((measured, [[best_loss, *costs.min(axis=0)], [float(loss.mean.max()), *costs.max(axis=0)]]))
    low = both.min(axis=0)
    # No loss lies below the floor, whatever a model says.
    low[0] = max(low[0], math.log10(loss_floor))
    return low, both.max(axis=0)
