"""Does the search find better settings of a video engine than the grid, or than chance, with as many trials?

    python benchmarks/longlive_search.py [--trials 36] [--clips 6] [--chunks 8] [--checks 24] [--out FILE]

Three ways to choose what to measure on the real reference engine: the Bayesian search, quasi-random points, and the
curated grid (36 settings, in its order). Each gets the same number of trials on the same clips, by the same trial
runner as a profiling worker's, all decoded beside the next chunk on one rank. A front found by noisy losses flatters
itself, so that every setting on a front is measured again on clips that no trial saw (`--checks` of them), and the
hypervolume of those losses is what counts; it is taken in the box of a study's progress (0 to 1).

Times are wall-clock times of this machine. The last line has the search's hypervolume and its ratios to the two others.
About 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controld.candidates.pareto import non_dominated
from controld.contract.configuration import Configuration
from controld.contract.configuration_label import configuration_label
from controld.contract.trial import TrialTask
from controld.contract.variant import with_variant
from controld.profiling.grid import GridSize, coders_of, curated_grid
from controld.profiling.progress import VIDEO_BOX, FrontPoint
from controld.profiling.search.observation import Observation
from controld.profiling.study import Trial, TrialState
from controld.profiling.video_results import video_observation
from controld.profiling.worker.bayesian import BayesianSearcher
from dataplanes.longlive import settings
from dataplanes.longlive.profiler.identity import model_fingerprint
from dataplanes.longlive.profiler.trial import WORKLOAD, VideoTrialRunner
from dataplanes.longlive.reference.checkpoint import TRAINED_NAME
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.quality import QualityMeter
from dataplanes.longlive.reference.setting import FULL, SPACE

ROOT = Path(__file__).resolve().parent.parent
SEED = 11
FRESH = 1_000
"""The first clip that no trial saw."""

Ask = Callable[[Sequence[Observation]], Configuration | None]


class Site:
    """The engine, and what was measured of it before: one lossy part is measured once, whoever asks for it."""

    def __init__(self, checkpoint: str, clips: int, chunks: int) -> None:
        self.space = SPACE.restrict({settings.VAE: ("async",), settings.RANKS: (1,)})
        self._runner = VideoTrialRunner(self.space, ReferenceEngine, QualityMeter(checkpoint), checkpoint)
        self._clips = clips
        self._chunks = chunks
        self._known: dict[Configuration, Observation] = {}

    def measure(self, lossy: Configuration) -> Observation:
        """One trial."""
        if lossy not in self._known:
            self._known[lossy] = self._measured(lossy, 0, self._clips)
        return self._known[lossy]

    def check(self, lossy: Configuration, clips: int) -> float:
        """The loss on fresh clips."""
        return self._measured(lossy, FRESH, clips).loss

    def _measured(self, lossy: Configuration, first: int, clips: int) -> Observation:
        task = TrialTask(
            study_id="benchmark",
            trial_id="t",
            workload=WORKLOAD,
            lossy=lossy,
            coders=coders_of(self.space, lossy),
            clip_chunks=(self._chunks,),
            segments_per_length=clips,
            first_segment=first,
        )
        outcome = self._runner.run(task)
        found = video_observation(lossy, [Trial(task=task, state=TrialState.MEASURED, outcome=outcome)])
        if found is None:
            raise SystemExit(f"{configuration_label(lossy)}: {outcome.status} {outcome.detail}")
        return found


def points_of(observations: Sequence[Observation]) -> list[FrontPoint]:
    """One for each variant."""
    return [FrontPoint(one, cost) for one in observations for cost in one.costs]


def front_of(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Those that no other one dominates."""
    keep = non_dominated(VIDEO_BOX.axes(list(points)))
    return [point for point, kept in zip(points, keep, strict=True) if kept]


def by_model(site: Site, start_trials: int) -> Ask:
    """The search, which begins with `start_trials` quasi-random points."""
    searcher = BayesianSearcher(
        site.space, seed=SEED, segments=1, start_trials=start_trials, loss_floor=VIDEO_BOX.loss_floor
    )

    def ask(told: Sequence[Observation]) -> Configuration | None:
        searcher.restart(told)
        proposals = searcher.ask(1)
        return proposals[0].lossy if proposals else None

    return ask


def by_grid(site: Site) -> Ask:
    """The curated grid, in its order."""
    parts = [point.lossy for point in curated_grid(site.space, GridSize.FULL)]
    return lambda told: parts[len(told)] if len(told) < len(parts) else None


def run(name: str, ask: Ask, site: Site, trials: int, checks: int, console: Console) -> dict[str, Any]:
    """One way to choose: its curve, its front, and what is left of it on fresh clips."""
    told: list[Observation] = []
    curve: list[float] = []
    for _ in track(range(trials), name, console=console, transient=True):
        part = ask(told)
        if part is None:
            break
        told.append(site.measure(part))
        curve.append(VIDEO_BOX.share(front_of(points_of(told))))
    best = front_of(points_of(told))
    fresh = {point.observation.lossy: 0.0 for point in best}
    for part in track(list(fresh), f"{name}: fresh clips", console=console, transient=True):
        fresh[part] = site.check(part, checks)
    checked = [
        FrontPoint(
            Observation(
                lossy=point.observation.lossy,
                loss=fresh[point.observation.lossy],
                loss_se=0.0,
                segments=checks,
                costs=(point.cost,),
            ),
            point.cost,
        )
        for point in best
    ]
    return {
        "name": name,
        "trials": len(told),
        "hypervolume_by_trial": curve,
        "hypervolume_on_fresh_clips": VIDEO_BOX.share(front_of(checked)),
        "front": [
            {
                "label": configuration_label(with_variant(point.observation.lossy, point.cost.variant)),
                "loss": point.observation.loss,
                "loss_on_fresh_clips": fresh[point.observation.lossy],
                "memory_ratio": point.cost.size_ratio,
                "seconds_per_frame": point.cost.seconds_per_unit,
            }
            for point in best
        ],
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A line for each way."""
    table = Table("chosen by", box=None)
    for name in ("trials", "on the front", "hypervolume", "on fresh clips"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["trials"]),
            str(len(row["front"])),
            f"{row['hypervolume_by_trial'][-1]:.4f}",
            f"{row['hypervolume_on_fresh_clips']:.4f}",
        )
    console.print(table)


def last_line(rows: Sequence[dict[str, Any]]) -> str:
    """The search's hypervolume on fresh clips, and its ratio to each rival's."""
    share = {row["name"]: row["hypervolume_on_fresh_clips"] for row in rows}
    mine = share["search"]
    ratios = (f"over_{name}={mine / other:.3f}" for name, other in share.items() if name != "search")
    return f"search={mine:.4f} {' '.join(ratios)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=36)
    parser.add_argument("--clips", type=int, default=6, help="of a trial")
    parser.add_argument("--chunks", type=int, default=8, help="of a clip")
    parser.add_argument("--checks", type=int, default=24, help="fresh clips for each setting on a front")
    parser.add_argument("--checkpoint", default=TRAINED_NAME)
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks/longlive_search.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, begin_s = Console(width=None if sys.stdout.isatty() else 110), time.monotonic()
    site = Site(arguments.checkpoint, arguments.clips, arguments.chunks)
    ways = {
        "search": by_model(site, min(12, arguments.trials)),
        "chance": by_model(site, arguments.trials),
        "grid": by_grid(site),
    }
    rows = [run(name, ask, site, arguments.trials, arguments.checks, console) for name, ask in ways.items()]
    show(rows, console)
    report = {
        "arguments": {**vars(arguments), "out": str(arguments.out)},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "weights": model_fingerprint(arguments.checkpoint),
        "usual": dict(FULL),
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{time.monotonic() - begin_s:.0f} s; written to {arguments.out}", highlight=False)
    print(last_line(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
