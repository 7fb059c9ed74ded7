"""`controld space`: the strategy spaces of connected planes as trees, with their sizes."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.configuration import Value
from controld.contract.errors import ControldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace

if TYPE_CHECKING:
    from rich.tree import Tree

SUMMARY = "show what a plane can be told to do: its parameters, their values and what excludes what"
EXAMPLES = """\
examples:
  controld space                         every connected plane, as a tree
  controld space --plane sglang          only planes of this kind
  controld space --json | jq '.[] | [.deployment, .lossy_parts, .configurations]'
  controld space --json | jq '.[0].space.parameters[] | select(.name == "quantise").values'

How to read the tree: a parameter below "quantise = levels" exists only where quantise is levels. Neighbouring values of
an ordered parameter are alike. A parameter that is at its default is left out of a configuration. Combinations under
"forbidden together" are refused, for the reason above them. A lossy part is a configuration without its lossless
parameters: it alone decides quality, so the model is run once for each and its coders cost bytes and time only.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--plane", metavar="KIND", help="only planes of this kind, such as sglang")


def run(arguments: Namespace) -> int:
    entries = AdminClient.from_arguments(arguments).get("/v1/spaces")["spaces"]
    shown = [entry for entry in entries if arguments.plane in (None, entry["kind"])]
    if arguments.plane is not None and not shown:
        kinds = sorted({entry["kind"] for entry in entries})
        hint = f"connected: {', '.join(kinds)}" if kinds else "no agent that advertises a space is connected"
        raise ControldError(f"no plane of kind {arguments.plane} is connected", code="cli.plane", hint=hint)
    if arguments.json:
        print_json(shown)
    elif shown:
        for entry in shown:
            _show(entry)
    else:
        print("no agent that advertises a strategy space is connected; controld status lists the agents")
    return 0


def _show(entry: dict[str, Any]) -> None:
    from rich.markup import escape

    out = console()
    agents = ", ".join(entry["agents"])
    out.print(f"[bold]{escape(entry['kind'])}/{escape(entry['deployment'])}[/bold], model {escape(entry['model'])}")
    out.print(f"advertised by {escape(agents)}")
    if entry["problem"]:
        out.print(f"[red]cannot be read:[/red] {escape(entry['problem'])}\n")
        return
    space = StrategySpace.from_json(json.dumps(entry["space"]))
    out.print(f"{entry['lossy_parts']:,} lossy parts, {entry['configurations']:,} configurations")
    out.print(space_tree(space))
    out.print()


def space_tree(space: StrategySpace) -> Tree:
    """Parameters below the values of the last parent that they need, then what is forbidden."""
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree("parameters")
    nodes: dict[str, Tree] = {}
    places: dict[tuple[str, tuple[Any, ...]], Tree] = {}
    for parameter in space.parameters:
        conditions = [condition for condition in space.conditions if condition.parameter == parameter.name]
        nearest, others = _nearest(space, conditions)
        if nearest is None:
            node = tree
        else:
            place = (nearest.parent, nearest.parent_values)
            if place not in places:
                places[place] = nodes[nearest.parent].add(_pair(space, nearest.parent, nearest.parent_values))
            node = places[place]
        nodes[parameter.name] = node.add(_parameter_text(space, parameter, others))
    if space.forbidden:
        branch = tree.add("forbidden together")
        for reason, rules in _by_reason(space.forbidden).items():
            leaf = branch.add(f"[yellow]{escape(reason)}[/yellow]")
            for rule in rules:
                leaf.add(" and ".join(_pair(space, name, values) for name, values in rule.values.items()))
    return tree


def _nearest(space: StrategySpace, conditions: list[Condition]) -> tuple[Condition | None, list[Condition]]:
    """The condition on the last parent, and those on others that this parent does not have itself."""
    if not conditions:
        return None, []
    names = [parameter.name for parameter in space.parameters]
    nearest = max(conditions, key=lambda condition: names.index(condition.parent))
    implied = {(c.parent, c.parent_values) for c in space.conditions if c.parameter == nearest.parent}
    others = [c for c in conditions if c is not nearest and (c.parent, c.parent_values) not in implied]
    return nearest, others


def _by_reason(forbidden: tuple[Forbidden, ...]) -> dict[str, list[Forbidden]]:
    groups: dict[str, list[Forbidden]] = {}
    for rule in forbidden:
        groups.setdefault(rule.reason, []).append(rule)
    return groups


def _parameter_text(space: StrategySpace, parameter: Parameter, others: list[Condition]) -> str:
    from rich.markup import escape

    notes = ["ordered"] if parameter.ordered else []
    notes += [] if parameter.lossy else ["lossless"]
    notes += [f"default {_word(parameter.default)}"] if parameter.default is not None else []
    notes += [f"only where {_pair(space, condition.parent, condition.parent_values)}" for condition in others]
    values = escape(", ".join(_word(value) for value in parameter.values))
    text = f"[bold]{escape(parameter.name)}[/bold]: {values}"
    return f"{text} [dim]({'; '.join(notes)})[/dim]" if notes else text


def _pair(space: StrategySpace, name: str, values: tuple[Value, ...]) -> str:
    """What a rule or a condition asks of a parameter, in the shorter of two ways."""
    from rich.markup import escape

    every = next(parameter.values for parameter in space.parameters if parameter.name == name)
    others = [value for value in every if value not in values]
    if not others:
        return escape(f"{name} = any")
    if len(others) < len(values):
        return escape(f"{name} = all but {', '.join(map(_word, others))}")
    return escape(f"{name} = {' or '.join(map(_word, values))}")


def _word(value: Value | None) -> str:
    return value if isinstance(value, str) else json.dumps(value)
