"""An artefact from the daemon's folder to two real agents: receivers first, then the table that names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controld.contract.clock import SystemClock
from controld.contract.configuration import Configuration
from controld.contract.snapshot import CalibratedArtefact
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.artefacts import ArtefactFolder
from controld.planning.planner import Planner
from controld.store.records import ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.agent import Agent, AgentIdentity
from tests.planning.test_artefacts import CALIBRATED, NAME, file_bytes
from tests.planning.test_planner import SELECTOR, policy_set, profile, service_class

LARGE = file_bytes(payload=bytes(5_000_000))


class Daemon:
    """Store, fleet and planner, without policies on disk and without an admin API."""

    def __init__(self, store: SqliteStore, folder: Path) -> None:
        self.store = store
        self.fleet = FleetServer(store, on_session=self._on_session, on_telemetry=self._on_telemetry)
        policies = policy_set(service_class("chat", explore_share=0.0))
        self.planner = Planner(
            lambda: policies, store, self.fleet, Metrics(), SystemClock(), interval_s=0.05,
            artefacts=ArtefactFolder(folder),
        )  # fmt: skip

    async def _on_session(self, session: AgentSession) -> None:
        await self.planner.on_session(session)

    async def _on_telemetry(self, session: AgentSession, telemetry: object) -> None:
        await self.planner.on_telemetry(session, telemetry)  # type: ignore[arg-type]

    async def keep_profile(self) -> None:
        kept = replace(profile(), configuration=CALIBRATED, arm_id="", sender_hardware="", receiver_hardware="")
        key = ProfileKey(
            model_fingerprint="m", workload="general", config_id=kept.arm_id, sender_hardware="", receiver_hardware=""
        )
        await self.store.profiles.upsert([ProfileRecord(key=key, document=kept.to_json(), updated_unix_s=1.0)])
        self.planner.profiles_changed()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    store = await SqliteStore.open(tmp_path / "state")
    daemon = Daemon(store, tmp_path / "artefacts")
    await daemon.fleet.start([f"unix://{tmp_path}/fleet.sock"])
    await daemon.planner.start()
    yield daemon
    await daemon.planner.stop()
    await daemon.fleet.stop(0.5)
    await store.close()


@pytest.fixture
def make_agent(tmp_path: Path):
    started: list[Agent] = []

    def make(role: str, events: list[tuple[str, str]], refuse: bool = False) -> Agent:
        def hold(artefact: CalibratedArtefact) -> None:
            if refuse:
                raise ValueError("no room")
            assert artefact.content == LARGE
            events.append((role, "held"))

        def validate(configuration: Configuration) -> None:
            events.append((role, "named"))

        identity = AgentIdentity(deployment="chat", agent_id=role, kind="sglang", role=role, model_fingerprint="m")
        agent = Agent(identity, f"unix://{tmp_path}/fleet.sock", validate_configuration=validate, hold_artefact=hold)
        started.append(agent)
        agent.start()
        return agent

    yield make
    for agent in started:
        agent.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def drawn(agent: Agent) -> str:
    draw = agent.draw(transfer_id="t", service_class="chat", raw_bytes=20_000_000, tier="pd")
    return draw.drawn.arm.arm_id


async def test_receivers_hold_an_artefact_before_a_sender_may_name_it(daemon, make_agent, tmp_path) -> None:
    await daemon.keep_profile()
    events: list[tuple[str, str]] = []
    sender = make_agent("prefill", events)
    await eventually(lambda: daemon.fleet.desired(SELECTOR) is not None and sender.snapshot().applied.version > 0)
    assert ("prefill", "named") not in events
    (tmp_path / "artefacts").mkdir()
    (tmp_path / "artefacts" / f"{NAME}.safetensors").write_bytes(LARGE)
    make_agent("decode", events)
    await eventually(lambda: ("prefill", "named") in events)
    assert events.index(("decode", "held")) < events.index(("prefill", "named"))
    assert events.index(("prefill", "held")) < events.index(("prefill", "named"))
    assert events.count(("decode", "held")) == 1, "its bytes go over a stream once"
    assert not daemon.planner.alarms[SELECTOR]


async def test_arms_wait_for_a_receiver_that_refuses_and_for_a_file_that_is_missing(
    daemon, make_agent, tmp_path
) -> None:
    await daemon.keep_profile()
    events: list[tuple[str, str]] = []
    make_agent("decode", events, refuse=True)
    sender = make_agent("prefill", events)
    await eventually(lambda: NAME in daemon.planner.alarms.get(SELECTOR, ""))
    (tmp_path / "artefacts").mkdir()
    (tmp_path / "artefacts" / f"{NAME}.safetensors").write_bytes(LARGE)
    await eventually(lambda: any(session.degraded for session in daemon.fleet.sessions()))
    await eventually(lambda: ("prefill", "held") in events)
    assert ("prefill", "named") not in events
    assert drawn(sender) == "raw"
