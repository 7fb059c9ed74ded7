"""`controld candidates`: profiles as a table, as JSON or as a plot; in, out, and deleted."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.contract.errors import ControldError

SUMMARY = "show profiles, their quality, bytes and time, and the Pareto front; carry or delete them"
EXAMPLES = """\
examples:
  controld candidates
  controld candidates --workload dialogue --pareto
  controld candidates --max-loss 0.02               only what a class with that limit could use
  controld candidates --plot plots/                 plots/front.html (turn it, point at it) and plots/front.png
  controld candidates --json | jq '.[] | select(.pareto) | .config_id'
  controld candidates --envelope --bytes 20MB --max-loss 0.02    which is the fastest at which bandwidth
  controld candidates --kind video --pareto         settings of video engines; shown by itself where there is no KV
  controld candidates --export candidates.json      every KV profile, to keep or to carry elsewhere; --kind video too
  controld candidates --import candidates.json      all or nothing; of the same measurement the newer one stays
  controld candidates --import-kvserve 5090.json --workload qa    a profile library of KVServe, for a connected model
  controld candidates --delete --workload dialogue --dry-run      which would go; without --dry-run they are gone
  controld candidates --delete --model 3f9a01c2 --hardware cpu/2.6.0/1 --kind kv

Loss is in nats per token at the worst prompt length; "at most" is its one-sided 95 % upper bound, which is what
policies compare with max_quality_loss_nats. Encode and decode are MB of raw KV per second at the median transfer.
KVServe's accuracies are no loss: what comes from there has none, passes no limit, and its times are priors.

A configuration such as "had s1 w32 K12/c64 V6/t64 entropy" reads from left to right:
  had        the transform: Hadamard; nothing where there is none
  s1 w32     the first token and the last 32 are carried as they are
  K12/c64    keys in 12 levels; c: 64 tokens of a channel share a scale, t: 64 channels of a token and head do
  V6/t64     values, likewise; a number format stands instead of both (fp8_e4m3, nvfp4), or "lossless"
  entropy    the coder: none, bitpack, zstd or entropy; any other knob stands as name=value

A video setting's loss is what it loses beyond the reference setting, in the profiles' unit, as max_quality_loss is.
The front is over loss, seconds of a frame with decoding, and memory, both for one session alone, by the cost model.
"""

_PLOT_SUFFIXES = (".html", ".png", ".svg")
_MAX_SHOWN = 20
_FILTERS = ("kind", "workload", "model", "hardware", "config_id")
_LISTS = {"kv": "candidates", "video": "video_candidates"}
_NAMES = {"kv": "profile", "video": "video profile"}
_WAYS = {
    "kv": "measure some: controld profile --grid",
    "video": "measure some: controld profile --plane longlive",
}
_LOSS_BOUNDS = {"kv": "loss_upper_nats", "video": "loss_upper"}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--kind", choices=tuple(_LISTS), help="of which profiles (kv; video where there are only those)"
    )
    parser.add_argument("--workload", help="only this workload; with --import-kvserve: whose profiles they become")
    parser.add_argument(
        "--model",
        metavar="FINGERPRINT",
        help="only this model, its first 8 digits will do; with --import-kvserve: the model it is for",
    )
    parser.add_argument("--hardware", metavar="NAME", help="only what was measured on it, on either side")
    parser.add_argument("--config-id", metavar="ID", help="only this configuration")
    parser.add_argument("--pareto", action="store_true", help="only the Pareto front")
    parser.add_argument("--max-loss", type=float, metavar="LOSS", help="only those whose upper bound is at most this")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--plot", type=Path, metavar="PATH", help="write plots: a folder for front.html and front.png, or one file"
    )
    action.add_argument(
        "--envelope", action="store_true", help="which candidate is the fastest at which bandwidth, for --bytes"
    )
    action.add_argument("--export", type=Path, metavar="FILE", help="write every profile as one JSON document")
    action.add_argument("--import", type=Path, metavar="FILE", dest="import_file", help="read what --export wrote")
    action.add_argument("--import-kvserve", type=Path, metavar="FILE", help="read a profile library of KVServe")
    action.add_argument("--delete", action="store_true", help="forget the profiles that the options above name")
    parser.add_argument("--dry-run", action="store_true", help="--delete: only say which they are")
    parser.add_argument("--bytes", metavar="SIZE", help="--envelope: raw bytes of the transfer (default: the median)")


def run(arguments: Namespace) -> int:
    _check(arguments)
    client = AdminClient.from_arguments(arguments)
    if arguments.export is not None:
        return _export(client, arguments)
    if arguments.import_file is not None or arguments.import_kvserve is not None:
        return _import(client, arguments)
    if arguments.delete:
        return _delete(client, arguments)
    return _list(client, arguments)


def _check(arguments: Namespace) -> None:
    """Options that do not go together. Raises: ControldError."""
    given = [name for name in _FILTERS if getattr(arguments, name) is not None]
    given += [name for name, is_there in _row_filters(arguments).items() if is_there]
    for action, chosen, taken in (
        ("--export", arguments.export, ("kind",)),
        ("--import", arguments.import_file, ()),
        ("--import-kvserve", arguments.import_kvserve, ("workload", "model")),
        ("--delete", arguments.delete or None, _FILTERS),
    ):
        wrong = [f"--{name.replace('_', '-')}" for name in given if name not in taken]
        if chosen is not None and wrong:
            raise ControldError(f"{action} does not go with {' and '.join(wrong)}", code="cli.usage")
    if arguments.delete and not given:
        raise ControldError(
            "--delete needs to be told what", code="cli.usage",
            hint=f"at least one of {', '.join('--' + name.replace('_', '-') for name in _FILTERS)}",
        )  # fmt: skip
    if arguments.dry_run and not arguments.delete:
        raise ControldError("--dry-run goes with --delete", code="cli.usage")
    if arguments.bytes is not None and not arguments.envelope:
        raise ControldError("--bytes goes with --envelope", code="cli.usage")
    if arguments.envelope and arguments.kind == "video":
        raise ControldError("--envelope is of KV profiles: a video setting has no bandwidth", code="cli.usage")


def _row_filters(arguments: Namespace) -> dict[str, bool]:
    """The filters that are applied here, and whether each is given."""
    return {"pareto": arguments.pareto, "max_loss": arguments.max_loss is not None}


def _named(arguments: Namespace) -> dict[str, str | None]:
    """The filters that the daemon applies."""
    return {name: getattr(arguments, name) for name in _FILTERS}


def _list(client: AdminClient, arguments: Namespace) -> int:
    if arguments.plot is not None and arguments.plot.suffix and arguments.plot.suffix not in _PLOT_SUFFIXES:
        raise ControldError(
            f"{arguments.plot}: unknown kind of plot",
            code="cli.plot",
            hint=f"a folder, or a file that ends in {', '.join(_PLOT_SUFFIXES)}",
        )
    answer = client.get(
        "/v1/candidates", **{**_named(arguments), "kind": "kv" if arguments.envelope else arguments.kind}
    )
    for problem in answer.get("problems", ()):
        print(f"{problem['where']}: {problem['what']}", file=sys.stderr)
    kind = arguments.kind or next((kind for kind, name in _LISTS.items() if answer.get(name)), "kv")
    stored = answer[_LISTS[kind]]
    rows = sorted((row for row in stored if _wanted(row, kind, arguments)), key=_ORDERS[kind])
    if arguments.envelope and rows:
        from controld.cli.candidate_envelope import show_envelopes

        show_envelopes(rows, arguments)
        return 0
    written = [] if arguments.plot is None else _plot(rows, kind, arguments.plot)
    if arguments.json:
        print_json(rows)
    elif rows:
        _show(rows, kind)
        for path in written:
            print(f"plot: {path}")
        if kind == "kv" and answer.get("video_candidates"):
            print(f"and {_profiles(len(answer['video_candidates']), 'video')}: --kind video")
    else:
        print(_why_none(client, kind, arguments, len(stored)))
    return 0


def _plot(rows: list[dict[str, Any]], kind: str, path: Path) -> list[Path]:
    if kind == "video":
        from controld.cli.candidate_video_plot import write_video_plots

        return write_video_plots(rows, path)
    from controld.cli.candidate_plot import write_plots

    return write_plots(rows, path)


def _show(rows: list[dict[str, Any]], kind: str) -> None:
    from controld.cli.candidate_table import show_kv, show_video

    (show_video if kind == "video" else show_kv)(rows)


def _why_none(client: AdminClient, kind: str, arguments: Namespace, found: int) -> str:
    """What to say where nothing is shown: what the filters hide, or that nothing is there."""
    if found:
        names = [f"--{name.replace('_', '-')}" for name, given in _row_filters(arguments).items() if given]
        return f"none of {_profiles(found, kind)} passes {' and '.join(names)}"
    named = [
        f"{name.replace('_', ' ')} {value}" for name, value in _named(arguments).items() if name != "kind" and value
    ]
    everything = client.get("/v1/candidates", kind=kind)[_LISTS[kind]] if named else []
    if everything:
        workloads = ", ".join(sorted({row["workload"] for row in everything}))
        there = f"there are {_profiles(len(everything), kind)} of {workloads}"
        return f"no {_NAMES[kind]}s of {', '.join(named)}; {there}"
    return f"no {_NAMES[kind]}s; {_WAYS[kind]}"


def _profiles(count: int, kind: str = "kv") -> str:
    return f"{count} {_NAMES[kind]}{'' if count == 1 else 's'}"


def _delete(client: AdminClient, arguments: Namespace) -> int:
    dry_run = "true" if arguments.dry_run else "false"
    outcome = client.delete("/v1/candidates", **_named(arguments), dry_run=dry_run)
    if arguments.json:
        print_json(outcome)
        return 0
    would = "would be " if outcome["dry_run"] else ""
    count = outcome["matched" if outcome["dry_run"] else "deleted"]
    print(f"{_profiles(count)} {would}deleted")
    for one in outcome["profiles"][:_MAX_SHOWN]:
        sender, receiver = one["sender_hardware"], one["receiver_hardware"]
        places = sender if sender == receiver else f"{sender} -> {receiver}"
        model = one["model_fingerprint"][:12]
        print(f"  {one['kind']} {one['config_id']}, workload {one['workload']}, model {model}, {places}")
    if len(outcome["profiles"]) > _MAX_SHOWN:
        print(f"  and {len(outcome['profiles']) - _MAX_SHOWN} more; --json lists all")
    return 0


def _export(client: AdminClient, arguments: Namespace) -> int:
    kind = arguments.kind or _kind_to_export(client)
    document = client.get("/v1/candidates/export", kind=kind)
    target: Path = arguments.export
    scratch = target.with_name(target.name + ".partial")
    try:
        scratch.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise ControldError(f"{target}: cannot be written: {error.strerror}", code="cli.file") from error
    outcome = {"file": str(target), "kind": kind, "profiles": len(document["profiles"])}
    if arguments.json:
        print_json(outcome)
    else:
        print(f"{_profiles(len(document['profiles']), kind)}: {target}")
    return 0


def _kind_to_export(client: AdminClient) -> str:
    """KV, and video where there are only those; where there are both it says so."""
    there = client.get("/v1/candidates", limit=1)
    if there["total"] and there["video_total"]:
        print(f"without {_profiles(there['video_total'], 'video')}: --kind video", file=sys.stderr)
    return "video" if there["video_total"] and not there["total"] else "kv"


def _import(client: AdminClient, arguments: Namespace) -> int:
    source: Path = arguments.import_file or arguments.import_kvserve
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ControldError(f"{source}: cannot be read: {error.strerror}", code="cli.file") from error
    kind = "controld" if arguments.import_file is not None else "kvserve"
    outcome = client.post(
        "/v1/candidates/import", content, format=kind, model=arguments.model, workload=arguments.workload
    )
    if arguments.json:
        print_json(outcome)
        return 0
    print(f"{outcome['stored']} of {outcome['profiles']} profiles stored, {outcome['kept']} are no newer than ours")
    unmapped = outcome["unmapped"]
    if unmapped:
        print(f"{len(unmapped)} have no counterpart here:")
    for one in unmapped[:_MAX_SHOWN]:
        print(f"  {one['profile_id']}: {one['reason']}")
    if len(unmapped) > _MAX_SHOWN:
        print(f"  and {len(unmapped) - _MAX_SHOWN} more; --json lists all")
    return 0


def _wanted(row: dict[str, Any], kind: str, arguments: Namespace) -> bool:
    upper = row[_LOSS_BOUNDS[kind]]
    if arguments.max_loss is not None and (upper is None or upper > arguments.max_loss):
        return False
    return bool(row["pareto"]) or not arguments.pareto


def _kv_order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model_fingerprint"], row["workload"], row["loss_mean_nats"], -row["ratio"]


def _video_order(row: dict[str, Any]) -> tuple[Any, ...]:
    loss = row["loss_mean"]
    place = row["model_fingerprint"], row["workload"], row["hardware"]
    return *place, loss is None, loss or 0.0, row["seconds_per_frame"], row["config_id"]


_ORDERS = {"kv": _kv_order, "video": _video_order}
