"""The terminal as tables are drawn on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 200
"""Into a pipe or a file tables keep all their columns."""


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for every table where there is none."""
    from rich.console import Console

    made = Console(highlight=False, stderr=stderr)
    return made if made.is_terminal else Console(highlight=False, stderr=stderr, width=PIPE_COLUMNS)
