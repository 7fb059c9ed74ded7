"""Profiles as one JSON document, to carry them from one daemon to another. Strict on the way in, all or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar, cast, get_type_hints

from controld.candidates.document import (
    finite_number,
    placed,
    printable_text,
    read_json_object,
    read_profiles,
    require_format,
    require_keys,
)
from controld.candidates.profile import Profile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

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
        latest_unix_s: nothing may be measured after this.

    Raises:
        FieldError: not JSON, another format or version, a key that is unknown, missing or there twice, a value of
            another type, a number that is not finite or out of range, a date that is too late, an id that is not the
            configuration's, or one profile twice. The field is named by its path, as in `profiles[3].encode.a_s`.
    """
    document = read_json_object(text)
    require_keys(document, "", ("format", "version", "exported_unix_s", "profiles"))
    require_format(document, FORMAT, VERSION)
    finite_number(document["exported_unix_s"], "exported_unix_s")
    profiles = read_profiles(document["profiles"], _read_profile, profile_identity, latest_unix_s=latest_unix_s)
    return [mark_imported(profile) for profile in profiles]


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


def _read_profile(entry: dict[str, Any], path: str) -> Profile:
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
    with placed(path):
        return kind(**read)


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
    with placed(path):
        configuration = Configuration(value)
    for name, item in configuration.items():
        if isinstance(item, str):
            printable_text(item, f"{path}.{name}")
    return configuration
