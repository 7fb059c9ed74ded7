"""The client of the search process, against processes that behave as badly as one may."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from controld.contract.clock import ManualClock, SystemClock
from controld.profiling.search_process import MAX_BACK_OFF_S, SearchProcess, SearchProcessError, SearchRequest

GOOD = """\
import json, sys
print("a library talks", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    proposal = {"lossy": {"quantise": "nvfp4"}, "segments": request["segments"], "source": "model"}
    answer = {"id": request["id"], "proposals": [proposal] * request["count"], "seconds": 0.1, "detail": ""}
    print(json.dumps(answer), flush=True)
"""
REFUSES = GOOD.replace("answer = {", 'answer = {"error": "boom", ')
HANGS = "import time; print('{\"ready\": true}', flush=True); time.sleep(60)"
ENDS = "print('{\"ready\": true}', flush=True)"
NONSENSE = GOOD.replace('"proposals": [proposal]', '"proposals": [7]')

Make = Callable[..., SearchProcess]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SearchProcess] = []

    def search(program: str, clock: Any = None, answer_s: float = 20.0) -> SearchProcess:
        file = tmp_path / f"search{len(made)}.py"
        file.write_text(program)
        made.append(SearchProcess(clock or ManualClock(), command=(sys.executable, str(file)), answer_s=answer_s))
        return made[-1]

    yield search
    for one in made:
        await one.stop()


def request(space: Any, **changes: Any) -> SearchRequest:
    values: dict[str, Any] = {
        "study_id": "s",
        "space_json": space.to_json(),
        "seed": 0,
        "count": 2,
        "segments": 3,
        "max_segments": 3,
        "observations": (),
        "pending": (),
        **changes,
    }
    return SearchRequest(**values)


async def test_it_is_started_once_asked_and_killed_when_it_stops(make: Make, space: Any) -> None:
    search = make(GOOD)
    assert search.pid is None
    answer = await search.propose(request(space))
    assert [(one.lossy["quantise"], one.segments, one.source) for one in answer.proposals] == [
        ("nvfp4", 3, "model"),
        ("nvfp4", 3, "model"),
    ]
    assert answer.seconds > 0
    pid = search.pid
    await search.propose(request(space))
    assert search.pid == pid is not None
    await search.stop()
    assert not psutil.pid_exists(pid)


async def test_a_killed_process_is_replaced_within_the_request(make: Make, space: Any) -> None:
    search = make(GOOD)
    await search.propose(request(space))
    assert search.pid is not None
    os.kill(search.pid, signal.SIGKILL)
    assert (await search.propose(request(space))).proposals


async def test_one_that_always_ends_is_started_ever_more_rarely(make: Make, space: Any) -> None:
    clock = ManualClock()
    search = make(ENDS, clock)
    with pytest.raises(SearchProcessError) as ended:
        await search.propose(request(space))
    assert ended.value.code == "search.ended"
    with pytest.raises(SearchProcessError) as waits:
        await search.propose(request(space))
    assert waits.value.code == "search.waits"
    clock.advance(1.1)
    with pytest.raises(SearchProcessError) as ended:
        await search.propose(request(space))
    assert ended.value.code == "search.ended"
    clock.advance(1.1)
    with pytest.raises(SearchProcessError) as waits:
        await search.propose(request(space))
    assert waits.value.code == "search.waits"
    clock.advance(MAX_BACK_OFF_S)
    search._command = make(GOOD)._command
    assert (await search.propose(request(space))).proposals


async def test_one_that_hangs_is_killed(make: Make, space: Any) -> None:
    search = make(HANGS, SystemClock(), answer_s=0.3)
    with pytest.raises(SearchProcessError) as hung:
        await search.propose(request(space))
    assert hung.value.code == "search.hung"
    assert search.pid is None


async def test_one_that_hangs_holds_up_other_requests_for_their_turn_only(tmp_path: Path, space: Any) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(HANGS)
    search = SearchProcess(SystemClock(), command=(sys.executable, str(file)), answer_s=60.0, turn_s=0.05)
    first = asyncio.create_task(search.propose(request(space, study_id="one")))
    await asyncio.sleep(0)
    with pytest.raises(SearchProcessError) as busy:
        await search.propose(request(space, study_id="other"))
    assert busy.value.code == "search.busy"
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await search.stop()


@pytest.mark.parametrize(("program", "word"), [(REFUSES, "boom"), (NONSENSE, "TypeError")])
async def test_a_refusal_costs_no_process(make: Make, space: Any, program: str, word: str) -> None:
    search = make(program)
    with pytest.raises(SearchProcessError, match=word) as refused:
        await search.propose(request(space))
    assert refused.value.code == "search.refused"
    assert search.pid is not None


async def test_a_program_that_is_not_there_is_said(space: Any) -> None:
    search = SearchProcess(ManualClock(), command=("/no/such/program",))
    with pytest.raises(SearchProcessError) as error:
        await search.propose(request(space))
    assert error.value.code == "search.ended"


async def test_stopping_ends_a_request_that_waits(make: Make, space: Any) -> None:
    search = make(HANGS)
    waiting = asyncio.create_task(search.propose(request(space)))
    while search.pid is None:
        await asyncio.sleep(0.005)
    pid = search.pid
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await search.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
async def test_the_real_search_answers_and_is_replaced_when_killed(space: Any) -> None:
    pytest.importorskip("botorch")
    search = SearchProcess(SystemClock())
    try:
        first = await search.propose(request(space))
        assert len(first.proposals) == 2
        assert search.pid is not None
        os.kill(search.pid, signal.SIGKILL)
        again = await search.propose(request(space))
        assert again.proposals == first.proposals, "what it proposes follows from the request alone"
        for one in first.proposals:
            assert space.coders(one.lossy)
    finally:
        await search.stop()
