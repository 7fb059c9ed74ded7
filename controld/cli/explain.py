"""`controld explain`: why a transfer was sent as it was, what would be decided, or why an engine runs as it does."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any
from urllib.parse import quote

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.errors import FieldError
from controld.contract.quantity import format_duration, format_size

SUMMARY = "say why a transfer was sent as it was, or what would be decided"
EXAMPLES = """\
examples:
  controld explain                                          the newest transfers, with their ids
  controld explain 5f3a9c.0                                 one of them: every arm, its cost, what stopped it
  controld explain --class chat --bytes 20MB --bandwidth 200Mbit    what would be decided now
  controld explain --engine video-0                         a video engine: every setting and what stopped it

Times are those the decision was made with; 'observed' is what then happened.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("transfer", nargs="?", metavar="ID", help="a transfer's id")
    parser.add_argument("--engine", metavar="ID", help="a video engine's agent id: why it runs under its setting")
    parser.add_argument("--class", dest="service_class", metavar="CLASS", help="service class (default: default)")
    parser.add_argument("--bytes", metavar="SIZE", help="size of the transfer, as 20MB")
    parser.add_argument("--bandwidth", metavar="RATE", help="of the link, as 200Mbit")
    parser.add_argument("--load", type=float, help="raw bytes per second offered over bandwidth (default: 0)")
    parser.add_argument("--tier", help="pd, prefix_store or video (default: pd)")
    parser.add_argument("--deployment", help="which plane, where there are several")
    parser.add_argument("--limit", type=int, default=20, help="how many of the newest transfers (default: 20)")


def run(arguments: Namespace) -> int:
    client = AdminClient.from_arguments(arguments)
    hypothetical = arguments.bytes is not None or arguments.bandwidth is not None
    if arguments.transfer and hypothetical:
        raise FieldError("ID", "is given beside --bytes and --bandwidth", hint="ask one question at a time")
    if arguments.engine and (arguments.transfer or hypothetical):
        raise FieldError("--engine", "is given beside a transfer", hint="ask one question at a time")
    if not arguments.transfer and not hypothetical and not arguments.engine:
        return _list(client, arguments)
    if arguments.engine:
        answer = client.get(f"/v1/engines/{quote(arguments.engine, safe='')}/explain")
    elif arguments.transfer:
        answer = client.get(f"/v1/decisions/{quote(arguments.transfer, safe='')}/explain")
    else:
        query = {"class": arguments.service_class, "tier": arguments.tier, "deployment": arguments.deployment}
        asked = {"bytes": arguments.bytes, "bandwidth": arguments.bandwidth, "load": arguments.load}
        answer = client.get("/v1/explain", **query, **asked)
    if arguments.json:
        print_json(answer)
    else:
        print(answer["text"])
    return 0


def _list(client: AdminClient, arguments: Namespace) -> int:
    query: dict[str, Any] = {"limit": arguments.limit * 2, "class": arguments.service_class}
    answer = client.get("/v1/decisions", **query)
    if arguments.json:
        print_json(answer)
        return 0
    from rich.table import Table

    table = Table("transfer", "class", "arm", "KV", "on the wire", "took", "path", "verdict", "reason")
    sender_halves = [effect for effect in answer["decisions"] if effect["half"] == "sender"]
    for effect in sender_halves[: arguments.limit]:
        table.add_row(
            effect["transfer_id"], effect["service_class"], effect["arm_id"], format_size(effect["raw_bytes"]),
            format_size(effect["wire_bytes"]), format_duration(effect["total_s"]), effect["path"], effect["verdict"],
            effect["reason"] or ("explored" if effect["explored"] else ""),
        )  # fmt: skip
    console().print(table if table.row_count else "no transfers yet")
    return 0
