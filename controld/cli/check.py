"""`controld check`: the daemon's own parsers, without a daemon."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from controld.cli.command import print_json
from controld.config import find_config_file, is_config_file, load_config
from controld.contract.quantity import format_rate
from controld.policy.loader import SourceFile, is_policy_file, parse_with_warnings, read_sources
from controld.policy.model import Policy
from controld.policy.problem import Problem, SettingsErrors

SUMMARY = "check policies, or the daemon's settings, before they are live"
EXAMPLES = """\
examples:
  controld check policies/                  a directory, as the daemon would load it
  controld check policies/chat.yaml a.yaml  these files, as if they were one directory
  controld check etc/controld.yaml          the daemon's settings
  controld check                            the settings file that is found, and the policies it names
  controld check --json policies/ | jq -r '.problems[].text'

A problem is one line: file:line:column: path: problem (hint). Exit status 1 where there is any.
A warning is such a line, too, and changes nothing. Of tenants is shown what each gets while all want more.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="a policy, a directory of them, or a settings file"
    )


def run(arguments: Namespace) -> int:
    paths: list[Path] = arguments.paths
    configs = [path for path in paths if is_config_file(path)]
    policy_paths = [path for path in paths if path not in configs]
    problems: set[Problem] = set()
    if not paths:
        configs = [find_config_file(arguments.config)]
    for path in configs:
        try:
            config = load_config(path)
        except SettingsErrors as error:
            problems.update(error.problems)
            continue
        if not paths:
            policy_paths = [_near(config.policy.directory)]
    sources = _read(policy_paths, problems)
    policies, warnings = _parse(sources, problems)
    ordered = sorted(problems)
    if arguments.json:
        described = [_describe(policy) for policy in policies]
        problems_json = [problem.to_json() for problem in ordered]
        warnings_json = [warning.to_json() for warning in warnings]
        print_json({"ok": not ordered, "policies": described, "problems": problems_json, "warnings": warnings_json})
    else:
        for warning in warnings:
            print(f"warning: {warning}")
        _print(ordered, policies, [path for path in configs if not ordered])
    return 1 if ordered else 0


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _read(paths: list[Path], problems: set[Problem]) -> list[SourceFile]:
    sources: dict[str, SourceFile] = {}
    for path in paths:
        if path.is_file() and not is_policy_file(path):
            hint = "the daemon reads *.yaml and *.yml, and no hidden files"
            problems.add(Problem(str(path), 0, 0, "", "is not a policy file", hint))
            continue
        try:
            sources.update((source.file, source) for source in read_sources(path))
        except SettingsErrors as error:
            problems.update(error.problems)
    return list(sources.values())


def _parse(sources: list[SourceFile], problems: set[Problem]) -> tuple[tuple[Policy, ...], tuple[Problem, ...]]:
    try:
        return parse_with_warnings(sources)
    except SettingsErrors as error:
        problems.update(error.problems)
        return (), ()


def _describe(policy: Policy) -> dict[str, Any]:
    shares = policy.tenant_shares
    return {
        "name": policy.name,
        "file": policy.source_file,
        "kind": policy.kind,
        "deployment": policy.deployment,
        "tenants": [
            {"name": t.name, "weight": t.weight, "guaranteed_share": t.guaranteed_share, "share": shares[t.name]}
            for t in policy.tenants
        ],
    }


def _print(problems: list[Problem], policies: tuple[Policy, ...], configs: list[Path]) -> None:
    for problem in problems:
        print(problem)
    if problems:
        files = len({problem.file for problem in problems})
        print(f"{_count(len(problems), 'problem')} in {_count(files, 'file')}")
        return
    for path in configs:
        print(f"{path}: settings of the daemon")
    for policy in policies:
        classes = ", ".join(service_class.name for service_class in policy.classes)
        print(f"{policy.source_file}: policy {policy.name} for {policy.kind}/{policy.deployment}: {classes}")
        if len(policy.tenants) > 1:
            print(f"  tenants, while all want more: {_shares(policy)}")


def _shares(policy: Policy) -> str:
    shares, link = policy.tenant_shares, policy.link("default")
    rate = link.rate_bytes_per_s if link else 0.0
    return ", ".join(
        f"{t.name} {shares[t.name] * 100:.3g}%"
        + (f" of {format_rate(rate)}" if rate else "")
        + (f" (at least {t.guaranteed_share * 100:.3g}%)" if t.guaranteed_share else "")
        for t in policy.tenants
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
