"""How many trials each search engine needs to find the Pareto set of a space, replayed on a ground-truth table.

    python benchmarks/profiling.py [--seeds 10] [--trials 300] [--engine controld --engine tpe] [--jobs 2] [--save]
    python benchmarks/profiling.py --quick
    python benchmarks/profiling.py --kvserve FOLDER
    python benchmarks/profiling.py --ground-truth [OPTIONS]     measure the table; see benchmarks/profiling_truth.py

The table (`--ground-truth`) holds every lossy part of a space, measured once. A trial looks one
lossy part up and brings the points of all its coders. After each trial the hypervolume of what is known
(`controld/candidates/pareto.py`, ideal and nadir of the whole table) is divided by that of the whole table. All
engines start from the same 20 quasi-random parts for each seed, and all are told the same: the loss, its standard
error, and bytes and time of every coder. KVServe's search also knows the bytes of every part beforehand, as its
authors have it; see `profiling_kvserve.py` and `profiling_rivals.py` for how single rivals fit in.

Finished runs are kept in `build/benchmarks/profiling_runs.jsonl` and not made again (`--again` makes them again);
`--save` puts all of them into `benchmarks/data/profiling_curves.json`. `--quick` shows those curves and runs our
engine for ten steps. Seconds of a search are processor seconds of one thread, asking and telling together, without
set-up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import profiling_truth
from profiling_report import OURS, START_TRIALS, Run, last_line, plot, run_from_json, run_to_json, show
from profiling_rivals import OptunaSearcher, Pool, RandomSearcher
from profiling_space import bench_space, model_space
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from threadpoolctl import threadpool_limits

from controld.candidates.pareto import hypervolume, log_objectives, non_dominated
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.search.searcher import Searcher

DATA = Path(__file__).parent / "data"
TABLE = DATA / "profiling_truth.csv.gz"
SPACE = DATA / "profiling_space.json"
CURVES = DATA / "profiling_curves.json"
RUNS = Path("build/benchmarks/profiling_runs.jsonl")
QUICK_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """Every lossy part of a space, measured.

    Args:
        loss_nats, loss_se_nats: `[parts]`; NaN and 0 where a part is infeasible.
        costs: of all coders of each part; none where it is infeasible.
        seconds_per_part: what one measurement took; NaN where that is not known.
        fingerprint: of the table, so that runs on different tables are never mixed.
    """

    space: StrategySpace
    parts: tuple[Configuration, ...]
    loss_nats: np.ndarray
    loss_se_nats: np.ndarray
    costs: tuple[tuple[VariantCost, ...], ...]
    seconds_per_part: float
    fingerprint: str

    def observation(self, number: int) -> Observation:
        """What a trial of a part tells."""
        return Observation(
            lossy=self.parts[number],
            loss=float(self.loss_nats[number]),
            loss_se=float(self.loss_se_nats[number]),
            segments=2,
            costs=self.costs[number],
        )


class Yardstick:
    """The hypervolume of a whole table, and the points of each part on its axes."""

    def __init__(self, truth: GroundTruth) -> None:
        counts = [len(found) for found in truth.costs]
        objectives = [
            (loss, cost.seconds_per_unit, cost.size_ratio)
            for loss, found in zip(truth.loss_nats, truth.costs, strict=True)
            for cost in found
        ]
        self._axes = log_objectives(objectives)
        self._ends = np.cumsum([0, *counts])
        self._ideal, self._nadir = np.nanmin(self._axes, axis=0), np.nanmax(self._axes, axis=0)
        self.front = int(non_dominated(self._axes).sum())
        self.whole = hypervolume(self._axes, ideal=self._ideal, nadir=self._nadir)

    def points(self, number: int) -> np.ndarray:
        """Of one part, `[coders, 3]`."""
        return self._axes[self._ends[number] : self._ends[number + 1]]

    def share(self, axes: np.ndarray) -> float:
        """Hypervolume of points over that of the table."""
        return hypervolume(axes, ideal=self._ideal, nadir=self._nadir) / self.whole


class Incumbents:
    """The non-dominated points of the parts measured so far; the hypervolume is computed only when they change."""

    def __init__(self, yardstick: Yardstick) -> None:
        self._yardstick = yardstick
        self._front = np.empty((0, 3))
        self.share = 0.0

    def add(self, number: int) -> float:
        """Take a part, and return the new share."""
        points = self._yardstick.points(number)
        beaten = (self._front[None] <= points[:, None]).all(axis=2).any(axis=1)
        if not beaten.all():
            together = np.concatenate((self._front, points[~beaten]))
            self._front = together[non_dominated(together)]
            self.share = self._yardstick.share(self._front)
        return self.share


@dataclass(frozen=True, slots=True)
class Problem:
    """A table with what is computed of it once."""

    truth: GroundTruth
    pool: Pool
    yardstick: Yardstick

    @classmethod
    def of(cls, truth: GroundTruth) -> Problem:
        """With its pool and yardstick."""
        return cls(truth, Pool(truth.space, truth.parts), Yardstick(truth))


def _ours(problem: Problem, seed: int) -> Searcher:
    from controld.profiling.worker.bayesian import BayesianSearcher

    return BayesianSearcher(problem.truth.space, seed=seed, segments=2)


def _kvserve(problem: Problem, seed: int) -> Searcher:
    from profiling_kvserve import KVServeSearcher, known_compression

    return KVServeSearcher(problem.pool, known_compression(problem.truth.costs), seed=seed)


ENGINES: dict[str, Callable[[Problem, int], Searcher]] = {
    OURS: _ours,
    "random": lambda problem, seed: RandomSearcher(problem.pool, seed=seed),
    "tpe": lambda problem, seed: OptunaSearcher(problem.pool, seed=seed, sampler="tpe"),
    "nsga2": lambda problem, seed: OptunaSearcher(problem.pool, seed=seed, sampler="nsga2"),
    "kvserve": _kvserve,
}


def replay(
    problem: Problem, engine: str, seed: int, *, trials: int, measured: Callable[[float], None] = lambda share: None
) -> Run:
    """Run an engine on a table.

    Args:
        trials: in all, start trials included.
        measured: is called with the share after every trial.

    Raises:
        FieldError: the engine proposed what is not in the table.
    """
    searcher = ENGINES[engine](problem, seed)
    incumbents = Incumbents(problem.yardstick)
    shares: list[float] = []
    search_s = 0.0

    def measure(number: int) -> float:
        start_s = time.process_time()
        searcher.tell(problem.truth.observation(number))
        told_s = time.process_time() - start_s
        shares.append(incumbents.add(number))
        measured(shares[-1])
        return told_s

    with threadpool_limits(1):
        for number in problem.pool.start_design(min(START_TRIALS, trials), seed):
            measure(number)
        while len(shares) < trials:
            start_s = time.process_time()
            proposals = searcher.ask(1)
            search_s += time.process_time() - start_s
            if not proposals:
                break
            search_s += measure(problem.pool.place(proposals[0].lossy))
    return Run(engine=engine, seed=seed, shares=tuple(shares), search_s=search_s)


class RunFile:
    """Finished runs, one a line, each with the table and the trials that it was made with.

    A torn last line, of a benchmark that was killed, is left out.
    """

    def __init__(self, path: Path, fingerprint: str, trials: int) -> None:
        self._path = path
        self._key = {"table": fingerprint, "trials": trials}

    def read(self) -> dict[tuple[str, int], Run]:
        """The newest run of each engine and seed on this table with so many trials."""
        if not self._path.is_file():
            return {}
        found = {}
        for line in self._path.read_text().splitlines():
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if all(data[name] == value for name, value in self._key.items()):
                found[data["engine"], data["seed"]] = run_from_json(data)
        return found

    def append(self, run: Run) -> None:
        """Keep a run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.is_file() and self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps({**self._key, **run_to_json(run)}) + "\n")


def load_ground_truth(path: Path, space_path: Path) -> GroundTruth:
    """A table with its space: a file beside it, else the one that this machine's model and artefacts give.

    Raises:
        ControldError: the table is missing or malformed, or holds a part that is none of the space's.
        SystemExit: the space is not the one that the table was made for.
    """
    found = profiling_truth.load_truth(path)
    if space_path.is_file():
        space = StrategySpace.from_json(space_path.read_text().strip())
    else:
        space = bench_space(model_space())
    if hashlib.sha256(space.to_json().encode()).hexdigest() != found.header["space_sha256"]:
        raise SystemExit(f"{path} is the table of another space than {space_path}, or than this machine's")
    rows = {part: row for row, part in enumerate(found.parts)}
    parts = tuple(space.enumerate(lossy_only=True))
    if stray := rows.keys() - set(parts):
        raise FieldError("table.lossy", f"{next(iter(stray)).canonical_json} is none of the space's parts")
    order = [rows.get(part) for part in parts]
    return GroundTruth(
        space=space,
        parts=parts,
        loss_nats=np.array([np.nan if row is None else found.loss_nats[row] for row in order]),
        loss_se_nats=np.array([0.0 if row is None else found.loss_se_nats[row] for row in order]),
        costs=tuple(() if row is None else found.costs[row] for row in order),
        seconds_per_part=float(found.header.get("seconds_per_part", np.nan)),
        fingerprint=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a problem is read from, by this process or another."""

    table: Path
    space: Path


@cache
def _problem(source: Source) -> Problem:
    return Problem.of(load_ground_truth(source.table, source.space))


def _replay_elsewhere(source: Source, engine: str, seed: int, trials: int) -> Run:
    return replay(_problem(source), engine, seed, trials=trials)


def run_all(
    source: Source, wanted: Sequence[tuple[str, int]], *, trials: int, jobs: int, console: Console
) -> Iterator[Run]:
    """Each wanted engine and seed, in processes of their own where `jobs` is above 1."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        if jobs == 1:
            bar = progress.add_task("trials", total=trials * len(wanted))
            for engine, seed in wanted:
                progress.update(bar, description=f"{engine}, seed {seed}")
                yield replay(_problem(source), engine, seed, trials=trials, measured=lambda _: progress.advance(bar))
            return
        bar = progress.add_task("runs", total=len(wanted))
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as executor:
            futures = [executor.submit(_replay_elsewhere, source, *pair, trials) for pair in wanted]
            for future in as_completed(futures):
                progress.advance(bar)
                yield future.result()


def save_curves(runs: Sequence[Run], truth: GroundTruth, path: Path) -> None:
    """All runs with how they were made."""
    packages = {name: version(name) for name in ("numpy", "torch", "botorch", "optuna", "scikit-learn")}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(), **packages}
    document = {
        "table": truth.fingerprint,
        "parts": len(truth.parts),
        "seconds_per_part": truth.seconds_per_part if np.isfinite(truth.seconds_per_part) else None,
        "start_trials": START_TRIALS,
        "machine": machine,
    }
    ordered = sorted(runs, key=lambda run: (run.engine != OURS, run.engine, run.seed))
    lines = ",\n".join(json.dumps(run_to_json(run), separators=(",", ":")) for run in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(document, indent=1)[:-2]},\n "runs": [\n{lines}\n]}}\n')


def load_curves(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """What `save_curves` wrote: its head and its runs.

    Raises:
        SystemExit: it is not there.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is not here: run python benchmarks/profiling.py --save")
    document = json.loads(path.read_text())
    return document, [run_from_json(data) for data in document.pop("runs")]


def quick(source: Source, curves_path: Path, console: Console) -> None:
    """The saved curves, and ten steps of our engine."""
    document, runs = load_curves(curves_path)
    seconds = document["seconds_per_part"]
    show(runs, parts=document["parts"], seconds_per_part=np.nan if seconds is None else seconds, console=console)
    problem = _problem(source)
    if problem.truth.fingerprint != document["table"]:
        raise SystemExit(f"{curves_path} was made with another table than {source.table}: run with --save")
    try:
        start_s = time.monotonic()
        run = replay(problem, OURS, 0, trials=START_TRIALS + QUICK_STEPS)
    except ImportError as error:
        console.print(f"{OURS} is left out of the live run: {error}")
    else:
        first, last = run.shares[START_TRIALS - 1], run.shares[-1]
        console.print(
            f"live, seed 0: {first:.2%} after {START_TRIALS} start trials, {last:.2%} after {QUICK_STEPS} more; "
            f"{run.step_s:.2f} s a step, {time.monotonic() - start_s:.1f} s with set-up"
        )
    print(last_line(runs, len(problem.truth.parts)))


def compare_engines(source: Source, options: argparse.Namespace, console: Console) -> None:
    """Make the runs that are missing, then show, save and plot all of them."""
    truth = _problem(source).truth
    if options.seconds_per_part is not None:
        truth = replace(truth, seconds_per_part=options.seconds_per_part)
    kept = RunFile(options.runs, truth.fingerprint, options.trials)
    pairs = [(engine, seed) for engine in options.engine or ENGINES for seed in range(options.seeds)]
    done = {} if options.again else kept.read()
    wanted = [pair for pair in pairs if pair not in done]
    errors = Console(stderr=True)
    for run in run_all(source, wanted, trials=options.trials, jobs=options.jobs, console=errors):
        kept.append(run)
    runs = list(kept.read().values())
    if options.save:
        # Before the plot, which may fail: these took hours.
        save_curves(runs, truth, options.curves)
        options.space.write_text(truth.space.to_json() + "\n")
        console.print(f"curves: {options.curves}")
    show(runs, parts=len(truth.parts), seconds_per_part=truth.seconds_per_part, console=console)
    plot(runs, parts=len(truth.parts), path=options.plot)
    console.print(f"plot: {options.plot}")
    print(last_line(runs, len(truth.parts)))


def read_options() -> argparse.Namespace:
    """Of the command line. Raises: SystemExit: wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=300, help="of each run, start trials included (default: 300)")
    parser.add_argument("--engine", action="append", choices=tuple(ENGINES), help="may be repeated (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--again", action="store_true", help="make runs again that are kept")
    parser.add_argument("--save", action="store_true", help=f"put all kept runs into {CURVES.name}")
    parser.add_argument("--quick", action="store_true", help="saved curves and ten live steps, under 50 seconds")
    published = Path(os.environ.get("CONTROLD_KVSERVE_DATA", "data/kvserve"))
    parser.add_argument(
        "--kvserve", type=Path, nargs="?", const=published, metavar="FOLDER",
        help="KVServe's own 144 points instead (default: $CONTROLD_KVSERVE_DATA)",
    )  # fmt: skip
    parser.add_argument(
        "--ground-truth", nargs=argparse.REMAINDER, metavar="OPTION",
        help="measure the table, or make it of what was measured; all that follows goes to profiling_truth.py",
    )  # fmt: skip
    parser.add_argument("--seconds-per-part", type=float, help="of measuring one (default: what the table says)")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--space", type=Path, default=SPACE, help="of the table (default: beside it)")
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--plot", type=Path, default=Path("build/benchmarks/profiling.png"))
    options = parser.parse_args()
    for name in ("seeds", "trials", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is below 1")
    return options


def main() -> None:
    """Command line."""
    options = read_options()
    if options.ground_truth is not None:
        sys.argv = ["profiling_truth.py", *options.ground_truth]
        profiling_truth.main()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.kvserve is not None:
        from profiling_kvserve import compare

        compare(options.kvserve, seeds=options.seeds, console=console)
        return
    source = Source(options.table, options.space)
    if options.quick:
        quick(source, options.curves, console)
    else:
        compare_engines(source, options, console)


if __name__ == "__main__":
    main()
