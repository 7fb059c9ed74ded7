"""How documents of profiles are read: JSON objects with exact keys, and lists in which no profile comes twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from controld.contract.errors import FieldError
from controld.contract.json_keys import repeated_key


class Dated(Protocol):
    """What a list of profiles holds."""

    @property
    def measured_unix_s(self) -> float: ...


_Profile = TypeVar("_Profile", bound=Dated)


def read_json_object(text: str, field: str = "document") -> dict[str, Any]:
    """One JSON object in which no key is there twice. Numbers that are not finite pass, so that checks can name them.

    Args:
        field: what an error names.

    Raises:
        FieldError: anything else.
    """
    try:
        document = json.loads(text, object_pairs_hook=_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FieldError(field, "not a JSON object")
    return document


def require_keys(document: object, path: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Exactly these keys. Raises: FieldError: not an object, a key is missing or unknown."""
    if not isinstance(document, dict):
        raise FieldError(path, "is not an object")
    prefix = f"{path}." if path else ""
    for name in document:
        if name not in required and name not in optional:
            raise FieldError(f"{prefix}{name}", "unknown key", hint=f"known here: {', '.join((*required, *optional))}")
    for name in required:
        if name not in document:
            raise FieldError(f"{prefix}{name}", "is missing")


def finite_number(value: object, path: str) -> float:
    """A JSON number that is finite. Raises: FieldError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(path, f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FieldError(path, f"{number} is not finite")
    return number


def printable_text(value: object, path: str) -> str:
    """A string of printable characters. Raises: FieldError."""
    if not isinstance(value, str) or not value.isprintable():
        raise FieldError(path, f"{value!r} is not a text of printable characters")
    return value


@contextmanager
def fields_of(name: str) -> Iterator[None]:
    """Whatever Python says of values that make no profile becomes a `FieldError` that names `name`."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FieldError(name, f"not a profile: {error}") from error


@contextmanager
def placed(path: str) -> Iterator[None]:
    """A value names its own field, as in `profile.ratio`; the reader looks for it at its place in the document."""
    try:
        yield
    except FieldError as error:
        _, dot, name = error.field.partition(".")
        raise FieldError(f"{path}{dot}{name}", error.problem, hint=error.hint, code=error.code) from error


def require_format(document: dict[str, Any], name: str, version: int) -> None:
    """A document of this format and version. Raises: FieldError."""
    if document["format"] != name:
        raise FieldError("format", f"{document['format']!r} is not {name!r}")
    if document["version"] != version or isinstance(document["version"], bool):
        raise FieldError("version", f"{document['version']!r} is not {version}", hint="export it with the same release")


def read_profiles(
    entries: object,
    read: Callable[[dict[str, Any], str], _Profile],
    identity: Callable[[_Profile], Hashable],
    *,
    latest_unix_s: float = math.inf,
) -> list[_Profile]:
    """The profiles of a document's list `profiles`.

    Args:
        read: makes a profile of an entry; its path is for errors.
        identity: what makes two profiles measurements of the same thing.
        latest_unix_s: nothing may be measured after this. Of the same measurement the newer one stays, so a date that
            never comes would stay for ever.

    Raises:
        FieldError: no list of objects, what `read` raises, a date that is too late, or one profile twice.
    """
    if not isinstance(entries, list):
        raise FieldError("profiles", "is not a list")
    profiles: list[_Profile] = []
    seen: dict[Hashable, int] = {}
    for index, entry in enumerate(entries):
        path = f"profiles[{index}]"
        if not isinstance(entry, dict):
            raise FieldError(path, "is not an object")
        profile = read(entry, path)
        when = profile.measured_unix_s
        if when > latest_unix_s:
            raise FieldError(f"{path}.measured_unix_s", f"{when:.0f} is in the future", hint="check both clocks")
        first = seen.setdefault(identity(profile), index)
        if first != index:
            raise FieldError(path, f"is profiles[{first}] again: same model, workload, configuration and hardware")
        profiles.append(profile)
    return profiles


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := repeated_key(pairs)) is not None:
        raise FieldError(twice, "the key is there twice")
    return dict(pairs)
