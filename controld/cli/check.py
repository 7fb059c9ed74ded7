"""`controld check`: the daemon's own parser, without a daemon."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from controld.cli.command import print_json
from controld.config import find_config_file, load_config
from controld.policy.loader import SourceFile, is_policy_file, parse_policies, read_sources
from controld.policy.model import Policy
from controld.policy.problem import PolicyErrors, Problem, SettingsErrors

SUMMARY = "check policies, or the daemon's settings, before they are live"
EXAMPLES = """\
examples:
  controld check policies/                 a directory, as the daemon would load it
  controld check policies/chat.yaml a.yaml these files, as if they were one directory
  controld check                           the settings file and the policies that it names
  controld check --json policies/ | jq -r '.problems[].text'

A problem is one line: file:line:col: path: problem (hint). Exit status 1 where there is any.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a policy file or a directory of them")


def run(arguments: Namespace) -> int:
    problems: tuple[Problem, ...] = ()
    policies: tuple[Policy, ...] = ()
    files = 0
    try:
        paths = arguments.paths
        if not paths:
            paths = [load_config(find_config_file(arguments.config)).policy.directory]
        sources = _read_all(paths)
        files = len(sources)
        policies = parse_policies(sources)
    except SettingsErrors as error:
        problems = error.problems
    if arguments.json:
        names = [{"name": p.name, "file": p.source_file, "kind": p.kind, "deployment": p.deployment} for p in policies]
        print_json({"ok": not problems, "policies": names, "problems": [problem.to_json() for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        for policy in policies:
            classes = ", ".join(service_class.name for service_class in policy.classes)
            print(f"{policy.source_file}: policy {policy.name} for {policy.kind}/{policy.deployment}: {classes}")
        if problems:
            print(
                f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
                + (f" in {files} files" * (files > 1))
            )
    return 1 if problems else 0


def _read_all(paths: list[Path]) -> tuple[SourceFile, ...]:
    sources: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    for path in paths:
        if path.is_file() and not is_policy_file(path):
            hint = "the daemon reads *.yaml and *.yml, and no hidden files"
            problems.append(Problem(str(path), 0, 0, "", "is not a policy file", hint))
            continue
        try:
            sources.update((source.file, source) for source in read_sources(path))
        except PolicyErrors as error:
            problems.extend(error.problems)
    if problems:
        try:
            parse_policies(tuple(sources.values()))
        except PolicyErrors as error:
            problems.extend(error.problems)
        raise PolicyErrors(problems)
    return tuple(sources.values())
