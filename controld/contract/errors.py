"""The one error family. Codes are stable: REST, CLI and logs show them."""

from __future__ import annotations


class ControldError(Exception):
    """An error with a stable code and a hint.

    Args:
        message: what is wrong, naming the field where there is one.
        code: stable identifier, `area.problem` in lower snake case.
        hint: what the reader can do about it; empty where nothing sensible can be said.
    """

    def __init__(self, message: str, *, code: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class FieldError(ControldError):
    """A field holds a value that it must not hold.

    Args:
        field: path of the field, as the user wrote it (`classes[0].slo.ttft`).
        problem: what is wrong with the value.
        hint: what would be right.
        code: stable identifier.
    """

    def __init__(self, field: str, problem: str, *, hint: str = "", code: str = "field.invalid") -> None:
        super().__init__(f"{field}: {problem}", code=code, hint=hint)
        self.field = field
        self.problem = problem
