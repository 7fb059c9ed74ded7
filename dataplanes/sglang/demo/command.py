"""`controld demo`: shows on this machine, on a real model over a real shaped link, what controld does."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError
from dataplanes.sglang.demo.plan import DEMO, EVIDENCE, ExperimentPlan

DEFAULT_MODEL = Path("build/models/smollm2-135m-instruct")
DEFAULT_ARTEFACTS = Path("build/models/artefacts")
SERVED_PAGE_TOKENS = 64


SUMMARY = "show on this machine, on a real model and a real SGLang pair over a shaped link, what controld does"
EXAMPLES = """\
Profiles a real model, starts a real SGLang prefill/decode pair over a link whose rate changes while it runs, and sends
every prompt raw, with three static codecs and with controld deciding. Prints a table and writes a page with plots.

examples:
  controld demo                 some ten minutes, a few prompts a phase; results in build/demo
  controld demo --evidence      an hour or two, intervals narrow enough to decide every claim; build/evidence
  controld demo --evidence --at-most 24 --no-load    half an hour, wider intervals
  controld demo --recompute     the figures again, from the kept logs
  controld demo --keep          leave the daemon's API up afterwards
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--evidence", action="store_true", help="the long run; exit status 1 where a claim fails")
    parser.add_argument(
        "--at-most", type=int, metavar="PAIRS", help="end each phase after so many prompts, however wide its intervals"
    )
    parser.add_argument("--no-load", action="store_true", help="leave out the run with several requests in flight")
    parser.add_argument("--recompute", action="store_true", help="only rebuild the figures from the kept logs")
    parser.add_argument("--keep", action="store_true", help="leave the daemon's API up until interrupted")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument(
        "--artefacts", type=Path, default=DEFAULT_ARTEFACTS,
        help="folder of calibrated codec artefacts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the results (default: build/demo or build/evidence)")


class _Bar:
    """A progress bar for people; plain lines where nobody watches."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: Any = None
        self._bar.start()

    def stage(self, title: str, total: int) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{time.strftime('%H:%M:%S')} {title} ({total})", highlight=False)
        self._task = self._bar.add_task(title, total=total, note="")

    def step(self, text: str = "") -> None:
        self._bar.update(self._task, advance=1, note=text)

    def close(self) -> None:
        self._bar.stop()


def run(arguments: argparse.Namespace) -> int:
    """Run the experiment and show its results.

    Returns:
        0 when a run was made (in evidence mode: when every claim also holds), else 1.
    """
    plan = EVIDENCE if arguments.evidence else DEMO
    if arguments.at_most is not None:
        at_most = arguments.at_most
        plan = replace(plan, min_pairs=min(plan.min_pairs, at_most), max_pairs=min(plan.max_pairs, at_most))
    if arguments.no_load:
        plan = replace(plan, loaded_requests=0)
    out: Path = arguments.out or Path("build/evidence" if arguments.evidence else "build/demo")
    console = Console(stderr=True)
    # The servers are ended by the context managers, and those run on an exception only.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bar = _Bar(console)
    try:
        if not arguments.recompute:
            from dataplanes.sglang.demo.run import Experiment
            from dataplanes.sglang.link import enter_user_namespace_if_needed

            enter_user_namespace_if_needed()
            Experiment(plan, arguments.model, out, bar, artefacts=arguments.artefacts).run()
        summary = conclude(
            plan, arguments.model, out, bar, artefacts=arguments.artefacts, remeasure=not arguments.recompute
        )
    except ControldError as error:
        bar.close()
        console.print(f"[red]{error.code}[/red]: {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        bar.close()
        console.print("interrupted; everything that was started has been stopped")
        return 130
    bar.close()
    _show(summary, out, as_json=arguments.json)
    if arguments.keep:
        _keep(out, console)
    return 0 if not arguments.evidence or all(verdict["holds"] for verdict in summary["verdicts"].values()) else 1


def conclude(
    plan: ExperimentPlan, model: Path, out: Path, bar: _Bar, *, artefacts: Path | None = None, remeasure: bool
) -> dict[str, Any]:
    """Re-measure quality (or take what was measured), and write `summary.json` and `index.html`.

    Raises:
        ControldError: there is no finished run in `out`, or it proves nothing.
    """
    from dataplanes.sglang.demo.analysis import loaded_latencies, summarise
    from dataplanes.sglang.demo.report import Timeline, page
    from dataplanes.sglang.demo.run import read_log

    if not (out / "setup.json").is_file() or not (out / "client.jsonl").is_file():
        raise ControldError(f"no finished run in {out}", code="demo.no_run", hint="run without --recompute first")
    setup = json.loads((out / "setup.json").read_text())
    samples, effects, others, attached = read_log(out)
    quality_file = out / "quality.json"
    if remeasure:
        quality_file.write_text(json.dumps(_remeasure(plan, model, out, bar, artefacts), indent=1))
    quality = json.loads(quality_file.read_text()) if quality_file.is_file() else None
    summary = summarise(
        samples,
        effects,
        seed=setup["seed"],
        max_quality_loss_nats=setup["max_quality_loss_nats"],
        quality=quality,
        static_configurations=setup["static_configurations"],
        separating_phase=setup["separating_phase"],
        attached=attached,
    )
    summary["machine"] = setup["machine"]
    summary["loaded"] = loaded_latencies(others)
    links = [json.loads(line) for line in (out / "link.jsonl").read_text().splitlines()]
    timeline = Timeline(
        link=[(record["second"], record["rate_bits_per_s"]) for record in links],
        requests=[(effect["second"], sample, effect) for sample, effect in zip(samples, effects, strict=True)],
        estimates=[
            (effect["second"], effect["bandwidth_bytes_per_s"])
            for effect in effects
            if effect["arm"] == "controld" and effect["bandwidth_bytes_per_s"]
        ],
    )
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    (out / "index.html").write_text(page(summary, timeline))
    return summary


def _remeasure(plan: ExperimentPlan, model: Path, out: Path, bar: _Bar, artefacts: Path | None) -> dict[str, Any]:
    from dataplanes.sglang.demo.run import Prompts, read_log, served_prompts
    from dataplanes.sglang.demo.served_quality import RAW_ARM, remeasure

    samples, effects, _, _ = read_log(out)
    used = served_prompts(samples, effects)
    texts = Prompts(model, plan.seed)
    lengths = {(sample.phase, sample.pair): sample.prompt_tokens for sample in samples}
    prompts = [texts.get(phase, pair, lengths[phase, pair]) for phase, pair in used]
    candidates = json.loads((out / "candidates.json").read_text())
    known = {candidate["config_id"]: Configuration(candidate["configuration"]) for candidate in candidates}
    ids = {arm_id for arms in used.values() for arm_id in arms.values()} - {RAW_ARM}
    bar.stage("re-measuring quality on the served prompts", len(prompts))
    step: Callable[[], None] = bar.step
    return remeasure(
        model,
        prompts,
        used,
        {arm_id: known[arm_id] for arm_id in ids},
        page_tokens=SERVED_PAGE_TOKENS,
        artefacts_dir=artefacts,
        step=step,
    )


def _show(summary: dict[str, Any], out: Path, *, as_json: bool) -> None:
    if as_json:
        json.dump(summary, sys.stdout, indent=1)
        print()
        return
    from dataplanes.sglang.demo.report import terminal_tables

    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in terminal_tables(summary):
        console.print(table)
    console.print(f"page: {out / 'index.html'}   figures: {out / 'summary.json'}   logs: {out}", highlight=False)


def _keep(out: Path, console: Console) -> None:
    from dataplanes.sglang.demo.daemon import Daemon

    texts = {file.name: file.read_text() for file in (out / "daemon" / "policies").glob("*.yaml")}
    with Daemon(out / "daemon", texts) as daemon:
        console.print(
            f"the daemon's API is up: curl --unix-socket {os.path.relpath(daemon.admin_socket)} http://d/v1/status"
        )
        console.print(
            f"explain a decision: controld explain ID --config {os.path.relpath(daemon.config)}   (Ctrl-C ends)"
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("stopping")
