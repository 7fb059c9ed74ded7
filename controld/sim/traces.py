"""Request traces that others published, line by line: Azure's LLM inference traces and Mooncake's.

Azure (github.com/Azure/AzurePublicDataset): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as
`2023-11-16 18:15:46.6805900`. Mooncake (github.com/kvcache-ai/Mooncake, FAST '25): one JSON object a line with
`timestamp` in milliseconds, `input_length`, `output_length` and the ids of the prompt's blocks.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import FieldError
from controld.sim.record import Arrival

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_CODE = "trace.malformed"
_MOST_TOKENS = 10**9
_MOST_DIGITS = 20
_LONGEST_MS = 1e11
"""Three years: longer than any trace, and short enough for a clock of milliseconds to tell requests apart."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at_s: seconds since the first one.
    """

    at_s: float
    input_tokens: int
    output_tokens: int


def read_trace(lines: Iterable[str], file: str) -> list[TraceRequest]:
    """The requests of a trace in the order of time; the kind of trace is told by its first line.

    Requests of no input tokens are left out, for they have no KV to move.

    Args:
        file: as messages name it.

    Raises:
        FieldError: neither kind, a malformed line, or no request; the field is `FILE:LINE: FIELD`.
    """
    numbered = [(number, line.rstrip("\r\n")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise FieldError(file, "is empty", code=_CODE)
    first = numbered[0][1].lstrip("\ufeff")
    if first.lstrip().startswith("{"):
        raw = [_mooncake(line, f"{file}:{number}") for number, line in numbered]
    elif first.split(",")[0].strip() == _AZURE_COLUMNS[0]:
        raw = _azure([(numbered[0][0], first), *numbered[1:]], file)
    else:
        hint = f"Azure's begin with {','.join(_AZURE_COLUMNS)}, Mooncake's with {{"
        raise FieldError(
            f"{file}:{numbered[0][0]}", "is the beginning of no known kind of trace", hint=hint, code=_CODE
        )
    requests = sorted((request for request in raw if request.input_tokens > 0), key=lambda request: request.at_s)
    if not requests:
        raise FieldError(file, "holds no request with input tokens", code=_CODE)
    begin_s = requests[0].at_s
    return [TraceRequest(one.at_s - begin_s, one.input_tokens, one.output_tokens) for one in requests]


def arrivals_of(
    requests: Sequence[TraceRequest],
    *,
    bytes_per_token: float,
    speed: float = 1.0,
    mix: Mapping[str, float] | None = None,
    tenants: Mapping[str, str] | None = None,
    peers: int = 1,
    seed: int = 0,
) -> list[Arrival]:
    """A trace's requests as transfers of their prompts' KV.

    Args:
        bytes_per_token: raw KV bytes.
        speed: 2 has everything happen in half the time.
        mix: shares of service classes, which a trace knows nothing of; each request is given one at random.
        tenants: of the classes.
        peers: decode servers, in turn.

    Raises:
        FieldError: a number is not positive.
    """
    shares = dict(mix or {DEFAULT_CLASS: 1.0})
    for name, value in (("bytes_per_token", bytes_per_token), ("speed", speed), ("peers", peers)):
        if not (math.isfinite(value) and value > 0):
            raise FieldError(name, f"{value} is not a positive finite number")
    if not shares or any(not (math.isfinite(s) and s >= 0) for s in shares.values()) or sum(shares.values()) <= 0:
        raise FieldError("mix", "is of shares that are not negative, one of them positive")
    picks = random.Random(seed).choices(list(shares), weights=list(shares.values()), k=len(requests))
    return [
        Arrival(
            at_s=request.at_s / speed,
            raw_bytes=max(1, round(request.input_tokens * bytes_per_token)),
            service_class=service_class,
            tenant=(tenants or {}).get(service_class, "default"),
            peer=index % peers,
        )
        for index, (request, service_class) in enumerate(zip(requests, picks, strict=True))
    ]


def _azure(numbered: Sequence[tuple[int, str]], file: str) -> list[TraceRequest]:
    rows = _csv_rows([line for _, line in numbered], file)
    header = [name.strip() for name in rows[0]]
    twice = [name for name in _AZURE_COLUMNS if header.count(name) > 1]
    if twice:
        raise FieldError(f"{file}:{numbered[0][0]}", f"has the column {twice[0]} twice", code=_CODE)
    missing = [name for name in _AZURE_COLUMNS if name not in header]
    if missing:
        raise FieldError(f"{file}:{numbered[0][0]}", f"has no column {', '.join(missing)}", code=_CODE)
    column = {name: header.index(name) for name in _AZURE_COLUMNS}
    requests = []
    for (number, _), row in zip(numbered[1:], rows[1:], strict=True):
        at = f"{file}:{number}"
        if len(row) != len(header):
            raise FieldError(at, f"has {len(row)} columns, not {len(header)}", code=_CODE)
        requests.append(
            TraceRequest(
                _moment_s(row[column["TIMESTAMP"]].strip(), f"{at}: TIMESTAMP"),
                _tokens(row[column["ContextTokens"]].strip(), f"{at}: ContextTokens"),
                _tokens(row[column["GeneratedTokens"]].strip(), f"{at}: GeneratedTokens"),
            )
        )
    return requests


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key comes twice")
    return document


def _csv_rows(lines: Sequence[str], file: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise FieldError(file, f"is no CSV: {error}", code=_CODE) from error
    if len(rows) != len(lines):
        raise FieldError(file, "has a field that goes over several lines", code=_CODE)
    return rows


def _moment_s(text: str, field: str) -> float:
    # Seven digits of a second, one more than Python reads.
    head, point, fraction = text.partition(".")
    digits = fraction.rstrip("Z")
    if point and not (digits.isascii() and digits.isdigit()):
        raise FieldError(field, f"{text!r} is no moment", code=_CODE)
    try:
        moment = datetime.fromisoformat(head)
    except ValueError as error:
        raise FieldError(field, f"{text!r} is no moment", hint="2023-11-16 18:15:46.68", code=_CODE) from error
    if moment.tzinfo is not None:
        raise FieldError(
            field, f"{text!r} has a time zone", hint="leave it out: all times of a trace are alike", code=_CODE
        )
    return moment.replace(tzinfo=UTC).timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _tokens(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS or int(text) > _MOST_TOKENS:
        raise FieldError(field, f"{text[:40]!r} is no number of tokens", code=_CODE)
    return int(text)


def _mooncake(line: str, at: str) -> TraceRequest:
    try:
        document: Any = json.loads(line, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise FieldError(at, f"not JSON: {error}", code=_CODE) from error
    if not isinstance(document, dict):
        raise FieldError(at, "not a JSON object", code=_CODE)
    for name in _MOONCAKE_KEYS[:3]:
        value = document.get(name)
        if name not in document:
            raise FieldError(f"{at}: {name}", "is missing", code=_CODE)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FieldError(f"{at}: {name}", f"{value!r} is not a number", code=_CODE)
        # Compared, not converted: an integer may be longer than any float.
        if not 0 <= value <= _LONGEST_MS:
            raise FieldError(f"{at}: {name}", f"{str(value)[:40]} is not from 0 to {_LONGEST_MS:g}", code=_CODE)
        if name != "timestamp" and (value != int(value) or value > _MOST_TOKENS):
            raise FieldError(f"{at}: {name}", f"{value} is no number of tokens", code=_CODE)
    return TraceRequest(document["timestamp"] / 1e3, int(document["input_length"]), int(document["output_length"]))
