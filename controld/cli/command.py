"""What a command is. Built-in ones are modules; those of data planes are any object of this shape."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, Protocol


class Command(Protocol):
    """A command: a module of this package, or what an entry point of the group `controld.commands` names.

    Attributes:
        SUMMARY: one line for `controld --help`.
        EXAMPLES: what follows the options in `controld COMMAND --help`; lines that can be pasted.

    Every command has the options `--json` (`arguments.json`) and `--config` (`arguments.config`, a path or None).
    """

    SUMMARY: str
    EXAMPLES: str

    def configure(self, parser: ArgumentParser) -> None:
        """Add the options of its own."""
        ...

    def run(self, arguments: Namespace) -> int:
        """Do it; the exit status. A `ControldError` is shown by the caller, with exit status 1."""
        ...


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
