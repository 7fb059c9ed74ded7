"""A whole search study on the real model from nothing, with all its seconds, against measuring every lossy part.

    python benchmarks/profiling_study.py [--trials 183] [--seed 0]

It starts a daemon without any state and one profiling worker, and asks for a search of the benchmark's space
(`benchmarks/profiling_space.py`) at the fidelity of the ground truth: two prompts of 384 tokens, 64 tokens of
continuation. The daemon, the search process and the worker are those of a real study; each has a core's worth of
threads at most. Every measured part is then looked up in the ground truth (`benchmarks/profiling_truth.py`), and the
share of the whole hypervolume is that of the looked-up points, so a lucky measurement does not count.

Brute force is what the same worker would have needed for all parts: their number times the median seconds of this
run's trials. That is an extrapolation; beside it stands what measuring the table took, which goes through the model
several parts at a time and keeps everything warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling import SPACE, TABLE, Incumbents, Problem, load_ground_truth
from profiling_space import ARTEFACTS, MODEL, bench_space, model_space
from profiling_truth import CONTINUATION_TOKENS, PROMPT_TOKENS, SEGMENTS, machine_name
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controld.contract.configuration import Configuration
from dataplanes.sglang.demo.daemon import Daemon
from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import policy_text

OUT = Path("build/benchmarks/profiling_study.json")
SHARES = (0.95, 0.99)
_CONNECT_S = 120.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """A finished study.

    Args:
        study: as REST shows it.
        wall_s: from the request to the end of the study.
        search_cpu_s: processor seconds of the search process.
    """

    study: Mapping[str, Any]
    wall_s: float
    search_cpu_s: float

    @property
    def trials(self) -> list[Mapping[str, Any]]:
        """Those that were measured, in the order of their numbers."""
        return [trial for trial in self.study["trials"] if trial["state"] == "measured"]


@contextmanager
def _worker(folder: Path, daemon: Daemon) -> Iterator[None]:
    space_file = folder / "space.json"
    space_file.write_text(bench_space(model_space()).to_json())
    command = [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(MODEL), "--artefacts", str(ARTEFACTS)]
    command += ["--space", str(space_file), "--address", daemon.fleet_address, "--evaluation-threads", "1"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            deadline_s = time.monotonic() + _CONNECT_S
            while not daemon.get("/v1/dataplanes")["dataplanes"]:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the worker did not connect: {(folder / 'worker.log').read_text()[-2000:]}")
                time.sleep(_LOOK_S)
            yield
        finally:
            process.terminate()
            process.wait()


def run_study(trials: int, seed: int) -> StudyRun:
    """A study of a new daemon, to its end."""
    request = {
        "plane": "sglang", "workload": "general", "method": "search", "budget": trials, "seed": seed,
        "segments": SEGMENTS, "max_segments": SEGMENTS, "lengths": [PROMPT_TOKENS],
        "continuation_tokens": CONTINUATION_TOKENS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Daemon(folder / "daemon", {"demo.yaml": policy_text(DEMO, {})}) as daemon, _worker(folder, daemon):
            assert daemon.process is not None
            start_s = time.monotonic()
            study_id = daemon.request("POST", "/v1/studies", request)["id"]
            cpu_s = 0.0
            with _bar() as bar:
                shown = bar.add_task("trials", total=trials)
                while (study := daemon.get(f"/v1/studies/{study_id}"))["state"] == "running":
                    bar.update(shown, completed=study["trials_done"])
                    cpu_s = max(cpu_s, _search_cpu_s(daemon.process.pid))
                    time.sleep(_LOOK_S)
            return StudyRun(study=study, wall_s=time.monotonic() - start_s, search_cpu_s=cpu_s)


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _search_cpu_s(daemon_pid: int) -> float:
    """Of the search process among the daemon's children; 0 where it is not there yet."""
    import psutil

    for child in psutil.Process(daemon_pid).children():
        if "controld.profiling.worker" in " ".join(child.cmdline()):
            times = child.cpu_times()
            return float(times.user + times.system)
    return 0.0


def shares(problem: Problem, trials: Sequence[Mapping[str, Any]]) -> list[float]:
    """Share of the table's hypervolume after each trial, all points scored by the table."""
    incumbents = Incumbents(problem.yardstick)
    return [incumbents.add(problem.pool.place(Configuration(trial["lossy"]))) for trial in trials]


def report(run: StudyRun, problem: Problem) -> dict[str, Any]:
    """The figures of a run."""
    reached = shares(problem, run.trials)
    parts = len(problem.truth.parts)
    each_s = statistics.median(trial["seconds"] for trial in run.trials)
    seconds = run.study["seconds"]
    to_share = {
        f"trials_to_{share:.0%}": next((n for n, value in enumerate(reached, start=1) if value >= share), None)
        for share in SHARES
    }
    return {
        "machine": machine_name(),
        "parts": parts,
        "trials": len(run.trials),
        "states": run.study["trials_by_state"],
        "stop_reason": run.study["stop_reason"],
        "share_reached": reached[-1],
        **to_share,
        "wall_s": run.wall_s,
        "measuring_s": seconds["measuring"],
        "search_wall_s": seconds["search"],
        "search_cpu_s": run.search_cpu_s,
        "waiting_s": seconds["waiting"],
        "median_trial_s": each_s,
        "brute_force_extrapolated_s": each_s * parts,
        "brute_force_over_study": each_s * parts / run.wall_s,
        "hypervolume_by_trial": [round(value, 5) for value in run.study["hypervolume_by_trial"]],
        "shares": [round(share, 5) for share in reached],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=183, help="a fiftieth of the lossy parts (default: 183)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    problem = Problem.of(load_ground_truth(TABLE, SPACE))
    figures = report(run_study(options.trials, options.seed), problem)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console()
    for name, value in figures.items():
        if not isinstance(value, list):
            console.print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")
    needed = figures["trials_to_99%"]
    print(
        f"space={figures['parts']} trials_to_99={needed or 'more'} wall_s={figures['wall_s']:.0f} "
        f"brute_force_over_study={figures['brute_force_over_study']:.0f}"
    )


if __name__ == "__main__":
    main()
