"""What operations take of their requests: query parameters, and the files of a policy edit."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TypeVar

from aiohttp import web

from controld.admin.backend import CandidateImport, HypotheticalContext, ImportFormat, PolicyEdit
from controld.admin.request_body import read_object
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import FieldError
from controld.contract.quantity import parse_rate_bytes_per_s, parse_size_bytes

MAX_LISTED = 1000
MAX_IMPORT_BYTES = 64 * 2**20
_DIGITS = 9

_Choice = TypeVar("_Choice", bound=StrEnum)


def query_text(request: web.Request, name: str) -> str | None:
    """A query parameter, None where it is not given. Raises: FieldError: it is given more than once."""
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise FieldError(name, f"is given {len(values)} times", hint="once")
    return values[0] if values else None


def query_integer(request: web.Request, name: str, default: int, *, low: int, high: int) -> int:
    text = query_text(request, name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or not low <= int(text) <= high:
        raise FieldError(name, f'"{text}" is not a whole number from {low} to {high}')
    return int(text)


def query_number(request: web.Request, name: str, default: float) -> float:
    text = query_text(request, name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise FieldError(name, f'"{text}" is not a finite non-negative number')
    return value


def _needed(request: web.Request, name: str, *, example: str) -> str:
    text = query_text(request, name)
    if text is None:
        raise FieldError(name, "is missing", hint=f"for example {example}")
    return text


def hypothetical_context(request: web.Request) -> HypotheticalContext:
    example = "?class=chat&bytes=20MB&bandwidth=200Mbit"
    service_class, tier = query_text(request, "class"), query_text(request, "tier")
    return HypotheticalContext(
        service_class=DEFAULT_CLASS if service_class is None else service_class,
        tier="pd" if tier is None else tier,
        size_bytes=parse_size_bytes(_needed(request, "bytes", example=example), field="bytes"),
        bandwidth_bytes_per_s=parse_rate_bytes_per_s(_needed(request, "bandwidth", example=example), field="bandwidth"),
        load=query_number(request, "load", 0.0),
        deployment=query_text(request, "deployment"),
    )


def query_choice(request: web.Request, name: str, choices: type[_Choice]) -> _Choice | None:
    """One of an enumeration's values, None where it is not given. Raises: FieldError."""
    text = query_text(request, name)
    if text is None:
        return None
    if text not in list(choices):
        raise FieldError(name, f'"{text}" is none of {", ".join(choices)}')
    return choices(text)


def query_flag(request: web.Request, name: str) -> bool:
    """`true` or `false`, which it is where it is not given. Raises: FieldError."""
    text = query_text(request, name)
    if text not in (None, "true", "false"):
        raise FieldError(name, f'"{text}" is neither true nor false')
    return text == "true"


def profile_filter(request: web.Request) -> ProfileFilter:
    return ProfileFilter(
        kind=query_choice(request, "kind", ProfileKind),
        workload=query_text(request, "workload"),
        model=query_text(request, "model"),
        hardware=query_text(request, "hardware"),
        config_id=query_text(request, "config_id"),
    )


def candidate_import(request: web.Request) -> CandidateImport:
    wanted = CandidateImport(
        format=query_choice(request, "format", ImportFormat) or ImportFormat.CONTROLD,
        model=query_text(request, "model"),
        workload=query_text(request, "workload"),
    )
    for name in ("model", "workload"):
        value = getattr(wanted, name)
        if value is not None and wanted.format is ImportFormat.CONTROLD:
            raise FieldError(name, "is for format=kvserve only: our own documents say it with each profile")
        if value is not None and not (value and value.isprintable()):
            raise FieldError(name, f"{value!r} is not a name")
    return wanted


async def policy_edit(request: web.Request) -> PolicyEdit:
    body = await read_object(request, max_bytes=MAX_IMPORT_BYTES)
    if body.keys() - {"files", "whole"}:
        raise FieldError("body", "must be {files: [{file, content}], whole: true or false}")
    files, whole = body.get("files"), body.get("whole", True)
    if not isinstance(files, list) or not 1 <= len(files) <= MAX_LISTED:
        raise FieldError("files", f"must be a list of 1 to {MAX_LISTED} files")
    if not isinstance(whole, bool):
        raise FieldError("whole", "must be true or false")
    named: dict[str, bytes] = {}
    for index, item in enumerate(files):
        if not isinstance(item, dict) or item.keys() != {"file", "content"}:
            raise FieldError(f"files[{index}]", "must be {file, content}")
        if not all(isinstance(value, str) for value in item.values()):
            raise FieldError(f"files[{index}]", "file and content must be texts")
        if item["file"] in named:
            raise FieldError(f"files[{index}].file", f"{item['file']} comes twice")
        # Bytes that are no text come as lone surrogates, so that the parser says where they stand.
        try:
            named[item["file"]] = item["content"].encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise FieldError(f"files[{index}].content", f"not Unicode: {error}") from error
    return PolicyEdit(files=tuple(named.items()), whole=whole)
