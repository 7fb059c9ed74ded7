"""A fleet server, an agent, the steered engine, and the adapter on the contract double in a worker process: as in use.

NOT run on the real engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.snapshot import Resource
from controld.contract.video import Applied, ChunkReport, EngineSetting, Transition, engine_setting_name
from controld.fleet import FleetServer, Selector
from controld.store.sqlite import SqliteStore
from dataplanes.agent import AgentTiming, VideoAgent
from dataplanes.longlive.adapter.worker_engine import WorkerDiedError, WorkerEngine
from dataplanes.longlive.agent import SteeredEngine, engine_identity
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

from .conftest import nvfp4, setting

pytestmark = pytest.mark.slow

SELECTOR = Selector("longlive", "video")
PATIENCE_S = 120.0
BASE, EIGHT = setting(), setting(steps=8)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        await asyncio.sleep(0.01)


class House:
    """A fleet server without a planner: settings are published by the test, and what the engine says is kept."""

    def __init__(self, store: SqliteStore, worker: WorkerEngine, initial: Configuration = BASE) -> None:
        self.fleet = FleetServer(store, on_applied=self._on_applied, on_chunks=self._on_chunks)
        self.worker = worker
        self.initial = initial
        self.applied: list[Applied] = []
        self.chunks: list[ChunkReport] = []
        # An engine is used from one thread, and that is not the server's.
        self._thread = ThreadPoolExecutor(1)

    async def start(self, address: str) -> None:
        await self.fleet.start([address])
        found = await self.call(self.worker.capabilities)
        identity = engine_identity(found, deployment="video", agent_id="e0", model_name="double", model_fingerprint="m")
        timing = AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.02, backoff_max_s=0.1)
        self.agent = VideoAgent(identity, address, initial=self.initial, timing=timing)
        self.steered = SteeredEngine(self.worker, self.agent)
        self.agent.start()
        self.agent.attached()
        await eventually(lambda: bool(self.fleet.sessions()), "it is connected")

    async def stop(self) -> None:
        await asyncio.to_thread(self.agent.close, 0.2)
        await self.fleet.stop(0.2)
        self._thread.shutdown()

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)

    async def want(self, wanted: Configuration) -> int:
        resource = Resource(engine_setting_name("e0"), EngineSetting(configuration=wanted, reason="for the test"))
        version = await self.fleet.publish(SELECTOR, [resource], policy_generation=1)
        await eventually(lambda: any(s.acked_version == version for s in self.fleet.sessions()), "it is acknowledged")
        return version

    async def begin(self, session_id: str) -> None:
        await self.call(self.steered.load, LoadSpec(checkpoint="", setting=self.initial))
        await self.open(session_id)

    async def open(self, session_id: str) -> None:
        await self.call(self.steered.open, SessionSpec(session_id=session_id, prompt="a cat", service_class="live"))

    def state(self) -> tuple[str, dict[str, int]]:
        (session,) = self.fleet.sessions()
        engine = session.telemetry.engine if session.telemetry is not None else None
        return ("", {}) if engine is None else (engine.setting_id, dict(engine.sessions))

    def counters(self) -> dict[str, int]:
        (session,) = self.fleet.sessions()
        return {} if session.telemetry is None else dict(session.telemetry.counters)

    async def _on_applied(self, _session: Any, answer: Applied) -> None:
        self.applied.append(answer)

    async def _on_chunks(self, _session: Any, reports: tuple[ChunkReport, ...]) -> None:
        self.chunks.extend(reports)


@pytest.fixture
async def house(tmp_path: Path, make_worker: Callable[..., WorkerEngine]) -> AsyncIterator[House]:
    # Four tokens a latent frame: the fourth chunk of a clip begins at token 96, and hangs there.
    fault = {"LONGLIVE_DOUBLE_FAULT": "hang_at_start=96", "LONGLIVE_DOUBLE_HANGS": str(tmp_path / "hangs")}
    store = await SqliteStore.open(tmp_path / "state")
    made = House(store, make_worker(environment=fault))
    await made.start(f"unix://{tmp_path}/fleet.sock")
    yield made
    await made.stop()
    await store.close()


async def test_settings_arrive_between_chunks_and_a_killed_worker_is_loaded_again_under_the_newest(
    house: House, tmp_path: Path
) -> None:
    await house.begin("a")
    frames = [len((await house.call(house.steered.step, "a")).frames)]
    versions = []
    for wanted in (EIGHT, nvfp4()):
        versions.append(await house.want(wanted))
        frames.append(len((await house.call(house.steered.step, "a")).frames))
    assert frames == [29, 32, 32], "no seam over a change of steps and one of weights"
    await eventually(lambda: len(house.applied) == 2 and len(house.chunks) == 3, "answers and chunks are told")
    assert [(one.version, one.chunk, one.transition) for one in house.applied] == [
        (versions[0], 1, Transition.CHUNK),
        (versions[1], 2, Transition.RELOAD),
    ]
    assert [one.setting_id for one in house.chunks] == [each.config_id for each in (BASE, EIGHT, nvfp4())]
    assert [len(one.denoise_s) for one in house.chunks] == [4, 8, 4]
    assert all(one.sessions == 1 and one.memory.kv_bytes > 0 for one in house.chunks)

    before = house.worker.worker_pid
    assert before is not None
    under_way = asyncio.ensure_future(house.call(house.steered.step, "a"))
    await eventually((tmp_path / "hangs").exists, "the fourth chunk is under way")
    os.kill(before, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"SIGKILL.*lost sessions: a"):
        await under_way
    with pytest.raises(WorkerDiedError):
        await house.call(house.steered.step, "a")
    await eventually(lambda: house.state() == (nvfp4().config_id, {}), "the daemon knows that nothing is served")
    newest = await house.want(nvfp4(window=24))

    await house.begin("b")
    assert house.worker.worker_pid not in (None, before)
    await eventually(lambda: house.state() == (BASE.config_id, {"live": 1}), "it is served by what was loaded")
    result = await house.call(house.steered.step, "b")
    assert (result.report.chunk, result.report.session_chunk, len(result.frames)) == (3, 0, 29)
    assert result.report.setting_id == nvfp4(window=24).config_id
    await eventually(lambda: len(house.applied) == 3 and len(house.chunks) == 4, "the answer is told")
    last = house.applied[-1]
    assert (last.version, last.chunk, dict(last.refused)) == (newest, 3, {})
    assert last.transition is Transition.RELOAD, "weights and cache changed together"
    await eventually(lambda: house.state() == (nvfp4(window=24).config_id, {"live": 1}), "the newest is in force")
    assert len(await house.call(house.steered.close, "b")) == 0


@pytest.fixture
async def small_house(tmp_path: Path, make_worker: Callable[..., WorkerEngine]) -> AsyncIterator[House]:
    store = await SqliteStore.open(tmp_path / "state")
    # Two ranks have room for no session called a.
    worker = make_worker(factory="small_engine:make", keywords={"fault": "full"})
    made = House(store, worker, Configuration({"steps": 4, "ranks": 1}))
    await made.start(f"unix://{tmp_path}/fleet.sock")
    yield made
    await made.stop()
    await store.close()


async def test_a_clip_that_a_restart_lost_is_told_at_once_and_its_owner_when_it_asks(small_house: House) -> None:
    house, two = small_house, Configuration({"steps": 4, "ranks": 2})
    await house.begin("a")
    await house.open("b")
    await eventually(lambda: house.state()[1] == {"live": 2}, "both are told")
    await house.want(two)
    await house.call(house.steered.step, "b")
    await eventually(lambda: house.state() == (two.config_id, {"live": 1}), "one is left, though nobody asked for a")
    await eventually(lambda: house.counters().get("sessions_lost") == 1 and bool(house.chunks), "it is counted")
    assert house.chunks[0].sessions == 1
    with pytest.raises(EngineError, match="no memory for another cache"):
        await house.call(house.steered.step, "a")
    await house.call(house.steered.step, "b")
    await eventually(lambda: len(house.chunks) == 2, "the other one goes on")
    assert (house.state()[1], house.counters()["sessions_lost"]) == ({"live": 1}, 1)


async def test_clips_of_a_worker_that_died_while_nobody_called_it_are_told_at_once(small_house: House) -> None:
    house = small_house
    await house.begin("a")
    await house.open("b")
    await eventually(lambda: house.state()[1] == {"live": 2}, "both are told")
    assert house.worker.worker_pid is not None
    os.kill(house.worker.worker_pid, signal.SIGKILL)
    await eventually(lambda: house.state()[1] == {}, "none is left")
    with pytest.raises(WorkerDiedError, match="lost sessions: a, b"):
        await house.call(house.steered.step, "b")
    await eventually(lambda: house.counters().get("sessions_lost") == 2, "they are counted")
    with pytest.raises(WorkerDiedError, match="session a was lost with its worker"):
        await house.call(house.steered.step, "a")
