"""Runs of search engines: what is counted of them, their table and their plot. See `profiling.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

OURS = "controld"
START_TRIALS = 20
SHARES = (0.95, 0.99)
AIM = 50
"""Trials to the last share are to be fewer than the lossy parts by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine from one start.

    Args:
        shares: hypervolume share after each trial, start trials included; shorter where the engine stopped by itself.
        search_s: processor seconds of asking and telling after the start.
    """

    engine: str
    seed: int
    shares: tuple[float, ...]
    search_s: float

    @property
    def step_s(self) -> float:
        """Seconds a trial."""
        return self.search_s / max(len(self.shares) - START_TRIALS, 1)


def trials_to(run: Run, share: float) -> float:
    """Trials until a share is reached; infinite where it never is."""
    return next((float(trial) for trial, reached in enumerate(run.shares, start=1) if reached >= share), np.inf)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, each one of the values."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="inverted_cdf")
    return float(low), float(middle), float(high)


def curves(runs: Sequence[Run], trials: int) -> np.ndarray:
    """Shares, `[runs, trials]`; an engine that stopped keeps what it has."""
    return np.array([[*run.shares, *[run.shares[-1]] * trials][:trials] for run in runs])


def by_engine(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Ours first, the others by name."""
    names = sorted({run.engine for run in runs}, key=lambda name: (name != OURS, name))
    return {name: [run for run in runs if run.engine == name] for name in names}


def last_line(runs: Sequence[Run], parts: int) -> str:
    """The sizes that the benchmark is about: medians over seeds."""
    medians = {
        name: quartiles([trials_to(run, SHARES[-1]) for run in found])[1] for name, found in by_engine(runs).items()
    }
    limit = max((len(run.shares) for run in runs), default=0)
    others = [median for name, median in medians.items() if name != OURS]
    ours = _trials(medians[OURS], limit) if OURS in medians else "unknown"
    best = _trials(min(others), limit) if others else "unknown"
    return f"space={parts} trials_to_99={ours} best_other={best}"


def _trials(value: float, limit: int) -> str:
    return f"{value:.0f}" if np.isfinite(value) else f">{limit}"


def show(runs: Sequence[Run], *, parts: int, seconds_per_part: float, console: Console) -> None:
    """One row an engine: medians with quartiles over seeds."""
    limit = max(len(run.shares) for run in runs)
    early = min(parts // AIM, limit)
    table = Table(
        "engine", "seeds", *(f"trials to {share:.0%}" for share in SHARES), f"share at {early} (1/{AIM})",
        f"share at {limit}", "search, s a trial", "measuring to 99%, s",
        title=f"{parts} lossy parts; medians with quartiles over seeds",
    )  # fmt: skip
    for name, found in by_engine(runs).items():
        cells = [str(len(found))]
        for share in SHARES:
            low, middle, high = (_trials(value, limit) for value in quartiles([trials_to(run, share) for run in found]))
            cells.append(f"{middle} [{low}, {high}]")
        for trial in (early, limit):
            low_share, middle_share, high_share = quartiles(list(curves(found, limit)[:, trial - 1]))
            cells.append(f"{middle_share:.2%} [{low_share:.2%}, {high_share:.2%}]")
        cells.append(f"{statistics.median(run.step_s for run in found):.3f}")
        needed = quartiles([trials_to(run, SHARES[-1]) for run in found])[1]
        cells.append(f"{needed * seconds_per_part:.0f}" if np.isfinite(needed * seconds_per_part) else "-")
        table.add_row(name, *cells)
    if np.isfinite(seconds_per_part):
        table.caption = f"brute force: {parts * seconds_per_part:.0f} s of measuring, {seconds_per_part:.2f} s a part"
    console.print(table)


def plot(runs: Sequence[Run], *, parts: int, path: Path) -> None:
    """What is missing to the whole hypervolume by number of trials, medians and quartiles.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install 'controld[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    limit = max(len(run.shares) for run in runs)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    trials = np.arange(1, limit + 1)
    for name, found in by_engine(runs).items():
        low, middle, high = 100 * (1 - np.quantile(curves(found, limit), [0.25, 0.5, 0.75], axis=0))
        (line,) = axes.plot(
            trials, middle, label=f"{name} ({len(found)} seeds)", linewidth=2.5 if name == OURS else 1.5
        )
        axes.fill_between(trials, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    for share in SHARES:
        axes.axhline(100 * (1 - share), color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(f"{share:.0%}", (limit, 100 * (1 - share)), ha="right", va="bottom", color="grey")
    if parts // AIM < limit:
        axes.axvline(parts // AIM, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(f"1/{AIM} of the parts", (parts // AIM, 18), rotation=90, ha="right", va="top", color="grey")
    axes.set(xlabel="trials", ylabel="hypervolume missing to brute force (%)", yscale="log", xlim=(START_TRIALS, limit))
    axes.set_ylim(0.1, 20)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(f"Search of {parts} lossy parts: median and quartiles over seeds")
    axes.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run_to_json(run: Run) -> dict[str, Any]:
    """With shares rounded to what a plot shows."""
    return {
        "engine": run.engine,
        "seed": run.seed,
        "search_s": round(run.search_s, 3),
        "shares": [round(share, 5) for share in run.shares],
    }


def run_from_json(data: dict[str, Any]) -> Run:
    """What `run_to_json` wrote."""
    return Run(engine=data["engine"], seed=data["seed"], shares=tuple(data["shares"]), search_s=data["search_s"])
