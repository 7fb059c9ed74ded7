"""Loops that look at something when they are woken, and now and then without any cause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controld.store.errors import StoreError

_log = logging.getLogger(__name__)


async def keep_reviewing(
    review: Callable[[], Awaitable[None]],
    wake: asyncio.Event,
    *,
    every_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Review at once, at each wake and every `every_s`, whatever single reviews come to, while `goes_on`."""
    while goes_on():
        try:
            await review()
        except StoreError as error:
            _log.error("studies wait: %s", error)
        except Exception:  # noqa: BLE001 - the edge of the loop: one fault must not end the reviews after it
            _log.exception("a review of studies failed")
        try:
            async with asyncio.timeout(every_s):
                await wake.wait()
        except TimeoutError:
            pass
        wake.clear()
