"""Profiles as one JSON document, to carry them from one daemon to another. Strict on the way in, all or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar, cast, get_type_hints

from controld.candidates.profile import Profile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.json_keys import repeated_key

FORMAT = "controld-candidates"
VERSION = 1
IMPORTED = "imported: "
"""How the provenance of a profile begins that was not measured through this daemon."""

_Read = TypeVar("_Read")


def export_document(profiles: Sequence[Profile], *, exported_unix_s: float) -> dict[str, Any]:
    """Every profile with its provenance, as `read_document` takes it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "exported_unix_s": exported_unix_s,
        "profiles": [profile.to_document() for profile in profiles],
    }


def read_document(text: str, *, latest_unix_s: float = math.inf) -> list[Profile]:
    """The profiles of a document, each marked as imported.

    Args:
        text: JSON, as `export_document` describes it.
        latest_unix_s: nothing may be measured after this. Of the same measurement the newer one stays, so a date that
            never comes would stay for ever.

    Raises:
        FieldError: not JSON, another format or version, a key that is unknown, missing or there twice, a value of
            another type, a number that is not finite or out of range, a date that is too late, an id that is not the
            configuration's, or one profile twice. The field is named by its path, as in `profiles[3].encode.a_s`.
    """
    document = read_json_object(text)
    require_keys(document, "", ("format", "version", "exported_unix_s", "profiles"))
    if document["format"] != FORMAT:
        raise FieldError("format", f"{document['format']!r} is not {FORMAT!r}")
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise FieldError("version", f"{document['version']!r} is not {VERSION}", hint="export it with the same release")
    finite_number(document["exported_unix_s"], "exported_unix_s")
    if not isinstance(document["profiles"], list):
        raise FieldError("profiles", "is not a list")
    profiles: list[Profile] = []
    seen: dict[tuple[str, ...], int] = {}
    for index, entry in enumerate(document["profiles"]):
        path = f"profiles[{index}]"
        profile = _read_profile(entry, path)
        if profile.measured_unix_s > latest_unix_s:
            raise FieldError(
                f"{path}.measured_unix_s", f"{profile.measured_unix_s:.0f} is in the future", hint="check both clocks"
            )
        first = seen.setdefault(profile_identity(profile), index)
        if first != index:
            raise FieldError(path, f"is profiles[{first}] again: same model, workload, configuration and hardware")
        profiles.append(mark_imported(profile))
    return profiles


def mark_imported(profile: Profile) -> Profile:
    """The profile with a provenance that says so, once however often it travels."""
    if profile.provenance.startswith(IMPORTED):
        return profile
    return replace(profile, provenance=IMPORTED + profile.provenance)


def profile_identity(profile: Profile) -> tuple[str, ...]:
    """What makes two profiles measurements of the same thing: model, workload, configuration, both sides' hardware."""
    return (
        profile.model_fingerprint,
        profile.workload,
        profile.arm_id,
        profile.sender_hardware,
        profile.receiver_hardware,
    )


def read_json_object(text: str) -> dict[str, Any]:
    """One JSON object in which no key is there twice. Numbers that are not finite pass, so that checks can name them.

    Raises:
        FieldError: anything else.
    """
    try:
        document = json.loads(text, object_pairs_hook=_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise FieldError("document", f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FieldError("document", "not a JSON object")
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


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := repeated_key(pairs)) is not None:
        raise FieldError(twice, "the key is there twice")
    return dict(pairs)


def _read_profile(entry: object, path: str) -> Profile:
    if not isinstance(entry, dict):
        raise FieldError(path, "is not an object")
    values = dict(entry)
    form = Profile.document_format()
    if values.pop("format", None) != form:
        raise FieldError(f"{path}.format", f"is not {form}")
    if values.get("loss_upper_nats", 0.0) is None:
        del values["loss_upper_nats"]
        return replace(_read_fields(Profile, values, path), loss_upper_nats=math.inf)
    return _read_fields(Profile, values, path)


def _read_fields(kind: type[_Read], values: object, path: str) -> _Read:
    """A dataclass from its JSON object, every field checked by its declared type."""
    members = fields(cast(Any, kind))
    needed = [f.name for f in members if f.default is MISSING and f.default_factory is MISSING]
    require_keys(values, path, needed, [f.name for f in members if f.name not in needed])
    assert isinstance(values, dict)  # require_keys has looked
    types = get_type_hints(kind)
    read = {name: _read_value(types[name], value, f"{path}.{name}") for name, value in values.items()}
    try:
        return kind(**read)
    except FieldError as error:
        raise _moved(error, path) from error


def _read_value(kind: Any, value: object, path: str) -> Any:
    if kind is float:
        return finite_number(value, path)
    if kind is int:
        if type(value) is not int:
            raise FieldError(path, f"{value!r} is not a whole number")
        return value
    if kind is str:
        return printable_text(value, path)
    if kind is Configuration:
        return _read_configuration(value, path)
    if is_dataclass(kind) and isinstance(kind, type):
        return _read_fields(kind, value, path)
    raise TypeError(f"{path}: no reader for {kind}")


def _read_configuration(value: object, path: str) -> Configuration:
    if not isinstance(value, dict):
        raise FieldError(path, "is not an object")
    try:
        configuration = Configuration(value)
    except FieldError as error:
        raise _moved(error, path) from error
    for name, item in configuration.items():
        if isinstance(item, str):
            printable_text(item, f"{path}.{name}")
    return configuration


def _moved(error: FieldError, path: str) -> FieldError:
    """A value names its own field, as in `profile.ratio`; the reader looks for it at its place in the document."""
    _, dot, name = error.field.partition(".")
    return FieldError(f"{path}{dot}{name}", error.problem, hint=error.hint)
