"""What is wrong with a settings file, where, and what would be right: policies and the daemon's own file alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from controld.contract.errors import ControldError


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One problem of one file.

    Args:
        file: the file as the user would name it.
        line, column: where, counted from 1; 0 where the problem has no place inside the file.
        path: of the value (`classes[0].slo.ttft`); empty for the whole file.
        problem: what is wrong.
        hint: what would be right; empty where nothing sensible can be said.
    """

    file: str
    line: int
    column: int
    path: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: {path}{self.problem}{hint}"

    def to_json(self) -> dict[str, str | int]:
        """As REST and `--json` show it; `text` is the line that a person reads."""
        return {**asdict(self), "text": str(self)}


class SettingsErrors(ControldError):  # noqa: N818 - it is all of them
    """All problems of one or several files, in the order of their places.

    Args:
        problems: at least one.
        code: stable identifier.
    """

    def __init__(self, problems: Iterable[Problem], *, code: str) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems), code=code)


class PolicyErrors(SettingsErrors):
    """The policy directory is refused as a whole."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__(problems, code="policy.invalid")


class ConfigErrors(SettingsErrors):
    """The daemon's own settings file is refused."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__(problems, code="config.invalid")
