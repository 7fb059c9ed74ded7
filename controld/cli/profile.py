"""`controld profile`: have profiling workers measure configurations, and watch it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from controld.cli.admin_client import AdminClient, AdminError
from controld.cli.command import print_json
from controld.contract.configuration_label import configuration_label
from controld.contract.errors import ControldError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "measure configurations on the real model"
EXAMPLES = """\
examples:
  python -m dataplanes.sglang.profiler --model DIR --address unix:///run/controld/fleet.sock   the worker, elsewhere

  controld profile --plane sglang --workload general --budget 200      search the space with 200 trials
  controld profile --workload general --budget 30min                   or with 30 minutes of measuring
  controld profile --budget 100 --restrict quantise=levels,nvfp4 --restrict sink_tokens=0,1
  controld profile --plane sglang --workload general --grid            measure the curated grid instead (minutes)
  controld profile --grid --quick                                      a smaller one for a first look

  python -m dataplanes.longlive.profiler --address unix:///run/controld/fleet.sock             a video engine's worker
  controld profile --plane longlive --budget 60                        search its settings; the loss is over clips

  controld profile --list
  controld profile --follow 20260101-120000-ab12                       watch a study that runs
  controld profile --pause 20260101-120000-ab12                        and later --resume
  controld profile --cancel 20260101-120000-ab12                       what it measured stays
  controld profile --compare 20260101-120000-ab12 20260102-090000-cd34

A search measures first what fills the space, then what a model of the results so far says is likely to widen the
Pareto front of loss, bytes and time (of a video engine: loss, memory and time). It stops when its budget is spent, when
the last max(40, 25 %) trials widened the front's hypervolume by less than 0.1 %, or when nothing is left. The
hypervolume is shown between 0 and 1.

A study belongs to the daemon: it goes on when this command ends, and after a crash of the daemon, of a worker or of
the search. `controld candidates` shows the profiles.
"""

_PATIENCE_S = 60.0
_RECONNECT_S = 0.2
_QUICK_SEGMENTS = 4
_OPEN_STATES = ("running", "paused")
_OF_GRID = ("quick",)
_OF_SEARCH = ("restrict", "seed", "max_segments")
_OF_BOTH = ("plane", "workload", "lengths", "segments", "deployment", "model")
_DEFAULT_PLANE = "sglang"
_DEFAULT_WORKLOAD = "general"
_WORKLOAD_OF_PLANE = {"longlive": "shapes"}
_INTEGER = re.compile(r"-?[0-9]+")
_COLUMNS = 60
_BARS = "▁▂▃▄▅▆▇█"


def configure(parser: ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--budget",
        type=_budget,
        metavar="N|TIME",
        help="search with so many trials (200), or so much measuring (30min)",
    )
    action.add_argument("--grid", action="store_true", help="measure the curated grid")
    action.add_argument("--follow", metavar="ID", help="watch a study")
    action.add_argument("--pause", metavar="ID", help="begin nothing new in a study; what runs is finished")
    action.add_argument("--resume", metavar="ID", help="go on with a paused study, and watch it")
    action.add_argument("--cancel", metavar="ID", help="cancel a study; what it measured stays")
    action.add_argument("--compare", nargs="+", metavar="ID", help="the hypervolume by trial of studies, side by side")
    action.add_argument("--list", action="store_true", help="all studies")
    # No defaults here: what was not given is told apart from what was given for nothing.
    parser.add_argument("--plane", metavar="KIND", help=f"kind of data plane (default: {_DEFAULT_PLANE})")
    parser.add_argument(
        "--workload",
        help=f"whose texts or clips are measured on (default: {_DEFAULT_WORKLOAD}; longlive: shapes)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help="prompt lengths in tokens (default: 256,1024,2048), or clip lengths in chunks (default: 8)",
    )
    parser.add_argument(
        "--segments",
        type=int,
        metavar="N",
        help="texts per length (default: 8; search: 2 at first), or clips (default: 12; search: 8)",
    )
    parser.add_argument(
        "--max-segments",
        type=int,
        metavar="N",
        help="search: texts per length for parts worth it (default: 8, clips 32, or --segments)",
    )
    parser.add_argument(
        "--restrict",
        action="append",
        type=_restriction,
        metavar="NAME=V,V",
        help="search: only these values (controld space)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="search: of the start points (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help=f"grid: a smaller one, {_QUICK_SEGMENTS} texts a length (clips: 12)"
    )
    parser.add_argument("--deployment", help="only workers of this deployment")
    parser.add_argument("--model", metavar="FINGERPRINT", help="only workers of this model")
    parser.add_argument("--detach", action="store_true", help="do it and return, do not watch")


def run(arguments: Namespace) -> int:
    _refuse_foreign_options(arguments)
    client = AdminClient.from_arguments(arguments, patience_s=_PATIENCE_S)
    hasty = AdminClient.from_arguments(arguments)
    if arguments.list:
        return _list(hasty, arguments)
    if arguments.compare:
        return _compare(hasty, arguments)
    if arguments.cancel:
        return _done(client.delete(f"/v1/studies/{arguments.cancel}"), arguments)
    if arguments.pause:
        return _done(client.post(f"/v1/studies/{arguments.pause}/pause"), arguments)
    if arguments.resume:
        study = client.post(f"/v1/studies/{arguments.resume}/resume")
    elif arguments.follow:
        study = client.get(f"/v1/studies/{arguments.follow}")
    else:
        study = hasty.post("/v1/studies", _request(arguments))
    if not arguments.detach:
        _watch(client, study, quiet=arguments.json)
        study = client.get(f"/v1/studies/{study['id']}")
    return _done(study, arguments)


def _refuse_foreign_options(arguments: Namespace) -> None:
    owners = {"--budget": _OF_SEARCH, "--grid": _OF_GRID, "--budget and --grid": _OF_BOTH}
    if arguments.grid or arguments.budget is not None:
        del owners["--budget and --grid"]
        del owners["--grid" if arguments.grid else "--budget"]
    for owner, names in owners.items():
        for name in names:
            value = getattr(arguments, name)
            if value is not None and value is not False:
                option = f"--{name.replace('_', '-')}"
                raise ControldError(
                    f"{option} belongs to {owner}", code="cli.profile", hint="see controld profile --help"
                )


def _request(arguments: Namespace) -> dict[str, Any]:
    plane = arguments.plane or _DEFAULT_PLANE
    body: dict[str, Any] = {"plane": plane, "workload": _WORKLOAD_OF_PLANE.get(plane, _DEFAULT_WORKLOAD)}
    if arguments.grid:
        if arguments.quick:
            # Losses of single clips scatter too widely to take fewer.
            body |= {"grid": "quick"} if plane in _WORKLOAD_OF_PLANE else {"grid": "quick", "segments": _QUICK_SEGMENTS}
    else:
        body |= {"method": "search", "budget": arguments.budget}
        if arguments.restrict:
            body["restrict"] = _restrictions(arguments.restrict)
    for name in (*_OF_BOTH, "max_segments", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            body[name] = value
    return body


def _restrictions(given: list[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    restrictions = dict(given)
    if len(restrictions) < len(given):
        names = [name for name, _ in given]
        twice = next(name for name in names if names.count(name) > 1)
        raise ControldError(f"--restrict {twice} is given twice", code="cli.profile", hint=f"--restrict {twice}=A,B")
    return restrictions


def _list(client: AdminClient, arguments: Namespace) -> int:
    studies = client.get("/v1/studies")["studies"]
    if arguments.json:
        print_json(studies)
        return 0
    for study in studies:
        method = f"{study['method']} {study.get('budget', '')}".rstrip()
        line = f"{study['id']}  {study['state']:9}  {method:12}  {study['workload']} on {study['model_name']}: "
        print(line + (_counts(study) or "no trials yet"))
    return 0


def _compare(client: AdminClient, arguments: Namespace) -> int:
    from rich.table import Table

    from controld.cli.console import console

    studies = client.get("/v1/studies/compare", ids=",".join(arguments.compare))["studies"]
    if arguments.json:
        print_json(studies)
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("study", "state", "method", "workload", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("trials", "hypervolume", "front", "measuring", "search", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hypervolume by trial", no_wrap=True)
    most = max(max((study["hypervolume"] for study in studies), default=0.0), 1e-9)
    for study in studies:
        seconds = study["seconds"]
        table.add_row(
            study["id"], study["state"], study["method"], study["workload"], study["model_name"],
            str(study["trials_done"]), f"{study['hypervolume']:.4f}", str(study["front_size"]),
            *(f"{seconds[name]:.0f} s" for name in ("measuring", "search", "waiting")),
            sparkline(study["hypervolume_by_trial"], most),
        )  # fmt: skip
    console().print(table)
    return 0


def sparkline(values: list[float], most: float, columns: int = _COLUMNS) -> str:
    """A curve from 0 to `most` in characters; a long one is shown by the last value of each of `columns` parts."""
    if len(values) > columns:
        values = [values[(column + 1) * len(values) // columns - 1] for column in range(columns)]
    return "".join(_BARS[min(int(value / most * len(_BARS)), len(_BARS) - 1)] for value in values) if most > 0 else ""


def _watch(client: AdminClient, study: dict[str, Any], *, quiet: bool) -> None:
    """Show a study until it ends; a daemon that is restarted meanwhile is waited for."""
    from rich.console import Console

    states = _states(client, study["id"])
    if quiet:
        for _ in states:
            pass
        return
    console = Console(highlight=False, stderr=True)
    trials = f"{study['trials_total']} trials" if study["method"] == "grid" else f"search, budget {study['budget']}"
    console.print(f"study {study['id']}: {trials}, {study['workload']} on {study['model_name']}")
    try:
        if console.is_terminal:
            _watch_live(console, states)
        else:
            _watch_lines(states)
    except KeyboardInterrupt:
        console.print(f"it goes on: controld profile --follow {study['id']}, or --pause, or --cancel")
        raise


def _states(client: AdminClient, study_id: str) -> Iterator[dict[str, Any]]:
    while True:
        try:
            for study in client.events(f"/v1/studies/{study_id}/events"):
                yield study
                if study["state"] not in _OPEN_STATES:
                    return
        except AdminError as error:
            # The daemon was killed in the middle of the stream; the next call waits for the one that follows it.
            if error.code != "admin.broken":
                raise
        time.sleep(_RECONNECT_S)


def _watch_live(console: Console, states: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    from controld.cli.study_screen import study_screen

    with Live(console=console, refresh_per_second=4) as live:
        for study in states:
            live.update(study_screen(study, console.height))


def _watch_lines(states: Iterator[dict[str, Any]]) -> None:
    """One line a finished trial, for logs."""
    told: set[str] = set()
    state = "running"
    for study in states:
        if study["state"] != state and study["state"] in _OPEN_STATES:
            print(paused_hint(study) or f"study {study['id']} goes on", file=sys.stderr, flush=True)
        state = study["state"]
        for trial in study["trials"]:
            if trial["id"] not in told and trial["state"] not in ("pending", "running"):
                told.add(trial["id"])
                eta = "?" if study["eta_s"] is None else f"{study['eta_s']:.0f}"
                total = study["budget"] if isinstance(study.get("budget"), int) else study["trials_total"]
                place = f"[{study['trials_done']}/{total}] {trial['id']} {configuration_label(trial['lossy'])}"
                times = f"in {trial['seconds']:.0f} s, about {eta} s left"
                line = f"{place}: {trial['state']} {loss_text(trial)} {times} {trial['detail']}"
                print(line.rstrip(), file=sys.stderr, flush=True)


def paused_hint(study: dict[str, Any]) -> str:
    """Why nothing happens in a study, and the way on; empty where it is not paused."""
    if study["state"] != "paused":
        return ""
    return f"study {study['id']} is paused: controld profile --resume {study['id']}"


def _done(study: dict[str, Any], arguments: Namespace) -> int:
    if arguments.json:
        print_json(study)
    else:
        reason = f" ({study['stop_reason']})" if study["stop_reason"] else ""
        front = f"hypervolume {study['hypervolume']:.4f}, {study['front_size']} on the front"
        print(f"study {study['id']} {study['state']}{reason}: {_counts(study) or 'no trials'}; {front}")
        if study["detail"]:
            print(study["detail"])
        print(f"controld candidates --workload {study['workload']}")
    return 1 if study["state"] == "failed" else 0


def _counts(study: dict[str, Any]) -> str:
    return ", ".join(f"{number} {state}" for state, number in study["trials_by_state"].items())


def loss_text(trial: dict[str, Any]) -> str:
    """A trial's loss with its standard error; empty where there is none."""
    # Nats per token, or of a clip in the plane's own unit.
    loss, error = (trial[name] if name in trial else trial[f"{name}_nats"] for name in ("loss", "loss_se"))
    if loss is None:
        return ""
    return f"{loss:.5f}" + (f" +- {error:.5f}" if error is not None else "")


def _budget(text: str) -> int | str:
    return int(text) if _INTEGER.fullmatch(text) else text


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths, as 256,1024,2048") from None


def _restriction(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not name or not equals or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is no restriction, as sink_tokens=0,1")
    return name, [_value(part) for part in values.split(",")]


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text
