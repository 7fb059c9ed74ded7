"""Server-sent events: one JSON document an event, and a comment now and then so that a silent stream is a live one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

COMMENT_S = 15.0
_COMMENT = b": still here\n\n"


async def stream_events(
    request: web.Request, events: AsyncIterator[dict[str, Any]], *, comment_s: float = COMMENT_S
) -> web.StreamResponse:
    """Send events until they end or the reader leaves, which is no error of ours.

    Args:
        comment_s: how long the stream may be silent.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    # The next event is waited for in a task: a wait that is given up must not end the iterator.
    upcoming = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=comment_s)
            if not done:
                await response.write(_COMMENT)
                continue
            event = upcoming.result()
            if event is None:
                break
            upcoming = asyncio.ensure_future(_next(events))
            await response.write(b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n")
    except ConnectionResetError:
        pass
    finally:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upcoming
    return response


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)
