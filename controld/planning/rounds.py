"""The life of a planner: rounds, each when it is woken or when it has waited long enough, and a rest after each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from controld.obs.metrics import Metrics

_log = logging.getLogger(__name__)


class Rounds:
    """Makes a round again and again; one that fails is logged and counted, and the next one is made.

    Args:
        plan: a round.
        rest: waits after a round, whether it failed or not, until the next one may be made.
        name: of the task, and of its failures in the metrics.
        idle_s: so long after a rest, a round is made without being woken.
    """

    def __init__(
        self,
        plan: Callable[[], Awaitable[object]],
        rest: Callable[[], Awaitable[None]],
        *,
        name: str,
        idle_s: float,
        metrics: Metrics,
    ) -> None:
        self._plan = plan
        self._rest = rest
        self._name = name
        self._idle_s = idle_s
        self._metrics = metrics
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Something changed: make a round as soon as one may be made."""
        self._woken.set()

    def take_wake(self) -> bool:
        """Whether it was woken since; that is then forgotten."""
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    async def start(self) -> None:
        """Make a first round, and go on in a task. Raises: what the first round raises."""
        await self._plan()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Make no round any more; one that is being made is given up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self._plan()
            except Exception:  # noqa: BLE001 - the edge of the loop: planes keep what they have meanwhile
                _log.exception("a round of the %s failed", self._name)
                self._metrics.internal_errors.labels(self._name).inc()
            await self._rest()
