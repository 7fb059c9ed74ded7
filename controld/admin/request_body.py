"""Bodies of requests: UTF-8 of bounded size, and JSON in which nothing is said twice. What is wrong is a 400."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from controld.contract.errors import FieldError
from controld.contract.json_keys import repeated_key

MAX_DEPTH = 32

_UTF_8 = ("utf-8", "utf8", "us-ascii")


async def read_text(request: web.Request, *, max_bytes: int) -> str:
    """The body as text, whatever the size that the application allows to others.

    Raises:
        FieldError: too long once unpacked, broken or cut off on the way, or not UTF-8; it names `body`.
    """
    charset = request.charset or "utf-8"
    if charset.lower() not in _UTF_8:
        raise FieldError("body", f"the charset {charset!r} is not read here", hint="send UTF-8")
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise FieldError("body", f"is longer than {max_bytes} bytes")
    except (BadHttpMessage, web.RequestPayloadError) as error:
        raise FieldError("body", "cannot be unpacked", hint="it is not what its headers say") from error
    except ConnectionError as error:
        raise FieldError("body", "ends early: the client has left") from error
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise FieldError("body", f"not UTF-8: {error}") from error


async def read_object(request: web.Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as one JSON object, at most `MAX_DEPTH` levels deep, its numbers finite. Parsed off the event loop.

    Raises:
        FieldError: anything else, or a key that is there twice; it names `body`.
    """
    return await asyncio.to_thread(_object, await read_text(request, max_bytes=max_bytes))


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(
            text, object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise FieldError("body", f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FieldError("body", "not a JSON object")
    _require_depth(document)
    return document


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := repeated_key(pairs)) is not None:
        raise FieldError("body", f"the key {twice!r} is there twice")
    return dict(pairs)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise FieldError("body", f"the number {text[:40]} is out of range")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise FieldError("body", f"{name} is not JSON")


def _require_depth(document: dict[str, Any]) -> None:
    # The parser stops at the interpreter's limit only, which is too late for whoever shows such a value in a message.
    level: list[dict[str, Any] | list[Any]] = [document]
    for _ in range(MAX_DEPTH):
        items = (item for node in level for item in (node.values() if isinstance(node, dict) else node))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> FieldError:
    return FieldError("body", f"nested deeper than {MAX_DEPTH} levels")
