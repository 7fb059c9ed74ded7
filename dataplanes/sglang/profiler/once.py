"""Trials from a file, without a daemon: for tests, for a first look, and for figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from dataplanes.sglang.profiler.trial import TrialRunner


class GridFileError(ControldError):
    """The file is not a list of trials."""


def read_tasks(path: Path) -> list[TrialTask]:
    """Read `{"workload", "prompt_tokens", "segments_per_length", "trials": [{"lossy", "coders"}, ...]}`.

    Raises:
        GridFileError: another shape, or a value that a trial cannot have.
    """
    try:
        data = json.loads(path.read_text())
        return [
            TrialTask(
                study_id=path.stem,
                trial_id=f"{number:03d}",
                workload=data["workload"],
                lossy=Configuration(trial["lossy"]),
                coders=tuple(trial["coders"]),
                prompt_tokens=tuple(data["prompt_tokens"]),
                segments_per_length=data["segments_per_length"],
                continuation_tokens=data.get("continuation_tokens", 128),
            )
            for number, trial in enumerate(data["trials"])
        ]
    except (ValueError, KeyError, TypeError, FieldError) as error:
        raise GridFileError(f"{path}: {error!r}", code="grid.malformed") from error


def run_once(
    tasks: list[TrialTask], runner: TrialRunner, out: Path, report: Callable[[TrialTask, TrialOutcome], None]
) -> bool:
    """Run the trials in order; `out` holds what is done after each of them. True if every trial was measured."""
    results: list[dict[str, Any]] = []
    measured = True
    for task in tasks:
        outcome = runner.run(task)
        measured = measured and outcome.status is TrialStatus.MEASURED
        results.append({"lossy": dict(task.lossy), "workload": task.workload, **asdict(outcome)})
        scratch = out.with_suffix(".partial")
        scratch.write_text(json.dumps(results, indent=1))
        scratch.replace(out)
        report(task, outcome)
    return measured
