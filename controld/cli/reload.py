"""`controld reload`: have the policies read again, and say what came of it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from controld.cli.admin_client import AdminClient, AdminError
from controld.cli.command import print_json

SUMMARY = "have the daemon read its policies again"
EXAMPLES = """\
examples:
  controld reload          fails where no daemon listens
  controld reload --wait   waits up to --timeout for a daemon that is just starting

Prints the generation in force. Exit status 1 where the policies are refused: the last good ones stay in force.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="keep trying while no daemon listens")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for --wait (default: 10)")


def run(arguments: Namespace) -> int:
    client = AdminClient.from_arguments(arguments, patience_s=arguments.timeout if arguments.wait else 0.0)
    response = client.request("POST", "/v1/reload")
    outcome = response.body
    if response.status not in (200, 422) or not isinstance(outcome, dict) or "generation" not in outcome:
        problem = outcome if isinstance(outcome, dict) else {}
        raise AdminError(
            str(problem.get("title", f"the reload was answered with status {response.status}")),
            code=str(problem.get("code", "admin.unexpected")),
            hint=str(problem.get("hint", "")),
            status=response.status,
        )
    refused = response.status == 422
    if arguments.json:
        print_json(outcome)
    elif refused:
        for problem in outcome["problems"]:
            print(problem["text"], file=sys.stderr)
        print(f"refused: generation {outcome['generation']} stays in force", file=sys.stderr)
    else:
        print(f"generation {outcome['generation']} in force, {'changed' if outcome['changed'] else 'unchanged'}")
    return 1 if refused else 0
