"""`controld profile`: have a profiling worker measure configurations, and watch it."""

from __future__ import annotations

import argparse
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from controld.cli.admin_client import AdminClient, AdminError
from controld.cli.command import print_json
from controld.contract.configuration_label import configuration_label

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SUMMARY = "measure configurations on the real model"
EXAMPLES = """\
examples:
  python -m dataplanes.sglang.profiler --model DIR --address unix:///run/controld/fleet.sock   the worker, elsewhere
  controld profile --plane sglang --workload general --grid            measure the curated grid (minutes)
  controld profile --plane sglang --workload general --grid --quick    a smaller one for a first look
  controld profile --follow 20260101-120000-ab12                       watch a study that runs
  controld profile --cancel 20260101-120000-ab12                       what it measured stays
  controld profile --list

A study belongs to the daemon: it goes on when this command ends, and after a crash of the daemon or of a worker.
"""

_POLL_S = 0.5
_PATIENCE_S = 60.0
_QUICK_SEGMENTS = 4


def configure(parser: ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--grid", action="store_true", help="start a study of the curated grid")
    action.add_argument("--follow", metavar="ID", help="watch a study")
    action.add_argument("--cancel", metavar="ID", help="cancel a study")
    action.add_argument("--list", action="store_true", help="all studies")
    parser.add_argument("--plane", default="sglang", metavar="KIND", help="kind of data plane (default: sglang)")
    parser.add_argument("--workload", default="general", help="whose texts are measured on (default: general)")
    parser.add_argument("--quick", action="store_true", help=f"a smaller grid, {_QUICK_SEGMENTS} segments a length")
    parser.add_argument("--segments", type=int, metavar="N", help="texts per prompt length (default: 8)")
    parser.add_argument("--lengths", type=_lengths, metavar="N,N", help="prompt lengths (default: 256,1024,2048)")
    parser.add_argument("--deployment", help="only workers of this deployment")
    parser.add_argument("--model", metavar="FINGERPRINT", help="only workers of this model")
    parser.add_argument("--detach", action="store_true", help="start it and return")


def run(arguments: Namespace) -> int:
    client = AdminClient.from_arguments(arguments, patience_s=_PATIENCE_S)
    if arguments.list:
        return _list(AdminClient.from_arguments(arguments), arguments)
    if arguments.cancel:
        study = client.delete(f"/v1/studies/{arguments.cancel}")
        return _done(study, arguments)
    if arguments.follow:
        study = client.get(f"/v1/studies/{arguments.follow}")
    else:
        study = AdminClient.from_arguments(arguments).post("/v1/studies", _request(arguments))
    if not arguments.detach:
        study = _watch(client, study, quiet=arguments.json)
    return _done(study, arguments)


def _request(arguments: Namespace) -> dict[str, Any]:
    body = {"plane": arguments.plane, "workload": arguments.workload}
    if arguments.quick:
        body |= {"grid": "quick", "segments": _QUICK_SEGMENTS}
    for name in ("segments", "lengths", "deployment", "model"):
        value = getattr(arguments, name)
        if value is not None:
            body[name] = value
    return body


def _list(client: AdminClient, arguments: Namespace) -> int:
    studies = client.get("/v1/studies")["studies"]
    if arguments.json:
        print_json(studies)
        return 0
    for study in studies:
        counts = ", ".join(f"{number} {state}" for state, number in study["trials_by_state"].items())
        print(f"{study['id']}  {study['state']:9}  {study['workload']} on {study['model_name']}: {counts}")
    return 0


def _watch(client: AdminClient, study: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Poll until the study ends; a daemon that is restarted meanwhile is waited for."""
    from rich.console import Console

    console = Console(highlight=False, stderr=True)
    states = _states(client, study)
    if quiet:
        *_, study = states
        return study
    console.print(
        f"study {study['id']}: {study['trials_total']} trials of {study['workload']} on {study['model_name']}"
    )
    try:
        if console.is_terminal:
            return _watch_live(console, states)
        return _watch_lines(states)
    except KeyboardInterrupt:
        console.print(f"it goes on: controld profile --follow {study['id']}, or --cancel {study['id']}")
        raise


def _states(client: AdminClient, study: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield study
        if study["state"] != "running":
            return
        time.sleep(_POLL_S)
        try:
            study = client.get(f"/v1/studies/{study['id']}")
        except AdminError as error:
            # The daemon was killed in the middle of an answer; the next call waits for the one that follows it.
            if error.code != "admin.broken":
                raise


def _watch_live(console: Console, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    from rich.live import Live

    study: dict[str, Any] = {}
    with Live(console=console, refresh_per_second=4) as live:
        for study in states:
            live.update(_screen(study))
    return study


def _screen(study: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("trial", "configuration", "state", "segments", "loss (nats/token)", "time", box=None, pad_edge=False)
    for trial in study["trials"]:
        table.add_row(
            trial["id"],
            configuration_label(trial["lossy"]),
            _STYLES.get(trial["state"], "{}").format(trial["state"]),
            f"{trial['segments_done']}/{trial['segments_total']}",
            _loss(trial),
            f"{trial['seconds']:.0f} s" if trial["seconds"] else "",
        )
    eta = "" if study["eta_s"] is None else f", about {study['eta_s']:.0f} s left"
    footer = f"{study['trials_done']}/{study['trials_total']} trials, {study['age_s']:.0f} s{eta}"
    bar = ProgressBar(total=max(study["segments_total"], 1), completed=study["segments_done"], width=60)
    return Group(table, bar, footer)


_STYLES = {
    "running": "[bold cyan]{}[/]",
    "measured": "[green]{}[/]",
    "infeasible": "[yellow]{}[/]",
    "failed": "[red]{}[/]",
    "pending": "[dim]{}[/]",
}


def _watch_lines(states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """One line a finished trial, for logs."""
    told: set[str] = set()
    study: dict[str, Any] = {}
    for study in states:
        for trial in study["trials"]:
            if trial["id"] not in told and trial["state"] not in ("pending", "running"):
                told.add(trial["id"])
                eta = "?" if study["eta_s"] is None else f"{study['eta_s']:.0f}"
                place = f"[{len(told)}/{study['trials_total']}] {configuration_label(trial['lossy'])}"
                times = f"in {trial['seconds']:.0f} s, about {eta} s left"
                line = f"{place}: {trial['state']} {_loss(trial)} {times} {trial['detail']}"
                print(line.rstrip(), file=sys.stderr, flush=True)
    return study


def _done(study: dict[str, Any], arguments: Namespace) -> int:
    if arguments.json:
        print_json(study)
    else:
        counts = ", ".join(f"{number} {state}" for state, number in study["trials_by_state"].items())
        print(f"study {study['id']} {study['state']}: {counts}; controld candidates --workload {study['workload']}")
    return 1 if study["state"] == "failed" else 0


def _loss(trial: dict[str, Any]) -> str:
    if trial["loss_nats"] is None:
        return ""
    error = trial["loss_se_nats"]
    return f"{trial['loss_nats']:.5f}" + (f" +- {error:.5f}" if error is not None else "")


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths, as 256,1024,2048") from None
