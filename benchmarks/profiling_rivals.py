"""What `benchmarks/profiling.py` compares the engine with: uniform random, Optuna's TPE and NSGA-II.

Each proposes lossy parts of a pool and is told the measurement of a lossy part under all its coders. In Optuna a
trial is a full configuration, its coder included, so each measured lossy part is told as one trial for each coder,
with the axes of the hypervolume as objectives; only the lossy part costs a trial. Where Optuna asks for something
forbidden or already measured, the nearest unmeasured part of the pool (city-block distance of the features) is
measured and told instead, and what was asked for is told as failed.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import optuna
from numpy.typing import NDArray

from controld.candidates.pareto import log_objectives
from controld.contract.configuration import CODER_PARAMETER, Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import Parameter, StrategySpace
from controld.profiling.search.encoding import SpaceEncoding
from controld.profiling.search.observation import Observation, Proposal

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
OptunaParams = dict[str, Any]


class Pool:
    """The lossy parts that a search may propose.

    Args:
        space: what the parts are of.
        parts: each once.
    """

    def __init__(self, space: StrategySpace, parts: Sequence[Configuration]) -> None:
        self.space = space
        self.parts = tuple(parts)
        self.index = {part: number for number, part in enumerate(self.parts)}
        if len(self.index) != len(self.parts):
            raise FieldError("pool.parts", "a lossy part occurs twice")
        self.encoding = SpaceEncoding(space)
        self.features = self.encoding.encode(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def place(self, part: Configuration) -> int:
        """The number of a part.

        Raises:
            FieldError: it is none of the pool's.
        """
        if part not in self.index:
            raise FieldError("pool.part", f"{part.canonical_json} is not in the pool")
        return self.index[part]

    def nearest(self, part: Mapping[str, Value], free: Mask) -> int:
        """The number of the free part that is nearest to any combination of values, forbidden ones included."""
        numbers = np.flatnonzero(free)
        distances = np.abs(self.features[numbers] - self.encoding.encode([part])).sum(axis=1)
        return int(numbers[np.argmin(distances)])

    def start_design(self, count: int, seed: int) -> list[int]:
        """Numbers of `count` different parts, drawn by a scrambled Sobol sequence over the parameters.

        A parameter's values are equally likely where it exists, so every number format has its share however few its
        parts are.
        """
        from scipy.stats import qmc

        sobol = qmc.Sobol(len(self.encoding.parameters), scramble=True, rng=seed)
        found: dict[int, None] = {}
        for _ in range(64):
            for coordinates in sobol.random(64):
                part = self.encoding.draw(coordinates.tolist())
                if part is not None and part in self.index:
                    found[self.index[part]] = None
                if len(found) == min(count, len(self)):
                    return list(found)
        raise FieldError("pool", f"a Sobol sequence found {len(found)} different parts, not {count}")


class PoolSearcher(ABC):
    """A `Searcher` that picks one free part after the other; subclasses say which."""

    source = "model"

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.measured = np.zeros(len(pool), dtype=np.bool_)

    def ask(self, count: int, pending: Sequence[Configuration] = ()) -> list[Proposal]:
        """At most `count` unmeasured parts."""
        free = ~self.measured
        free[[self.pool.place(part) for part in pending]] = False
        proposals: list[Proposal] = []
        while len(proposals) < count and free.any():
            number = self.choose(free)
            free[number] = False
            proposals.append(Proposal(lossy=self.pool.parts[number], segments=2, source=self.source))
        return proposals

    def tell(self, observation: Observation) -> None:
        """Mark as measured, and learn."""
        number = self.pool.place(observation.lossy)
        if not self.measured[number]:
            self.measured[number] = True
            self.learn(number, observation)

    @abstractmethod
    def choose(self, free: Mask) -> int:
        """A free part's number."""

    def learn(self, number: int, observation: Observation) -> None:
        """What a measurement teaches: nothing, unless a subclass says otherwise."""
        del number, observation


class RandomSearcher(PoolSearcher):
    """Uniform over the unmeasured parts."""

    def __init__(self, pool: Pool, *, seed: int) -> None:
        super().__init__(pool)
        self._generator = np.random.default_rng(seed)

    def choose(self, free: Mask) -> int:
        """Any."""
        return int(self._generator.choice(np.flatnonzero(free)))


class OptunaSearcher(PoolSearcher):
    """A multi-objective sampler of Optuna over the space's conditional parameters.

    Args:
        sampler: "tpe" (multivariate, grouped by condition, constant liar) or "nsga2" (Optuna's own settings). NSGA-II
            breeds only parameters that every trial has, so all of a space's are genes of every trial; those that do not
            exist lie dormant.
    """

    def __init__(self, pool: Pool, *, seed: int, sampler: Literal["tpe", "nsga2"]) -> None:
        super().__init__(pool)
        optuna.logging.set_verbosity(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            chosen: optuna.samplers.BaseSampler = (
                optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
                if sampler == "tpe"
                else optuna.samplers.NSGAIISampler(seed=seed)
            )
        self._breeds = sampler == "nsga2"
        self._generator = np.random.default_rng(seed)
        self._genes: dict[str, Value] = {}
        self.study = optuna.create_study(directions=["minimize"] * 3, sampler=chosen)
        self._parameters = {parameter.name: parameter for parameter in pool.space.parameters}
        self._distributions = {name: _distribution(parameter) for name, parameter in self._parameters.items()}

    def choose(self, free: Mask) -> int:
        """What the sampler suggests, or the nearest free part to it."""
        trial = self.study.ask()
        values = self._suggest(trial)
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        written = {name: value for name, value in values.items() if not self._parameters[name].is_default(value)}
        part = Configuration(written).lossy_part
        number = self.pool.index.get(part)
        return number if number is not None and free[number] else self.pool.nearest(part, free)

    def learn(self, number: int, observation: Observation) -> None:
        """One trial for each coder."""
        points = [(observation.loss, cost.seconds_per_unit, cost.size_ratio) for cost in observation.costs]
        axes = log_objectives(points)
        for cost, point in zip(observation.costs, axes, strict=True):
            if np.isnan(point).any():
                continue
            params = self._params(observation.lossy, cost.variant)
            if self._breeds:
                self.study.enqueue_trial(params)
                trial = self.study.ask()
                # Sampling is lazy, and a trial joins a generation when it is sampled.
                _ = trial.relative_params
                self._suggest(trial)
                self.study.tell(trial, point.tolist())
            else:
                distributions = {name: self._distributions[name] for name in params}
                self.study.add_trial(
                    optuna.create_trial(params=params, distributions=distributions, values=point.tolist())
                )

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        """A value for every parameter that exists, and for those that do not where genes lie dormant."""
        values: dict[str, Value] = {}
        genes: dict[str, Value] = {}
        for name, parameter in self._parameters.items():
            active = self.pool.space.is_active(name, values)
            if not (active or self._breeds):
                continue
            if parameter.ordered:
                genes[name] = parameter.values[trial.suggest_int(name, 0, len(parameter.values) - 1)]
            else:
                genes[name] = trial.suggest_categorical(name, parameter.values)
            if active:
                values[name] = genes[name]
        self._genes = genes
        return values

    def _params(self, lossy: Configuration, code: str) -> OptunaParams:
        """A full configuration in Optuna's words: ranks for ordered parameters."""
        params: OptunaParams = {}
        for name, parameter in self._parameters.items():
            value = code if name == CODER_PARAMETER else self.pool.space.value_of(name, lossy)
            if value is None and self._breeds:
                value = self._genes.get(name, parameter.values[self._generator.integers(len(parameter.values))])
            if value is not None:
                params[name] = parameter.values.index(value) if parameter.ordered else value
        return params


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    if parameter.ordered:
        return optuna.distributions.IntDistribution(0, len(parameter.values) - 1)
    return optuna.distributions.CategoricalDistribution(parameter.values)
