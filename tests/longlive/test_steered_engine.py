"""A steered engine on a real stream: settings arrive, take effect at a chunk, and are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.snapshot import Resource
from controld.contract.video import Applied, ChunkReport, EngineSetting, engine_setting_name
from controld.fleet import FleetServer, Selector
from controld.fleet.session import AgentSession
from controld.store.sqlite import SqliteStore
from dataplanes.agent import AgentTiming, VideoAgent
from dataplanes.longlive.agent import SteeredEngine, engine_identity
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

SELECTOR = Selector("longlive", "video")
FOUR = Configuration({"kv": "bf16", "steps": 4, "vae": "async"})
TWO = Configuration({"kv": "bf16", "steps": 2, "vae": "async"})
PATIENCE_S = 60.0


class Heard:
    def __init__(self) -> None:
        self.applied: list[Applied] = []
        self.chunks: list[ChunkReport] = []

    async def on_applied(self, _session: AgentSession, applied: Applied) -> None:
        self.applied.append(applied)

    async def on_chunks(self, _session: AgentSession, reports: tuple[ChunkReport, ...]) -> None:
        self.chunks.extend(reports)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        await asyncio.sleep(0.005)


async def acknowledged(server: FleetServer, version: int) -> None:
    await eventually(lambda: any(s.acked_version == version for s in server.sessions()), f"{version} is acknowledged")


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def start(tmp_path: Path, heard: Heard) -> AsyncIterator[Callable[[], Awaitable[tuple[FleetServer, str]]]]:
    store = await SqliteStore.open(tmp_path / "state")
    servers: list[FleetServer] = []

    async def start() -> tuple[FleetServer, str]:
        server = FleetServer(store, on_applied=heard.on_applied, on_chunks=heard.on_chunks)
        servers.append(server)
        (address,) = await server.start([f"unix://{tmp_path}/fleet.sock"])
        return server, address

    yield start
    for server in servers:
        await server.stop(0.2)
    await store.close()


@pytest.fixture
async def steer(double: Any) -> AsyncIterator[Callable[[str], SteeredEngine]]:
    agents: list[VideoAgent] = []

    def make(address: str) -> SteeredEngine:
        identity = engine_identity(
            double.capabilities(), deployment="video", agent_id="e0", model_name="double", model_fingerprint="m"
        )
        timing = AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.02, backoff_max_s=0.1)
        agent = VideoAgent(identity, address, initial=FOUR, timing=timing)
        agents.append(agent)
        steered = SteeredEngine(double, agent)
        steered.load(LoadSpec(checkpoint="", setting=FOUR, memory_limit_bytes=500))
        agent.start()
        agent.attached()
        return steered

    yield make
    for agent in agents:
        await asyncio.to_thread(agent.close, 0.5)


async def publish(server: FleetServer, configuration: Configuration, *, agent_id: str = "e0") -> int:
    setting = EngineSetting(configuration=configuration, reason="for the test")
    return await server.publish(SELECTOR, [Resource(engine_setting_name(agent_id), setting)], policy_generation=1)


def _engine(server: FleetServer) -> Any:
    """What telemetry says of the engine; None before there is any, which may be after an acknowledgement."""
    told = [s.telemetry for s in server.sessions() if s.telemetry is not None]
    return told[-1].engine if told else None


def _sessions(server: FleetServer) -> dict[str, int] | None:
    engine = _engine(server)
    return None if engine is None else dict(engine.sessions)


def _counters(server: FleetServer) -> dict[str, int]:
    told = [s.telemetry for s in server.sessions() if s.telemetry is not None]
    return dict(told[-1].counters) if told else {}


async def test_a_pushed_setting_takes_effect_at_a_chunk_that_the_engine_names(
    start: Any, steer: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square", service_class="live"))
    assert steered.step("a").report.setting_id == FOUR.config_id
    version = await publish(server, TWO)
    await acknowledged(server, version)
    assert not heard.applied, "acknowledged is not yet in force"
    assert steered.step("a").report.setting_id == TWO.config_id
    await eventually(lambda: bool(heard.applied), "the engine answered")
    (answer,) = heard.applied
    assert (answer.version, answer.setting_id, answer.chunk, answer.refused) == (version, TWO.config_id, 1, {})
    await eventually(lambda: len(heard.chunks) == 2, "both chunks are reported")
    await eventually(lambda: getattr(_engine(server), "chunk", 0) == 2, "telemetry is in")
    assert [chunk.setting_id for chunk in heard.chunks] == [FOUR.config_id, TWO.config_id]
    state = server.sessions()[0].telemetry.engine
    assert (state.setting_id, state.setting_version, state.chunk) == (TWO.config_id, version, 2)
    assert state.sessions == {"live": 1}
    assert state.memory_limit_bytes == 500


async def test_another_version_with_the_same_setting_asks_the_engine_nothing(
    start: Any, steer: Any, double: Any
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    for _ in range(2):
        version = await publish(server, TWO)
        await acknowledged(server, version)
        steered.step("a")
    assert [asked for asked, _ in double.asked] == [TWO.config_id]


async def test_what_the_engine_refuses_is_answered_with_its_reason_and_tried_once(
    start: Any, steer: Any, double: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    double.refuse = "steps: 2 needs the distilled checkpoint"
    version = await publish(server, TWO)
    await acknowledged(server, version)
    for _ in range(3):
        assert steered.step("a").report.setting_id == FOUR.config_id
    await eventually(lambda: bool(heard.applied), "the engine answered")
    assert heard.applied[0].setting_id == FOUR.config_id
    assert "distilled checkpoint" in heard.applied[0].refused["engine.refused"]
    assert len(double.asked) == 1


async def test_a_setting_outside_the_space_is_refused_before_it_reaches_the_engine(
    start: Any, steer: Any, double: Any
) -> None:
    server, address = await start()
    steered = steer(address)
    await eventually(lambda: bool(server.sessions()), "connected")
    await publish(server, Configuration({"kv": "bf16", "steps": 3, "vae": "async"}))
    await eventually(lambda: server.sessions()[0].degraded, "the agent refuses")
    assert "configuration.steps: 3 is not allowed" in server.sessions()[0].last_failed.error
    await publish(server, Configuration({"kv": "int3"}), agent_id="another engine with another space")
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    steered.step("a")
    assert not double.asked


async def test_the_last_answer_is_told_again_to_a_daemon_that_was_restarted(
    start: Any, steer: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    version = await publish(server, TWO)
    await acknowledged(server, version)
    steered.step("a")
    await eventually(lambda: bool(heard.applied), "the engine answered")
    await server.stop(0.2)
    heard.applied.clear()
    assert steered.step("a").report.setting_id == TWO.config_id, "the last setting outlives the daemon"
    server, _ = await start()
    await eventually(lambda: bool(heard.applied), "the answer is told again")
    assert server.sessions()[0].setting_applied == heard.applied[0]


async def test_a_restarted_engine_is_asked_again_for_what_controld_wants(start: Any, steer: Any, double: Any) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    version = await publish(server, TWO)
    await acknowledged(server, version)
    steered.step("a")
    steered.load(LoadSpec(checkpoint="", setting=FOUR))
    steered.open(SessionSpec(session_id="b", prompt="red square"))
    assert steered.step("b").report.setting_id == TWO.config_id


async def test_a_worker_that_died_leaves_no_session_and_the_next_load_is_steered_again(
    start: Any, steer: Any, double: Any
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    steered.open(SessionSpec(session_id="b", prompt="red square"))
    version = await publish(server, TWO)
    await acknowledged(server, version)
    double.dies = True
    with pytest.raises(EngineError, match="died"):
        steered.step("a")
    await eventually(lambda: _sessions(server) == {}, "no session is left")
    double.dies = False
    steered.load(LoadSpec(checkpoint="", setting=FOUR))
    steered.open(SessionSpec(session_id="c", prompt="red square"))
    assert steered.step("c").report.setting_id == TWO.config_id


async def test_a_daemon_that_lost_its_state_counts_from_one_and_is_obeyed(
    start: Any, steer: Any, double: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    steered.apply(TWO, 5000)
    steered.step("a")
    version = await publish(server, FOUR)
    assert version < 5000
    await acknowledged(server, version)
    assert steered.step("a").report.setting_id == FOUR.config_id
    await eventually(lambda: any(told.version == version for told in heard.applied), "it answers under that version")
    assert not any(told.refused for told in heard.applied)


async def test_a_worker_that_dies_while_it_is_asked_accuses_no_setting(
    start: Any, steer: Any, double: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    await acknowledged(server, await publish(server, TWO))

    def die(*_: Any) -> None:
        raise EngineError("killed by signal 9", code="engine.worker_died")

    with monkeypatch.context() as patch:
        patch.setattr(double, "apply", die)
        with pytest.raises(EngineError, match="signal 9"):
            steered.step("a")
    steered.load(LoadSpec(checkpoint="", setting=FOUR))
    steered.open(SessionSpec(session_id="b", prompt="red square"))
    assert steered.step("b").report.setting_id == TWO.config_id, "asked for again"
    await eventually(lambda: bool(heard.applied), "it answers")
    assert not any(answer.refused for answer in heard.applied)


async def test_a_session_whose_close_failed_is_not_counted_any_more(
    start: Any, steer: Any, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square", service_class="live"))
    await eventually(lambda: _sessions(server) == {"live": 1}, "the session is told")

    def fail(*_: Any) -> None:
        raise EngineError("the decoder failed", code="engine.decoder_failed")

    monkeypatch.setattr(double, "close", fail)
    with pytest.raises(EngineError):
        steered.close("a")
    await eventually(lambda: _sessions(server) == {}, "it is forgotten")


async def test_a_chunk_that_failed_is_told_with_the_setting_that_it_ran_under(
    start: Any, steer: Any, double: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    for name in ("a", "b"):
        steered.open(SessionSpec(session_id=name, prompt="red square", service_class="live"))
        steered.step(name)
    version = await publish(server, TWO)
    await acknowledged(server, version)
    double.makes_nan = {TWO.config_id}
    with pytest.raises(EngineError, match="not finite"):
        steered.step("a")
    await eventually(lambda: len(heard.chunks) == 3 and bool(heard.applied), "the chunk is told, and the answer")
    (answer,), seen = heard.applied, heard.chunks[-1]
    assert (answer.version, answer.setting_id, answer.refused) == (version, TWO.config_id, {})
    assert (seen.setting_id, seen.has_nan, seen.frames) == (TWO.config_id, True, 0)
    assert (seen.session_id, seen.service_class, seen.chunk, seen.session_chunk) == ("a", "live", 2, 1)
    await eventually(lambda: _sessions(server) == {"live": 1}, "one session is left")
    assert server.sessions()[0].telemetry.engine.setting_id == TWO.config_id


async def test_a_session_that_ended_or_failed_is_not_counted_any_more(start: Any, steer: Any) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square", chunks=1))
    steered.open(SessionSpec(session_id="b", prompt="red square"))
    steered.step("a")
    steered.close("b")
    with pytest.raises(EngineError, match="no session b"):
        steered.step("b")
    await eventually(lambda: _sessions(server) == {}, "no session is open")


async def test_a_session_that_the_engine_lost_is_told_at_once_and_its_owner_when_it_asks(
    start: Any, steer: Any, double: Any, heard: Heard
) -> None:
    server, address = await start()
    steered = steer(address)
    for name, service_class in (("a", "live"), ("b", "batch"), ("c", "batch")):
        steered.open(SessionSpec(session_id=name, prompt="red square", service_class=service_class))
    await eventually(lambda: _sessions(server) == {"live": 1, "batch": 2}, "the sessions are told")
    double.lose("b")
    await eventually(lambda: _sessions(server) == {"live": 1, "batch": 1}, "it is told though nobody called the engine")
    steered.step("a")
    await eventually(lambda: bool(heard.chunks), "the chunk is told")
    assert heard.chunks[0].sessions == 2, "its memory is of those that are left"
    await eventually(lambda: _counters(server).get("sessions_lost") == 1, "it is counted")
    with pytest.raises(EngineError, match="no session b"):
        steered.step("b")
    steered.step("a")
    await eventually(lambda: len(heard.chunks) == 2, "the chunk is told")
    assert (_sessions(server), _counters(server)["sessions_lost"]) == ({"live": 1, "batch": 1}, 1), "once"


async def test_a_session_that_its_owner_closed_is_not_counted_as_lost(start: Any, steer: Any) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square", chunks=1))
    assert steered.step("a").is_last
    steered.close("a")
    steered.open(SessionSpec(session_id="b", prompt="red square"))
    steered.load(LoadSpec(checkpoint="", setting=FOUR))
    await eventually(lambda: _sessions(server) == {}, "no session is left")
    assert "sessions_lost" not in _counters(server)


async def test_an_engine_that_cannot_say_what_is_open_is_told_as_it_was_last(
    start: Any, steer: Any, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square", service_class="live"))

    def fail() -> frozenset[str]:
        raise RuntimeError("a bug in the engine's own code")

    monkeypatch.setattr(double, "sessions", fail)
    await eventually(lambda: _counters(server).get("internal_error.ask_sessions", 0) > 1, "it is counted")
    assert _sessions(server) == {"live": 1}


async def test_chunks_whose_kv_cache_cannot_be_read_back_are_counted(start: Any, steer: Any, double: Any) -> None:
    server, address = await start()
    steered = steer(address)
    steered.open(SessionSpec(session_id="a", prompt="red square"))
    steered.step("a")
    double.unreadable = True
    for _ in range(2):
        steered.step("a")
    await eventually(lambda: _counters(server).get("kv_unreadable") == 2, "each one is counted")
