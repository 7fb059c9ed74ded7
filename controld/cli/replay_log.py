"""`controld replay --log`: a demonstration's log simulated again, predicted against observed."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controld.candidates.exchange import export_document
from controld.cli.command import print_json
from controld.cli.console import console
from controld.cli.replay import progress, read_lines, read_policy, read_profiles, request_of, world_of
from controld.contract.errors import ControldError, FieldError

if TYPE_CHECKING:
    from controld.candidates.profile import Profile


def run_log(arguments: Namespace) -> int:
    """Simulate and compare. Raises: ControldError: a file of the folder is missing or not what it should be."""
    from controld.sim.demo_log import codec_factors, compare, read_demo_log
    from controld.sim.engine import simulate
    from controld.sim.link import LinkTruth
    from controld.sim.replay import Replay
    from controld.sim.schedule import Drift, Trait
    from controld.sim.world import Noise

    folder: Path = arguments.log
    log = read_demo_log(read_lines(folder / "client.jsonl"), read_lines(folder / "link.jsonl"))
    policy = read_policy(arguments.policy or folder / "daemon" / "policies", arguments.deployment)
    schedule = log.schedule()
    # The real one had seen the link while it warmed up.
    request = replace(
        request_of(policy, _profiles(arguments.profiles, folder)),
        prior_bandwidth_bytes_per_s=schedule.points[0].bytes_per_s,
    )
    unlearned = tuple(c.name for c in policy.classes if not c.rule.learn)
    encode, decode = codec_factors(log, request.profiles, unlearned)
    drifts = (Drift(factor=encode, traits=(Trait.ENCODE,)), Drift(factor=decode, traits=(Trait.DECODE,)))
    world = world_of(request, LinkTruth(schedule=schedule), Noise(), drifts)
    replay = Replay(request=request, world=world, arrivals=log.arrivals(), unlearned_classes=unlearned)
    with progress(len(replay.arrivals), quiet=arguments.json) as (begin, step):
        begin("simulating the log")
        run = simulate(world, replay.arrivals, replay.controller(), in_flight=1, on_finished=step)
    comparison = compare(log, run) | {"codec_seconds_over_profile": {"encode": encode, "decode": decode}}
    if arguments.json:
        print_json(comparison)
    else:
        _show(folder, comparison)
    return 0


def _profiles(path: Path | None, folder: Path) -> list[Profile]:
    """Exported ones, or those that the demonstration wrote down, which have a few columns more."""
    from controld.candidates.exchange import read_document
    from controld.candidates.profile import Profile

    if path is not None:
        return read_profiles(path)
    source = folder / "candidates.json"
    try:
        rows = json.loads("".join(read_lines(source)))
        known = export_document([], exported_unix_s=0.0)
        names = Profile.__dataclass_fields__.keys() | {"format"}
        known["profiles"] = [{name: row[name] for name in names if name in row} for row in rows]
        profiles = read_document(json.dumps(known))
    except FieldError as error:
        raise FieldError(f"{source}: {error.field}", error.problem, hint=error.hint, code=error.code) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ControldError(f"{source}: not a list of candidates: {error}", code="cli.file") from error
    if not profiles:
        raise ControldError(f"{source}: holds no profile", code="cli.file")
    return profiles


def _show(folder: Path, comparison: dict[str, Any]) -> None:
    from rich.table import Table

    print(f"{folder}: predicted / observed, medians over requests")
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "arm"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "TTFT", "TTFT, sums", "within 15 %", "transfer", "same arm"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = [(phase, arm, row) for phase, arms in comparison["phases"].items() for arm, row in arms.items()]
    for phase, arm, row in [*groups, ("all", "all", comparison["all"])]:
        table.add_row(
            phase if arm == "all" else "", arm, str(row["requests"]), f"{row['ttft']:.2f}", f"{row['ttft_sum']:.2f}",
            f"{row['within']:.0%}", f"{row['transfer']:.2f}", f"{row['same_arm']:.0%}",
        )  # fmt: skip
    console().print(table)
    codecs = comparison["codec_seconds_over_profile"]
    print(
        f"codecs: {codecs['encode']:.1f}x (encode) and {codecs['decode']:.1f}x (decode) their profiles' time, "
        "as the pinned arms had it"
    )
    print("time beside the transfer is the raw arm's, by phase and prompt length: raw itself is no prediction")
    answers = ["yes" if comparison[key] else "no" for key in ("within_15_percent", "within_15_percent_by_arm")]
    print(f"median TTFT within 15 %: {answers[0]} in every phase, {answers[1]} for every arm in every phase")
