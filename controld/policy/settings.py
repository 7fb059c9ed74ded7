"""From strict YAML through a pydantic model to problems with places: shared by policies and the daemon's own file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from controld.contract.errors import FieldError
from controld.contract.quantity import parse_duration_s, parse_rate_bytes_per_s, parse_share, parse_size_bytes
from controld.policy.problem import Problem
from controld.policy.strict_yaml import Node, Position, Sequence, Table, parse, path_text, to_plain

PIN_PATTERN = "^(raw|[0-9a-f]{16})$"

Path = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)


class StrictModel(BaseModel):
    """Nothing is coerced, nothing unknown is taken."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def refuse(problem: str, hint: str = "") -> PydanticCustomError:
    """An error for validators, with a hint of its own."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "hint": hint})


def _quantity(convert: Callable[..., float], *, positive: bool = False, most: float | None = None) -> PlainValidator:
    def validate(value: object) -> float:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise refuse(f"must be a number with a unit, not {_shown(value)}")
        # A bare number is shown as it would look in quotes: it is the unit that is missing, not the type.
        text = value if isinstance(value, str) else f"{value:.12g}"
        try:
            number = convert(text, field="value")
        except FieldError as error:
            raise refuse(error.problem, error.hint) from error
        if positive and number <= 0:
            raise refuse(f'"{value}" is not above zero')
        if most is not None and number > most:
            raise refuse(f'"{value}" is above {most * 100:g}%')
        return number

    return PlainValidator(validate)


DurationS = Annotated[float, _quantity(parse_duration_s, positive=True)]
SizeBytes = Annotated[float, _quantity(parse_size_bytes, positive=True)]
RateBytesPerS = Annotated[float, _quantity(parse_rate_bytes_per_s, positive=True)]
Share = Annotated[float, _quantity(parse_share)]
PositiveShare = Annotated[float, _quantity(parse_share, positive=True)]
HalfShare = Annotated[float, _quantity(parse_share, most=0.5)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


def suggest(word: str, known: Iterable[str], label: str) -> str:
    """A hint for a word that is not known: the one that was meant, or all that are."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{label}: {', '.join(known) or 'none'}"


class Reading:
    """One file while its problems are collected.

    Args:
        file: the name to show.
        content: its bytes.
    """

    def __init__(self, file: str, content: bytes) -> None:
        document = parse(content)
        self.file = file
        self.root = document.root if isinstance(document.root, Table) else None
        self.problems = [Problem(file, *flaw.position, flaw.path, flaw.problem, flaw.hint) for flaw in document.flaws]
        if document.root is not None and self.root is None:
            self.add((), "the file must be a mapping", position=document.root.position)

    def add(self, path: Path, problem: str, hint: str = "", *, position: Position | None = None) -> None:
        """Note a problem at a path; its place is the value's, or its nearest parent's, unless given."""
        place = position or self.position(path)
        self.problems.append(Problem(self.file, *place, path_text(path), problem, hint))

    def position(self, path: Path, *, of_key: bool = False) -> Position:
        """Where a value (or its key) stands; the nearest parent's place where it is not there."""
        node: Node | None = self.root
        place = Position(1, 1)
        for index, part in enumerate((None, *path)):
            if part is not None:
                key_place = _key_position(node, part)
                node = _child(node, part)
                if node is None:
                    return key_place or place
                if of_key and index == len(path) and key_place:
                    return key_place
            if node is not None:
                place = node.position
        return place

    def validate(self, model: type[ModelT]) -> ModelT | None:
        """The file as a model; None, and problems noted, where it is not one."""
        if self.root is None:
            return None
        try:
            return model.model_validate(to_plain(self.root))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                self._note(model, detail)
            return None

    def _note(self, model: type[BaseModel], detail: ErrorDetails) -> None:
        of_key = detail["loc"][-1:] == ("[key]",)
        path: Path = detail["loc"][:-1] if of_key else detail["loc"]
        problem, hint = _explain(detail)
        if detail["type"] == "extra_forbidden":
            of_key = True
            known = _known_keys(model, path[:-1])
            hint = suggest(str(path[-1]), known, "known")
        place = self.position(path, of_key=of_key)
        # A value that YAML already refused needs no second complaint.
        if not any((p.line, p.column) == place and p.path == path_text(path) for p in self.problems):
            self.add(path, problem, hint, position=place)


def _child(node: Node | None, part: str | int) -> Node | None:
    if isinstance(node, Table) and isinstance(part, str):
        return node.get(part)
    if isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
        return node.items[part]
    return None


def _key_position(node: Node | None, part: str | int) -> Position | None:
    entry = node.entries.get(part) if isinstance(node, Table) and isinstance(part, str) else None
    return entry.key_position if entry else None


def _known_keys(model: type[BaseModel], path: Path) -> list[str]:
    """Keys that a model has at a path."""
    current: Any = model
    for part in path:
        if isinstance(part, str) and isinstance(current, type) and issubclass(current, BaseModel):
            current = _field(current, part).annotation
            current = (
                next((a for a in get_args(current) if a is not type(None)), current) if _optional(current) else current
            )
        else:
            current = get_args(current)[-1]
    return [info.alias or name for name, info in current.model_fields.items()]


def _optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _field(model: type[BaseModel], key: str) -> FieldInfo:
    return next(info for name, info in model.model_fields.items() if (info.alias or name) == key)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


_WANTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("not above", "gt"),
    "greater_than_equal": ("below", "ge"),
    "less_than": ("not below", "lt"),
    "less_than_equal": ("above", "le"),
}


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    """Problem and hint, in the words of the reader rather than of the validator."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    shown = _shown(value)
    if kind == "refused":
        return context["problem"], context["hint"]
    if kind == "extra_forbidden":
        return "unknown key", ""
    if kind == "missing":
        return "is missing", ""
    if kind in _WANTED:
        quotable = kind == "string_type" and isinstance(value, int | float)
        return f"must be {_WANTED[kind]}, not {shown}", f'write "{_shown(value)}" in quotes' if quotable else ""
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{shown} is {words} {context[key]:g}", ""
    if kind in ("literal_error", "enum"):
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        if kind == "literal_error":
            return f"must be {allowed}, not {shown}", ""
        return f"{shown} is not known", suggest(str(value), allowed.split(", "), "known")
    if kind == "string_pattern_mismatch" and context["pattern"] == PIN_PATTERN:
        return f"{shown} is neither raw nor a configuration's id", "16 hex digits: controld candidates"
    if kind == "string_pattern_mismatch":
        return f"{shown} is not a name", "letters, digits, _ . - and at most 63 characters"
    if kind == "too_short":
        return "is empty", ""
    message = detail["msg"]
    return message[:1].lower() + message[1:], ""
