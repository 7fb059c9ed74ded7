"""When a planner plans, and what becomes of a round that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from controld.obs.metrics import Metrics

_log = logging.getLogger(__name__)


class PlanningLoop:
    """Plans at its start, and then after news and now and then without any; rests after each round.

    Args:
        name: of the planner, in logs and where failed rounds are counted.
        plan: one round.
        rest: returns once the next round may begin.
        idle_s: without any news there is a round this often.
        metrics: failed rounds are counted there.
    """

    def __init__(
        self,
        name: str,
        plan: Callable[[], Awaitable[object]],
        rest: Callable[[], Awaitable[None]],
        *,
        idle_s: float,
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._plan = plan
        self._rest = rest
        self._idle_s = idle_s
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There are news: plan once the rest is over."""
        self._wake.set()

    def take_wake(self) -> bool:
        """Whether there were news since the last round or look; they count as looked at."""
        woken = self._wake.is_set()
        self._wake.clear()
        return woken

    async def start(self) -> None:
        """Plan once, and go on planning. Raises: whatever the first round raises."""
        await self._plan()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """End, amid a round if there is one."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._plan()
            except Exception:  # noqa: BLE001 - the edge of the loop: planes keep the last good version meanwhile
                _log.exception("planning failed", extra={"planner": self._name})
                self._metrics.internal_errors.labels(self._name).inc()
            await self._rest()
