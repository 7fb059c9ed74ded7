"""`controld replay`: what would have happened to a trace under a policy, or how well a real run is predicted."""

from __future__ import annotations

import itertools
import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.errors import ControldError, FieldError
from controld.contract.quantity import format_duration, format_rate, format_size, parse_share, parse_size_bytes

if TYPE_CHECKING:
    from controld.candidates.profile import Profile
    from controld.controller.goals import TableRequest
    from controld.policy.model import Policy
    from controld.sim.link import LinkTruth
    from controld.sim.record import Arrival
    from controld.sim.replay import Replay
    from controld.sim.schedule import Drift
    from controld.sim.world import Noise, World

SUMMARY = "say what would have happened to a trace of requests under a policy"
EXAMPLES = """\
examples:
  controld replay --trace azure_2023_conv.csv --policy policies/chat.yaml --link 1Gbit
  controld replay --trace t.jsonl --policy policies/ --link "0s=2Gbit,600s=100Mbit,1200s~1Gbit" --plot replay.html
  controld replay --trace t.csv --policy policies/ --profiles candidates.json --kv-bytes-per-token 128KiB --speed 4
  controld replay --log build/evidence                 a demonstration's log: is its TTFT predicted?

Traces: Azure's CSV and Mooncake's JSONL. Everybody decides on the same arrivals with the same noise: raw, the static
arms that are quickest by profile, KVServe's published rule, controld, and an oracle that knows the truth. Seconds are
from the hand-over of a prompt's KV to its last acknowledgement: what a TTFT holds beside prefill and routing.
A link's steps and ramps are by time (0s=, 60s~) or by transfers (0=2Gbit,50=100Mbit).
"""

DEFAULT_PROFILES = "smollm2_cpu.json"
DEFAULT_BYTES_PER_TOKEN = "23040B"
_PLOT_SUFFIXES = (".html", ".png", ".svg")


def configure(parser: ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests: Azure CSV or Mooncake JSONL")
    source.add_argument(
        "--log", type=Path, metavar="FOLDER", help="what `controld demo` left: client.jsonl, link.jsonl"
    )
    parser.add_argument("--policy", type=Path, metavar="PATH", help="a policy file, or a folder with one policy")
    parser.add_argument("--deployment", help="which policy, where there are several")
    parser.add_argument(
        "--profiles", type=Path, metavar="FILE",
        help="what `controld candidates --export` wrote (default: SmolLM2-135M, measured on a CPU)",
    )  # fmt: skip
    parser.add_argument("--link", metavar="RATE", help="1Gbit, or a schedule (default: the policy's link)")
    parser.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="play the trace X times as fast")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--mix", metavar="CLASS=N,...", help="shares of service classes, given at random (default: the first class)"
    )
    parser.add_argument(
        "--kv-bytes-per-token", metavar="SIZE", default=DEFAULT_BYTES_PER_TOKEN,
        help=f"raw KV (default: {DEFAULT_BYTES_PER_TOKEN}, SmolLM2-135M's)",
    )  # fmt: skip
    parser.add_argument("--peers", type=int, default=1, metavar="N", help="decode servers behind the link (default: 1)")
    parser.add_argument("--noise", default="10%", metavar="SHARE", help="scatter of each stage (default: 10%%)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of classes and noise (default: 0)")
    parser.add_argument("--transfers", type=Path, metavar="FILE", help="write every transfer of every decider as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a page (.html) or a picture (.png, .svg)")


def run(arguments: Namespace) -> int:
    if arguments.plot is not None and arguments.plot.suffix not in _PLOT_SUFFIXES:
        hint = f"a file that ends in {', '.join(_PLOT_SUFFIXES)}"
        raise ControldError(f"{arguments.plot}: unknown kind of plot", code="cli.plot", hint=hint)
    for name in ("limit", "peers"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise FieldError(f"--{name}", f"{getattr(arguments, name)} is below 1")
    if arguments.log is not None:
        from controld.cli.replay_log import run_log

        return run_log(arguments)
    return _run_trace(arguments)


def _run_trace(arguments: Namespace) -> int:
    from controld.sim.replay import report, run_replay

    replay = _replay(arguments)
    with progress(len(replay.arrivals), quiet=arguments.json) as (begin, step):
        runs = run_replay(replay, begin, step)
    document = report(runs) | {"replay": _about(arguments, replay)}
    if arguments.transfers is not None:
        write_text(arguments.transfers, json.dumps([one.to_document() for one in runs], allow_nan=False) + "\n")
    if arguments.plot is not None:
        from controld.cli.replay_plot import write_plot

        write_plot(runs, document, replay.world.link.schedule, arguments.plot)
    if arguments.json:
        print_json(document)
    else:
        _show(document)
        for path in (arguments.transfers, arguments.plot):
            if path is not None:
                print(f"written: {path}")
    return 0


def _replay(arguments: Namespace) -> Replay:
    from controld.sim.link import LinkTruth
    from controld.sim.replay import Replay
    from controld.sim.schedule import RateSchedule
    from controld.sim.traces import arrivals_of, read_trace
    from controld.sim.world import Noise

    policy = read_policy(arguments.policy, arguments.deployment)
    request = request_of(policy, read_profiles(arguments.profiles))
    link = arguments.link
    if link is None and (prior := request.prior_bandwidth_bytes_per_s):
        link = f"{prior * 8}bit"
    if link is None:
        raise FieldError("--link", "is needed, for the policy names no link", hint="--link 1Gbit")
    schedule = RateSchedule.parse(link, field="--link")
    mix = _mix(arguments.mix, policy)
    requests = read_trace(read_lines(arguments.trace), str(arguments.trace))
    arrivals = arrivals_of(
        requests[: arguments.limit],
        bytes_per_token=parse_size_bytes(arguments.kv_bytes_per_token, field="--kv-bytes-per-token"),
        speed=arguments.speed,
        mix=mix,
        tenants={service_class.name: service_class.tenant for service_class in policy.classes},
        peers=arguments.peers,
        seed=arguments.seed,
    )
    noise = Noise.even(parse_share(arguments.noise, field="--noise"))
    world = world_of(request, LinkTruth(schedule=schedule), noise)
    unlearned = tuple(c.name for c in policy.classes if not c.rule.learn)
    return Replay(
        request=request,
        world=world,
        arrivals=arrivals,
        seed=arguments.seed,
        unlearned_classes=unlearned,
        tenant_shares=policy.tenant_shares,
    )


# ------------------------------------------------------------------------------------------ what replays are made of


def read_policy(path: Path | None, deployment: str | None) -> Policy:
    """The one policy of a file or folder. Raises: ControldError: none, or several and no deployment said."""
    from controld.policy.loader import load_policies
    from controld.policy.model import PlaneKind

    if path is None:
        raise FieldError("--policy", "is needed", hint="--policy policies/")
    # A trace of requests says nothing of video sessions.
    policies = tuple(policy for policy in load_policies(path) if policy.kind is PlaneKind.SGLANG)
    chosen = [policy for policy in policies if deployment in (None, policy.deployment)]
    if len(chosen) != 1:
        known = ", ".join(sorted(policy.deployment for policy in policies))
        problem = f"{len(chosen)} policies of {path} fit"
        raise FieldError("--deployment", problem, hint=f"deployments: {known}")
    return chosen[0]


def read_profiles(path: Path | None) -> list[Profile]:
    """Exported profiles, or those that come with the package. Raises: ControldError."""
    from controld.candidates.exchange import read_document

    if path is None:
        return read_document(resources.files("controld.sim").joinpath("data", DEFAULT_PROFILES).read_text("utf-8"))
    try:
        profiles = read_document("".join(read_lines(path)))
    except FieldError as error:
        raise FieldError(f"{path}: {error.field}", error.problem, hint=error.hint, code=error.code) from error
    if not profiles:
        raise FieldError(str(path), "holds no profile")
    return profiles


def request_of(policy: Policy, profiles: Sequence[Profile]) -> TableRequest:
    """The policy's classes with the profiles; the plane is the one that they were measured on.

    Profiles of one workload alone stand in for every workload that the policy names: a trace says nothing of texts.
    """
    from dataclasses import replace

    from controld.planning.plane import Place, profiles_for, table_requests

    workloads = sorted({service_class.workload for service_class in policy.classes})
    if len({profile.workload for profile in profiles}) == 1:
        profiles = [replace(profile, workload=name) for name in workloads for profile in profiles]
    place = Place(
        model_fingerprint=profiles[0].model_fingerprint,
        sender_hardware=profiles[0].sender_hardware,
        receiver_hardware=profiles[0].receiver_hardware,
    )
    limit = max(service_class.max_quality_loss_nats for service_class in policy.classes)
    # What no class may use would only cost time.
    usable = [profile for profile in profiles if profile.loss_upper_nats <= limit]
    return table_requests(policy, place, profiles_for(policy, place, usable), {})[0]


def world_of(request: TableRequest, link: LinkTruth, noise: Noise, drifts: tuple[Drift, ...] = ()) -> World:
    """Codecs that are what their profiles say, but for the drifts."""
    from controld.sim.world import CodecTruth, World

    codecs = {profile.arm_id: CodecTruth.of(profile) for profile in request.profiles}
    return World(codecs=codecs, link=link, noise=noise, drifts=drifts)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, ends kept. Raises: ControldError: it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ControldError(f"{path}: cannot be read: {why}", code="cli.file") from error


def write_text(path: Path, text: str) -> None:
    """Write a file. Raises: ControldError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ControldError(f"{path}: cannot be written: {error.strerror}", code="cli.file") from error


@contextmanager
def progress(transfers: int, *, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A bar on standard error: (a decider begins, so many of its transfers have finished)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as bar:
        tasks: list[Any] = []

        def begin(name: str) -> None:
            tasks.append(bar.add_task(name, total=transfers))

        def step(finished: int) -> None:
            if finished % 64 == 0 or finished == transfers:
                bar.update(tasks[-1], completed=finished)

        yield begin, step


# ------------------------------------------------------------------------------------------ options and output


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _mix(text: str | None, policy: Policy) -> dict[str, float]:
    if text is None:
        return {policy.classes[0].name: 1.0}
    known = {service_class.name for service_class in policy.classes}
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = (side.strip() for side in part.partition("="))
        if name not in known or name in mix:
            problem = f"{name!r} comes twice" if name in mix else f"the policy has no class {name!r}"
            raise FieldError("--mix", problem, hint=f"classes: {', '.join(sorted(known))}")
        try:
            mix[name] = float(share)
        except ValueError:
            raise FieldError("--mix", f"{part.strip()!r} is no class and share", hint="chat=3,default=1") from None
    return mix


def _about(arguments: Namespace, replay: Replay) -> dict[str, Any]:
    arrivals: Sequence[Arrival] = replay.arrivals
    seconds = arrivals[-1].at_s - arrivals[0].at_s
    raw_bytes = sum(arrival.raw_bytes for arrival in arrivals)
    profile = replay.request.profiles[0] if replay.request.profiles else None
    return {
        "trace": str(arguments.trace),
        "policy": str(arguments.policy),
        "link": arguments.link or "as the policy says",
        "transfers": len(arrivals),
        "seconds": seconds,
        "raw_bytes": raw_bytes,
        "offered_bytes_per_s": raw_bytes / seconds if seconds > 0 else None,
        "classes": {
            name: len(list(group)) for name, group in itertools.groupby(sorted(a.service_class for a in arrivals))
        },
        "profiles": len({p.arm_id for p in replay.request.profiles}),
        "profiles_from": f"{profile.corpus}, {profile.sender_hardware}" if profile else "",
        "speed": arguments.speed,
        "noise": arguments.noise,
        "seed": arguments.seed,
    }


def _show(document: dict[str, Any]) -> None:
    from rich.table import Table

    about = document["replay"]
    offered = about["offered_bytes_per_s"]
    print(
        f"{about['trace']}: {about['transfers']} transfers, {format_size(about['raw_bytes'])} of KV"
        f" in {format_duration(about['seconds'])}" + (f", {format_rate(offered)} offered" if offered else "")
    )
    classes = ", ".join(f"{name} ({count})" for name, count in about["classes"].items())
    print(f"classes: {classes}; {about['profiles']} profiles: {about['profiles_from']}; link: {about['link']}")
    table = Table(box=None, pad_edge=False)
    table.add_column("decider", no_wrap=True)
    for name in ("mean", "P50", "P90", "P99", "to oracle", "wait", "on the wire", "coded", "loss (nats)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("arms")
    for row in document["deciders"]:
        arms = ", ".join(f"{arm[:8]} {count}" for arm, count in itertools.islice(row["arms"].items(), 3))
        table.add_row(
            row["decider"],
            *(format_duration(row[f"{name}_s"]) for name in ("mean", "p50", "p90", "p99")),
            "-" if row["regret"] is None else f"{row['regret']:+.1%}",
            format_duration(row["mean_wait_s"]),
            format_size(row["wire_bytes"]),
            f"{row['compressed_share']:.0%}",
            f"{row['mean_loss_nats']:.4f}",
            arms + (", ..." if len(row["arms"]) > 3 else ""),
        )
    console().print(table)
