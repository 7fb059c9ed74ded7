"""`controld release`: let an arm be used again that was taken out of use."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from urllib.parse import quote

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json

SUMMARY = "let an arm be used again that was taken out of use"
EXAMPLES = """\
examples:
  controld status                    the alarms name the arms and the reasons
  controld release 9c1e0f4b7a2d6653  everywhere, for every class
  controld release 9c1e0f4b7a2d6653 --deployment chat

Its evidence starts anew: an arm that is still broken will be out again. Better find out why, or profile it again:
a profile that is measured after the breach releases the arm by itself. Exit status 1 where it is not out of use.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("arm", metavar="ARM", help="the configuration's id")
    parser.add_argument("--deployment", metavar="NAME", help="only for the planes of this deployment")


def run(arguments: Namespace) -> int:
    path = f"/v1/pins/{quote(arguments.arm, safe='')}/release"
    outcome = AdminClient.from_arguments(arguments).post(path, deployment=arguments.deployment)
    if arguments.json:
        print_json(outcome)
        return 0
    for pin in outcome["released"]:
        for_class = "" if pin["service_class"] == "*" else f" for class {pin['service_class']}"
        where = "/".join(pin[name] for name in ("kind", "deployment", "agent_id") if name in pin)
        print(f"{where}: {outcome['arm_id']} may be used again{for_class}; it was out: {pin['reason']}")
    return 0
