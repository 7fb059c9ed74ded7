"""`controld`: finds the command, reads its options, shows its errors. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys

# Not typing's constant: its import would come before SIGHUP is blocked.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser

    from controld.cli.command import Command
    from controld.contract.errors import ControldError

BUILT_IN = {
    "serve": "run the daemon",
    "check": "check policies, or the daemon's settings, before they are live",
    "diff": "say what a policy edit would change in decisions, before it is applied",
    "status": "show agents, links, policies and what transfers did",
    "explain": "say why a transfer was sent as it was, or what would be decided",
    "candidates": "show profiles, their quality, bytes and time, and the Pareto front; carry or delete them",
    "space": "show what a plane can be told to do: its parameters, their values and what excludes what",
    "profile": "measure configurations on the real model",
    "replay": "say what would have happened to a trace of requests under a policy",
    "release": "let an arm be used again that was taken out of use",
    "reload": "have the daemon read its policies again",
}
"""Commands of this package with their summaries: each is a module of the same name."""

PLUGIN_GROUP = "controld.commands"

_EXAMPLES = """\
examples:
  controld check policies/            say what is wrong, with file, line and column
  controld serve --config etc/controld.yaml
  controld reload --wait              exit status 1, and why, if the policies are refused

The settings file is --config, else $CONTROLD_CONFIG, else /etc/controld/controld.yaml, else etc/controld.yaml here.
Exit status: 0 well, 1 refused or failed, 2 wrong usage.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if "serve" in arguments:
        # Before anything else: SIGHUP would end the process until the daemon handles it. Blocked, it waits.
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    return _dispatch(arguments)


def _dispatch(arguments: list[str]) -> int:
    from controld.contract.errors import ControldError

    _show_any_text()
    parser, commands = _build_parser(arguments)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        return commands[parsed.command].run(parsed)
    except ControldError as error:
        _show(error, as_json=parsed.json)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more when it flushes at the end.
        sys.stdout = None
        return 1


def _build_parser(arguments: list[str]) -> tuple[ArgumentParser, dict[str, Command]]:
    """A parser in which only the command that is asked for is imported."""
    import argparse
    from importlib import import_module

    from controld import __version__

    parser = argparse.ArgumentParser(
        prog="controld",
        description="Decides how inference state is compressed on its way between machines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"controld {__version__}")
    parser.set_defaults(config=None, json=False)
    _add_shared_options(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    wanted = _command_of(arguments)
    commands: dict[str, Command] = {}

    def add(name: str, summary: str, command: Command | None) -> None:
        child = subparsers.add_parser(
            name,
            help=summary,
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=command.EXAMPLES if command else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command is None:
            return
        commands[name] = command
        command.configure(child)
        _add_shared_options(child)

    for name, summary in BUILT_IN.items():
        module: Command | None = import_module(f"controld.cli.{name}") if name == wanted else None
        add(name, summary, module)
    if wanted not in BUILT_IN:
        from importlib.metadata import entry_points

        for entry_point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name):
            if entry_point.name not in BUILT_IN:
                plugin: Command | None = entry_point.load() if entry_point.name == wanted else None
                add(entry_point.name, plugin.SUMMARY if plugin else f"from {entry_point.module}", plugin)
    return parser, commands


def _add_shared_options(parser: ArgumentParser) -> None:
    """The options that stand before or after the command: without defaults, so that the second place undoes nothing."""
    from argparse import SUPPRESS
    from pathlib import Path

    parser.add_argument("--config", type=Path, metavar="FILE", default=SUPPRESS, help="the daemon's settings file")
    parser.add_argument("--json", action="store_true", default=SUPPRESS, help="print JSON for programs")


def _command_of(arguments: list[str]) -> str | None:
    """The first word that is neither an option nor the value of one."""
    words = iter(arguments)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _show_any_text() -> None:
    """A file name may hold bytes that are no text; printing it must not fail."""
    import io

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _show(error: ControldError, *, as_json: bool) -> None:
    import json

    from controld.policy.problem import SettingsErrors

    problems = error.problems if isinstance(error, SettingsErrors) else ()
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        shown = (
            {"error": body, "problems": [problem.to_json() for problem in problems]} if problems else {"error": body}
        )
        print(json.dumps(shown, ensure_ascii=False))
    elif problems:
        print(error.message, file=sys.stderr)
    else:
        print(f"controld: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
