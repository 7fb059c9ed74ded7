"""KVServe's published offline search, written from a description of it, and its own grid of 144 points.

Theirs (arXiv 2605.13734 and its artefact) is a search with one objective: the most compression whose accuracy is
within a tolerance. The compression of every point is known before the search; a Gaussian process (Matern 3/2 and
white noise, on raw numbers and one-hot categories scaled to [0, 1]) models accuracy alone; the next point has the
largest

    compression * P(accuracy >= threshold) + w_i * sigma / max sigma * mean compression,

with w_i = max(0.1, 0.99^i), halved after the first fifth of the iterations. Points that monotony of accuracy in
compression rules out, within the same axes, are pruned, and the search stops early when little is left and it keeps
failing.

For three objectives this search needs one threshold after the other: five, evenly spaced over the quality of the
start points, take turns; each has its own pruning and stop, and what one measures counts for all. Quality is there
-log10(loss + 1e-6), which is kinder to it than a percentage that cannot tell small losses apart, and "far from
feasible" is the distance of two thresholds. When all thresholds have stopped, pruning is lifted and the search goes
on.
"""

from __future__ import annotations

import csv
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from profiling_rivals import Mask, Pool, PoolSearcher
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controld.candidates.pareto import LOSS_FLOOR_NATS, hypervolume, log_objectives, non_dominated
from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.space import Parameter, StrategySpace
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.search.searcher import Searcher

Array = NDArray[np.float64]

PAPER_ITERATIONS = 200
THRESHOLDS_IN_TURN = 5
CLOSE_RATIO = 0.2
"""How far two compression ratios may be apart and count as the same: their epsilon."""

CLOSE_LEVELS = 8
GRID_FILE = "search_space_qwen7b_cr.csv"
GRID_TOLERANCE_PERCENT = 3.0
VOLUME_SHARE = 0.99


@dataclass(slots=True, kw_only=True)
class Target:
    """One threshold with what was pruned for it.

    Args:
        quality: what feasible points reach.
        far: how much below it a point is when nothing coarser needs a look.
        pruned: points that are not looked at for this threshold.
        failures: infeasible points in a row, counted in the second half.
        stopped: whether the early stop was met.
    """

    quality: float
    far: float
    pruned: Mask
    failures: int = 0
    stopped: bool = False


class KVServeSearcher(PoolSearcher):
    """KVServe's acquisition, pruning and early stop.

    Args:
        compression: raw over wire bytes of every part, known beforehand, `[parts]`.
        seed: of the restarts of the process's fit.
        threshold: accuracy in percent; None for thresholds in turn.
        iterations: their budget, to which the schedule refers.
    """

    def __init__(
        self,
        pool: Pool,
        compression: Array,
        *,
        seed: int,
        threshold: float | None = None,
        iterations: int = PAPER_ITERATIONS,
    ) -> None:
        super().__init__(pool)
        self.compression = compression
        self._seed = seed
        self._threshold = threshold
        self._iterations = iterations
        self._features = _their_features(pool)
        self._groups = _axis_groups(pool)
        self._spread = _levels_spread(pool)
        self._quality = np.full(len(pool), np.nan)
        self._iteration = 0
        self._targets: list[Target] = []
        self._posterior: tuple[Array, Array] | None = None

    @property
    def stopped(self) -> bool:
        """Whether every threshold met the early stop or ran out of points."""
        return bool(self._targets) and all(target.stopped for target in self._targets)

    def cold_start(self, count: int) -> list[int]:
        """Their start points: evenly spaced from the most to the least compression."""
        order = np.argsort(-self.compression, kind="stable")
        return [int(order[place]) for place in np.linspace(0, len(order) - 1, count).round().astype(int)]

    def choose(self, free: Mask) -> int:
        """The largest acquisition, for the next threshold that has points left."""
        self._targets = self._targets or self._make_targets()
        self._iteration += 1
        running = [target for target in self._targets if not target.stopped]
        for _ in range(len(running)):
            target = running[self._iteration % len(running)]
            candidates = free & ~target.pruned
            if candidates.any():
                return self._best(target.quality, candidates)
            target.stopped = True
            running.remove(target)
            if not running:
                break
        return self._best(self._targets[self._iteration % len(self._targets)].quality, free)

    def learn(self, number: int, observation: Observation) -> None:
        """Keep the quality, and prune for every threshold."""
        loss = observation.loss
        if math.isnan(loss):
            return
        quality = 100 * math.exp(-loss) if self._threshold is not None else -math.log10(loss + LOSS_FLOOR_NATS)
        self._quality[number] = quality
        self._posterior = None
        for target in self._targets:
            self._prune(target, number, quality)
            self._stop_early(target, feasible=quality >= target.quality)

    def _make_targets(self) -> list[Target]:
        def target(quality: float, far: float) -> Target:
            return Target(quality=quality, far=far, pruned=np.zeros(len(self.pool), dtype=np.bool_))

        if self._threshold is not None:
            return [target(self._threshold, 100 - self._threshold)]
        known = self._quality[~np.isnan(self._quality)]
        levels = np.linspace(known.min(), known.max(), THRESHOLDS_IN_TURN + 2) if known.size else np.zeros(3)
        return [target(float(level), float(levels[1] - levels[0])) for level in levels[1:-1]]

    # SciPy and scikit-learn take seconds to import, and only this searcher needs them: it imports what it calls.

    def _best(self, threshold: float, candidates: Mask) -> int:
        from scipy.stats import norm

        mean, deviation = self._posterior = self._posterior or self._fit()
        weight = max(0.1, 0.99**self._iteration)
        if self._iteration >= self._iterations / 5:
            weight /= 2
        feasible = norm.cdf((mean - threshold) / np.maximum(deviation, 1e-9))
        unknown = deviation / max(float(deviation.max()), 1e-9)
        value = self.compression * feasible + weight * unknown * float(self.compression.mean())
        return int(np.argmax(np.where(candidates, value, -1.0)))

    def _fit(self) -> tuple[Array, Array]:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        known = ~np.isnan(self._quality)
        if not known.any():
            return np.zeros(len(self.pool)), np.ones(len(self.pool))
        process = GaussianProcessRegressor(
            kernel=Matern(length_scale=1.0, nu=1.5) + WhiteKernel(1e-4),
            n_restarts_optimizer=5,
            normalize_y=True,
            random_state=self._seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(self._features[known], self._quality[known])
        mean, deviation = process.predict(self._features, return_std=True)
        return mean, deviation

    def _prune(self, target: Target, number: int, quality: float) -> None:
        group = self._groups == self._groups[number]
        ratio = self.compression[number]
        if quality >= target.quality:
            if self._iteration > self._iterations / 5:
                target.pruned |= group & (self.compression <= ratio - CLOSE_RATIO / 2)
            return
        late = self._iteration > self._iterations / 2
        far = quality <= target.quality - target.far and self._iteration >= self._iterations / 5
        if far and (late or self._spread[number] < CLOSE_LEVELS):
            target.pruned |= group & (self.compression >= ratio + 2 * CLOSE_RATIO)

    def _stop_early(self, target: Target, *, feasible: bool) -> None:
        if feasible:
            target.failures = 0
        elif self._iteration > self._iterations / 2:
            target.failures += 1
        left = self.compression[~target.pruned & ~self.measured]
        if left.size and np.ptp(left) > 2.5 * CLOSE_RATIO:
            target.failures = 0
        elif target.failures > self._iterations / 10:
            target.stopped = True


def _their_features(pool: Pool) -> Array:
    """Raw numbers and one-hot categories, scaled to [0, 1] over the pool; what does not exist is 0 everywhere."""
    from sklearn.preprocessing import MinMaxScaler

    columns: list[Array] = []
    for parameter in pool.encoding.parameters:
        values = [pool.space.value_of(parameter.name, part) for part in pool.parts]
        if parameter.ordered and all(isinstance(value, int | float) for value in parameter.values):
            floor = min(value for value in parameter.values if isinstance(value, int | float))
            columns.append(np.array([floor if value is None else value for value in values], dtype=np.float64))
        else:
            columns += [np.array([value == one for value in values], dtype=np.float64) for one in parameter.values]
    scaled: Array = MinMaxScaler().fit_transform(np.column_stack(columns))
    return scaled


def _axis_groups(pool: Pool) -> NDArray[np.int64]:
    """Parts with the same axes have the same number."""
    axes = [parameter.name for parameter in pool.encoding.parameters if parameter.name.endswith("_axis")]
    groups: dict[tuple[object, ...], int] = {}
    return np.array([groups.setdefault(tuple(part.get(axis) for axis in axes), len(groups)) for part in pool.parts])


def _levels_spread(pool: Pool) -> Array:
    """The most minus the fewest levels of each part; 0 where it has none."""
    names = [parameter.name for parameter in pool.encoding.parameters if parameter.name.endswith("_levels")]
    levels = [[float(part[name]) for name in names if name in part] for part in pool.parts]
    return np.array([max(found) - min(found) if found else 0.0 for found in levels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """KVServe's own points with the accuracy that its smoke mode makes up for them.

    Args:
        compression: raw over wire bytes, measured by its authors.
        accuracy: percent.
    """

    space: StrategySpace
    parts: tuple[Configuration, ...]
    compression: Array
    accuracy: Array

    @property
    def optimum(self) -> int:
        """The most compression within the tolerance."""
        feasible = self.accuracy >= 100 - GRID_TOLERANCE_PERCENT
        return int(np.argmax(np.where(feasible, self.compression, -1.0)))

    @property
    def front(self) -> list[int]:
        """Points that no other beats in both."""
        return [int(n) for n in np.flatnonzero(non_dominated(np.column_stack((-self.compression, -self.accuracy))))]

    def share(self, numbers: Sequence[int]) -> float:
        """Hypervolume of some points over that of all."""
        loss = -np.log(self.accuracy / 100)
        axes = log_objectives(np.column_stack((loss, np.full(len(loss), 1e-9), 1 / self.compression)))
        ends = {"ideal": axes.min(axis=0), "nadir": axes.max(axis=0)}
        return hypervolume(axes[list(numbers)], **ends) / hypervolume(axes, **ends)

    def observation(self, number: int) -> Observation:
        """The measurement of a point; the loss is the accuracy as a negative logarithm, time is the same for all."""
        cost = VariantCost(variant="ans", size_ratio=1 / float(self.compression[number]), seconds_per_unit=1e-9)
        loss = -math.log(float(self.accuracy[number]) / 100)
        return Observation(lossy=self.parts[number], loss=loss, loss_se=0.0, segments=2, costs=(cost,))


_GRID_COLUMNS = {
    "low_head_share": "heads_selection",
    "high_key_levels": "high_key_max_value",
    "high_value_levels": "high_value_max_value",
    "low_key_levels": "low_key_max_value",
    "low_value_levels": "low_value_max_value",
}


def load_grid(folder: Path) -> Grid:
    """Read the published table.

    Raises:
        SystemExit: it is not there.
    """
    path = folder / GRID_FILE
    if not path.is_file():
        raise SystemExit(f"{path} is not here: --kvserve names the folder of KVServe's published tables")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = {
        name: [float(row[column]) if "." in row[column] else int(row[column]) for row in rows]
        for name, column in _GRID_COLUMNS.items()
    }
    parameters = [Parameter(name=n, values=tuple(sorted(set(found))), ordered=True) for n, found in values.items()]
    parameters.append(Parameter(name=CODER_PARAMETER, values=("ans",), lossy=False))
    compression = np.array([float(row["cr"]) for row in rows])
    share, low_key, low_value = (
        np.array(values[name]) for name in ("low_head_share", "low_key_levels", "low_value_levels")
    )
    accuracy = np.clip(101.2 - 0.45 * compression - 0.25 * share + 0.04 * (low_key + low_value), 0.0, 100.0)
    parts = tuple(Configuration({name: found[row] for name, found in values.items()}) for row in range(len(rows)))
    return Grid(space=StrategySpace(parameters=tuple(parameters)), parts=parts, compression=compression,
                accuracy=accuracy)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """How one search went over the grid.

    Args:
        to_optimum, to_front: trials until the optimum, and the whole front, were measured; infinite where never.
        to_volume: trials until 99 % of the grid's hypervolume were reached.
        stopped: trials after which it stopped by itself; None where it does not.
        best_at_stop: the most compression within the tolerance by then.
    """

    to_optimum: float
    to_front: float
    to_volume: float
    stopped: int | None
    best_at_stop: float


def search_grid(grid: Grid, searcher: Searcher, start: Sequence[int]) -> GridRun:
    """Until every point is measured, or the search proposes none."""
    pool = Pool(grid.space, grid.parts)
    order: list[int] = []
    stopped, to_volume = None, math.inf

    def measure(number: int) -> None:
        nonlocal to_volume
        order.append(number)
        searcher.tell(grid.observation(number))
        if math.isinf(to_volume) and grid.share(order) >= VOLUME_SHARE:
            to_volume = len(order)

    for number in start:
        measure(number)
    while not set(grid.front) <= set(order) and (proposals := searcher.ask(1)):
        measure(pool.place(proposals[0].lossy))
        if stopped is None and isinstance(searcher, KVServeSearcher) and searcher.stopped:
            stopped = len(order)
    place = {number: trial for trial, number in enumerate(order, start=1)}
    feasible = [n for n in order[:stopped] if grid.accuracy[n] >= 100 - GRID_TOLERANCE_PERCENT]
    return GridRun(
        to_optimum=place.get(grid.optimum, math.inf),
        to_front=max(place.get(number, math.inf) for number in grid.front),
        to_volume=to_volume,
        stopped=stopped,
        best_at_stop=max((float(grid.compression[number]) for number in feasible), default=math.nan),
    )


def compare(folder: Path, *, seeds: int, console: Console) -> None:
    """Our engine and theirs, in the two settings of its artefact, on their grid."""
    grid = load_grid(folder)
    pool = Pool(grid.space, grid.parts)
    runs: dict[str, list[GridRun]] = {}

    def theirs(seed: int, cold: int, iterations: int) -> GridRun:
        searcher = KVServeSearcher(
            pool, grid.compression, seed=seed, threshold=100 - GRID_TOLERANCE_PERCENT, iterations=iterations
        )
        return search_grid(grid, searcher, searcher.cold_start(cold))

    for seed in track(range(seeds), "searching", console=Console(stderr=True)):
        for name, cold, iterations in (("kvserve, small", 2, 50), ("kvserve, paper", 8, 200)):
            runs.setdefault(name, []).append(theirs(seed, cold, iterations))
        try:
            from controld.profiling.worker.bayesian import BayesianSearcher
        except ImportError as error:
            console.print(f"controld is left out: {error}")
            continue
        searcher = BayesianSearcher(grid.space, seed=seed, start_trials=8)
        runs.setdefault("controld", []).append(search_grid(grid, searcher, pool.start_design(8, seed)))
    table = Table(
        "engine", "trials to the optimum", f"to {VOLUME_SHARE:.0%} of the volume",
        f"to the whole front ({len(grid.front)})", "stopped", "best when stopped",
        title=f"KVServe's {len(grid.parts)} points, smoke accuracy; medians, least and most over {seeds} seeds",
    )  # fmt: skip
    for name, found in runs.items():
        stops = [run.stopped for run in found if run.stopped is not None]
        table.add_row(
            name,
            _spread([run.to_optimum for run in found]),
            _spread([run.to_volume for run in found]),
            _spread([run.to_front for run in found]),
            _spread(stops) if stops else "-",
            f"{statistics.median(run.best_at_stop for run in found):.3f}",
        )
    console.print(table)
    console.print(f"optimum: compression {grid.compression[grid.optimum]:.3f} at {grid.accuracy[grid.optimum]:.2f} %")


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"


def known_compression(costs: Sequence[Sequence[VariantCost]]) -> Array:
    """The best ratio of raw to wire bytes that any coder gives, by part; 1 where a part has none."""
    return np.array([1 / max(min((cost.size_ratio for cost in found), default=1.0), 1e-9) for found in costs])
