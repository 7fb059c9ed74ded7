"""When rounds happen: at the start, after news, without any, and after one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controld.obs.metrics import Metrics
from controld.planning.loop import PlanningLoop


class Rounds:
    """Says when each round begins and each rest ends."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.rested = asyncio.Semaphore(0)
        self.count = 0
        self.failing: set[int] = set()
        self.never_ends = False
        self.metrics = Metrics()

    def loop(self, idle_s: float = 3600.0) -> PlanningLoop:
        return PlanningLoop("rounds", self.plan, self.rest, idle_s=idle_s, metrics=self.metrics)

    async def plan(self) -> None:
        self.count += 1
        self.begun.put_nowait(self.count)
        if self.count in self.failing:
            raise ZeroDivisionError("a bug")
        if self.never_ends:
            await asyncio.Event().wait()

    async def rest(self) -> None:
        await self.rested.acquire()

    async def next(self) -> int:
        async with asyncio.timeout(10):
            return await self.begun.get()


@pytest.fixture
async def rounds() -> AsyncIterator[Rounds]:
    yield Rounds()


async def test_news_amid_the_rest_make_one_round_after_it(rounds: Rounds) -> None:
    loop = rounds.loop()
    await loop.start()
    assert await rounds.next() == 1
    loop.wake()
    assert await rounds.next() == 2
    loop.wake()
    loop.wake()
    await asyncio.sleep(0)
    assert rounds.count == 2, "it rests"
    rounds.rested.release()
    assert await rounds.next() == 3
    rounds.rested.release()
    for _ in range(10):
        await asyncio.sleep(0)
    assert rounds.count == 3, "there is nothing new"
    await loop.stop()


async def test_without_news_there_is_a_round_now_and_then(rounds: Rounds) -> None:
    loop = rounds.loop(idle_s=0.001)
    await loop.start()
    rounds.rested.release()
    assert [await rounds.next() for _ in range(3)] == [1, 2, 3]
    await loop.stop()


async def test_a_round_that_fails_is_counted_and_the_next_one_comes(
    rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    rounds.failing = {2}
    loop = rounds.loop()
    await loop.start()
    loop.wake()
    rounds.rested.release()
    assert [await rounds.next() for _ in range(2)] == [1, 2]
    loop.wake()
    assert await rounds.next() == 3
    assert 'controld_internal_errors_total{where="rounds"} 1' in rounds.metrics.exposition().decode()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    await loop.stop()


async def test_a_first_round_that_fails_starts_nothing(rounds: Rounds) -> None:
    rounds.failing = {1}
    loop = rounds.loop()
    with pytest.raises(ZeroDivisionError):
        await loop.start()
    loop.wake()
    await asyncio.sleep(0)
    assert rounds.count == 1
    await loop.stop()


async def test_its_end_does_not_wait_for_a_round(rounds: Rounds) -> None:
    loop = rounds.loop()
    await loop.start()
    rounds.never_ends = True
    loop.wake()
    assert [await rounds.next() for _ in range(2)] == [1, 2]
    async with asyncio.timeout(10):
        await loop.stop()
