"""`controld status`: what the daemon does now."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.quantity import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "show agents, links, policies and what transfers did"
EXAMPLES = """\
examples:
  controld status
  controld status --json | jq .transfers

An agent that is not attached moves its KV uncompressed; the reason stands beside it. A tenant's slowdown is the time of
its recent transfers, waiting included, over what they would take alone; Jain's index is 1 where all tenants are slowed
down alike (by weight).
"""


def configure(parser: ArgumentParser) -> None:
    del parser


def run(arguments: Namespace) -> int:
    status = AdminClient.from_arguments(arguments).get("/v1/status")
    if arguments.json:
        print_json(status)
    else:
        _show(status)
    return 0


def _show(status: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(
        f"controld {escape(status['version'])}, up {format_duration(status['uptime_s'])},"
        f" policy generation {status['policy_generation']}, table version {status['published_version']}"
    )
    for problem in status["policy_problems"]:
        out.print(f"[red]policy files refused:[/red] {escape(problem['text'])}")
    for alarm in status["alarms"]:
        out.print(f"[red]alarm[/red] {escape(alarm['where'])}: {escape(alarm['what'])}")
    agents = Table("agent", "plane", "role", "attached", "table", title="Agents")
    for agent in status["agents"]:
        attached = "yes" if agent["attached"] else f"no: {agent['attach_reason']}"
        table = f"{agent['effective_version']}{' (degraded)' if agent['degraded'] else ''}"
        plane = f"{agent['kind']}/{agent['deployment']}"
        agents.add_row(*map(escape, (agent["agent_id"], plane, agent["role"], attached, table)))
    links = Table("agent", "tier", "bandwidth", "age", "offered", "backlog", title="Links, as agents see them")
    for link in status["links"]:
        known = link["bandwidth_bytes_per_s"] > 0
        spread = f" +- {format_rate(link['bandwidth_sd_bytes_per_s'])}"
        links.add_row(
            escape(link["agent_id"]),
            escape(link["tier"]),
            format_rate(link["bandwidth_bytes_per_s"]) + spread if known else "not seen yet",
            format_duration(link["bandwidth_age_s"]) if known else "-",
            format_rate(link["offered_bytes_per_s"]),
            format_size(link["backlog_bytes"]),
        )
    transfers = Table("class", "arm", "path", "transfers", "KV", "on the wire", "ratio", title="Transfers so far")
    for row in status["transfers"]:
        ratio = f"{row['raw_bytes'] / row['wire_bytes']:.2f}" if row["wire_bytes"] else "-"
        sizes = (format_size(row["raw_bytes"]), format_size(row["wire_bytes"]), ratio)
        names = map(escape, (row["service_class"], row["arm_id"], row["path"]))
        transfers.add_row(*names, str(row["transfers"]), *sizes)
    lately = Table("class", "median", "P90", "P99", "transfers", title="Sizes of transfers, lately (raw KV)")
    for name, size in status["sizes"].items():
        shown = (format_size(size[key]) for key in ("median_bytes", "p90_bytes", "p99_bytes"))
        lately.add_row(escape(name), *shown, f"{size['weight']:.0f}")
    engines = _engines(status.get("engines", []))
    for table_or_none in (agents, links, transfers, lately, engines, _tenants(status), _guard_table(status["guard"])):
        if table_or_none.row_count:
            out.print(table_or_none)
    for plane in status["tenants"]:
        if plane["jain_index"] is not None:
            out.print(
                f"fairness of {escape(plane['kind'] + '/' + plane['deployment'])}:"
                f" Jain's index of slowdown {plane['jain_index']:.2f}"
            )


def _engines(rows: list[dict[str, Any]]) -> Table:
    """Video engines; a setting is in force once the engine answered."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("engine", "sessions", "setting", "in force", "targets", title="Video engines")
    for row in rows:
        state, wanted = row["state"] or {}, row["wanted"]
        table.add_row(
            escape(row["agent_id"]),
            str(sum(state.get("sessions", {}).values())),
            escape(row["wanted_label"] or "-"),
            "yes" if wanted and state.get("setting_id") == wanted else "not yet" if wanted else "-",
            "met" if row["meets_targets"] else "missed" if wanted else "-",
        )
    return table


def _tenants(status: dict[str, Any]) -> Table:
    """Tenants of policies that have several."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "plane",
        "tenant",
        "share",
        "transfers",
        "KV",
        "on the wire",
        "slowdown",
        title="Tenants since the daemon started",
    )
    for plane in status["tenants"]:
        for tenant in plane["tenants"] if len(plane["tenants"]) > 1 else ():
            slowdown = tenant["slowdown"]
            table.add_row(
                escape(f"{plane['kind']}/{plane['deployment']}"),
                escape(tenant["name"]),
                f"{tenant['share'] * 100:.3g}%",
                str(tenant["transfers"]),
                format_size(tenant["raw_bytes"]),
                format_size(tenant["wire_bytes"]),
                "-" if slowdown is None else f"{slowdown:.2f}x",
            )
    return table


def _guard_table(rows: list[dict[str, Any]]) -> Table:
    """What the quality guard has seen; suspicion reaches 1 where an arm is pinned off."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("class", "arm", "state", "checked", "error", "normal", "suspicion", title="Quality guard")
    for row in rows:
        normal = "not known yet" if row["normal_error"] is None else f"{row['normal_error']:.4g} ({row['normal_from']})"
        table.add_row(
            escape(row["service_class"]),
            escape(row["arm_id"]),
            escape(row["state"].replace("_", " ")),
            str(row["samples"]),
            f"{row['last_error']:.4g}",
            escape(normal),
            f"{row['suspicion']:.2f}",
        )
    return table
