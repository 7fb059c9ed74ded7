"""`controld diff`: what a policy edit would change in decisions, before it is applied."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.policy.loader import SourceFile, is_policy_file, parse_policies, read_sources
from controld.policy.problem import PolicyErrors, Problem

SUMMARY = "say what a policy edit would change in decisions, before it is applied"
EXAMPLES = """\
examples:
  controld diff                        the policy directory of the settings file, edited but not reloaded
  controld diff chat-edited.yaml       this file in the place of the policy of its name or of its planes
  controld diff policies-next/         this directory in the place of all policies
  controld diff --json chat.yaml | jq '.policies[].decisions[] | {service_class, changed, cells}'

The daemon decides with its own profiles and what it has learned, for the policies in force and for the edited ones, and
compares: which arm takes whose place where, with the predicted time and loss of both in the middle of each range.
Nothing is applied. A broken file is refused as by controld check, with exit status 1.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="POLICY", help="an edited policy, or a directory of them"
    )


def run(arguments: Namespace) -> int:
    paths: list[Path] = arguments.paths
    whole = not paths or any(path.is_dir() for path in paths)
    if not paths:
        from controld.config import find_config_file, load_config

        paths = [load_config(find_config_file(arguments.config)).policy.directory]
    sources = _read(paths)
    parse_policies(sources)
    files = [{"file": source.file, "content": source.content.decode(errors="surrogateescape")} for source in sources]
    answer = AdminClient.from_arguments(arguments).post("/v1/policies/diff", {"files": files, "whole": whole})
    if arguments.json:
        print_json(answer)
    else:
        print(answer["text"])
    return 0


def _read(paths: list[Path]) -> list[SourceFile]:
    problems: list[Problem] = []
    sources: dict[str, SourceFile] = {}
    for path in paths:
        if path.is_file() and not is_policy_file(path):
            problems.append(
                Problem(str(path), 0, 0, "", "is not a policy file", "policies end in .yaml or .yml and are not hidden")
            )
            continue
        try:
            sources.update((source.file, source) for source in read_sources(path))
        except PolicyErrors as error:
            problems += error.problems
    if problems:
        raise PolicyErrors(problems)
    return list(sources.values())
