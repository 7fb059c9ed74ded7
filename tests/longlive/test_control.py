"""controld and an engine's double on a real stream: load and memory change, and the setting follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.video_exchange import video_records
from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.video import Applied, MemorySplit, Transition
from controld.controller.video_plan import ArmPlan, VideoPlan
from controld.fleet import FleetServer, Selector
from controld.obs.metrics import Metrics
from controld.planning import video_fittings
from controld.planning.planner import Planner
from controld.planning.video_engines import ABSENT_S
from controld.planning.video_plane import fitting_of
from controld.planning.video_planner import VideoPlanner
from controld.policy.loader import SourceFile, parse_policies
from controld.policy.model import PolicySet
from controld.store.records import AuditEvent
from controld.store.sqlite import SqliteStore
from dataplanes.agent import AgentTiming, VideoAgent
from dataplanes.longlive.agent import SteeredEngine, engine_identity
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

SELECTOR = Selector("longlive", "video")
PATIENCE_S = 60.0
POLICY = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: video}
select: {kind: longlive, deployment: video}
classes:
  - name: live
    match: {extra_key: "class=live"}
    workload: shapes
    tiers: [video]
    max_quality_loss: 0.05
    video: {fps: 20, percentile: 50}
  - {name: default, workload: shapes, tiers: [video], max_quality_loss: 0.05}
"""


def setting(kv: str, steps: int) -> Configuration:
    return Configuration({"kv": kv, "steps": steps, "vae": "async"})


BEST, FAST, SMALL = setting("bf16", 4), setting("bf16", 2), setting("nvfp4", 4)


def profile(kv: str, steps: int) -> VideoProfile:
    return VideoProfile(
        configuration=setting(kv, steps), source=Source.MEASURED, forward_s=0.05, vae_s=0.1, frames_per_chunk=8,
        workload="shapes", model_fingerprint="m", loss_mean=(0.0 if steps == 4 else 0.03) + (kv == "nvfp4") * 0.01,
        loss_se=0.0005, loss_samples=30, provenance="made up for the test",
        memory=VideoMemory(weights_bytes=100, kv_bytes=28 if kv == "nvfp4" else 100, activation_bytes=50),
    )  # fmt: skip


PROFILES = [profile(kv, steps) for kv in ("bf16", "nvfp4") for steps in (4, 2)]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        await asyncio.sleep(0.005)


def _arm(plan: VideoPlan, of: Configuration) -> ArmPlan:
    found = plan.arm(of.config_id)
    assert found is not None
    return found


class House:
    """A store, a fleet, a planner that plans when it is told, and a steered double."""

    def __init__(self, store: SqliteStore, address: str, double: Any) -> None:
        self.clock = ManualClock(unix_origin_s=time.time())
        self.store = store
        self.policies = PolicySet(1, "h", parse_policies([SourceFile("v.yaml", POLICY.encode())]))
        self.fleet = FleetServer(
            store, clock=self.clock, on_applied=self._on_applied, on_chunks=self._on_chunks,
            on_telemetry=self._on_telemetry,
        )  # fmt: skip
        self.planner = self._planner()
        self.chunks = self.thrown_away = 0
        self.double = double
        identity = engine_identity(
            double.capabilities(), deployment="video", agent_id="e0", model_name="double", model_fingerprint="m"
        )
        timing = AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.02, backoff_max_s=0.1)
        self.agent = VideoAgent(identity, address, initial=BEST, timing=timing)
        self.steered = SteeredEngine(double, self.agent)
        self.steered.load(LoadSpec(checkpoint="", setting=BEST))

    def _planner(self) -> VideoPlanner:
        return VideoPlanner(lambda: self.policies, self.store, self.fleet, Metrics(), self.clock, interval_s=1.0)

    async def _on_applied(self, *told: Any) -> None:
        await self.planner.on_applied(*told)

    async def _on_chunks(self, session: Any, reports: Any) -> None:
        await self.planner.on_chunks(session, reports)
        self.chunks += sum(not report.has_nan for report in reports)
        self.thrown_away += sum(report.has_nan for report in reports)

    async def _on_telemetry(self, *told: Any) -> None:
        await self.planner.on_telemetry(*told)

    async def keep(self, *profiles: VideoProfile) -> None:
        identity = self.agent.identity
        hardware = f"{identity.device}/{identity.torch_version}/{identity.threads}"
        stored = [replace(one, hardware=hardware, model_fingerprint="m", workload="shapes") for one in profiles]
        records = [replace(record, updated_unix_s=1.0) for record in video_records(stored)]
        await self.store.profiles.upsert(records)
        self.planner.profiles_changed()

    def open(self, *names: str) -> None:
        for name in names:
            self.steered.open(SessionSpec(session_id=name, prompt="red square", service_class="live"))

    async def round(self) -> Configuration:
        """Let the daemon hear everything, decide, and the engine make a chunk of each session."""
        await eventually(lambda: self.heard(), "the daemon heard the engine")
        await self.planner.plan_once()
        published = self.fleet.desired(SELECTOR)
        if published is not None:
            wanted = published.version
            await eventually(lambda: self.fleet.sessions()[0].acked_version == wanted, "the agent has it")
        for name in list(self.steered._classes):
            self.steered.step(name)
        self.clock.advance(1.0)
        made = self.double._chunk
        await eventually(lambda: self.chunks == made and self.heard(), "the chunks are reported")
        return Configuration(self.double.setting)

    def heard(self) -> bool:
        sessions = self.fleet.sessions()
        telemetry = sessions[0].telemetry if sessions else None
        return telemetry is not None and telemetry.engine == self.agent._desk.state

    async def rounds(self, count: int) -> Configuration:
        for _ in range(count):
            await self.round()
        return Configuration(self.double.setting)


@pytest.fixture
async def house(tmp_path: Path, double: Any) -> AsyncIterator[House]:
    store = await SqliteStore.open(tmp_path / "state")
    address = f"unix://{tmp_path}/fleet.sock"
    double.pass_s, double.vae_s = 0.05, 0.1
    made = House(store, address, double)
    await made.keep(*PROFILES)
    await made.fleet.start([address])
    made.agent.start()
    made.agent.attached()
    yield made
    await asyncio.to_thread(made.agent.close, 0.2)
    await made.fleet.stop(0.2)
    await store.close()


async def test_a_second_stream_lowers_the_steps_and_its_end_brings_them_back(house: House) -> None:
    house.open("a")
    assert await house.rounds(2) == BEST
    house.open("b")
    assert await house.rounds(2) == FAST, "two sessions at 20 a second need 40 of the engine"
    plan = house.planner.plans()[SELECTOR, "e0"]
    assert plan.meets_targets
    assert plan.sessions == 2
    house.steered.close("b")
    assert await house.rounds(3) == FAST, "not at once: a stream may come back"
    assert await house.rounds(12) == BEST


async def test_memory_that_shrinks_quantises_the_cache_and_recovers(house: House) -> None:
    house.open("a")
    assert await house.rounds(2) == BEST
    house.steered.limit_memory(200)
    assert await house.round() == SMALL
    plan = house.planner.plans()[SELECTOR, "e0"]
    assert "needs 250 B of 200 B" in plan.reason
    house.steered.limit_memory(0)
    assert await house.rounds(12) == BEST


async def test_a_machine_that_is_slower_than_its_profile_is_believed(house: House) -> None:
    house.double.pass_s = 0.09
    house.open("a")
    await house.rounds(8)
    assert house.double.setting == FAST, "five passes of 0.09 s make 18 frames a second"
    answer = house.fleet.sessions()[0].setting_applied
    assert answer is not None
    assert answer.setting_id == FAST.config_id
    seen = house.planner.plans()[SELECTOR, "e0"].arm(BEST.config_id)
    assert seen is not None
    assert seen.fps_end_to_end == pytest.approx(8 / 0.45, rel=0.1)


async def test_a_memory_limit_that_the_profile_seemed_to_keep_is_broken_by_one_chunk_only(house: House) -> None:
    # The profiles say 250 and 178 bytes.
    house.double.memory = {
        BEST.config_id: MemorySplit(weights_bytes=110, kv_bytes=120, activation_bytes=70),
        SMALL.config_id: MemorySplit(weights_bytes=100, kv_bytes=28, activation_bytes=50),
    }
    house.open("a")
    house.steered.limit_memory(260)
    assert await house.round() == BEST
    assert await house.rounds(2) == SMALL
    plan = house.planner.plans()[SELECTOR, "e0"]
    assert [r.text for r in _arm(plan, BEST).rejections] == [
        "needs 300 B of 260 B (chunks showed 120% of its profile's)"
    ]
    assert _arm(plan, FAST).memory_bytes == 250, "the small one fits its profile, so the excess is not the engine's"
    assert await house.rounds(12) == SMALL, "and it is not gone back to"
    await house.planner.stop()
    house.planner = house._planner()
    await house.planner.restore()
    assert await house.rounds(2) == SMALL, "nor by another daemon"
    house.clock.advance(20 * 86400.0)
    assert await house.round() == BEST, "after days it is tried again"
    assert await house.rounds(2) == SMALL


async def test_a_setting_that_the_engine_refuses_is_set_aside_with_its_reason(house: House) -> None:
    house.double.refuse = "kv: nvfp4 needs another device"
    house.open("a")
    house.steered.limit_memory(200)
    await house.rounds(2)
    assert house.double.setting == BEST
    plan = house.planner.plans()[SELECTOR, "e0"]
    arm = plan.arm(SMALL.config_id)
    assert arm is not None
    assert "out of use: the engine refused it: kv: nvfp4 needs another device" in [r.text for r in arm.rejections]
    house.double.refuse = ""
    house.clock.advance(601.0)
    assert await house.rounds(2) == SMALL, "later it is tried again"


async def test_the_only_setting_is_asked_for_again_once_its_refusal_is_old(house: House) -> None:
    house.open("a", "live")
    house.double.refuse = "no memory just now"
    house.double.pass_s = 0.09
    await house.rounds(8)
    house.open("b", "live")
    await house.rounds(3)
    refused = [asked for asked, _ in house.double.asked]
    assert refused, "another setting is wanted, and refused"
    house.double.refuse = ""
    await house.rounds(2)
    assert house.double.setting == BEST, "not at once"
    house.clock.advance(601.0)
    assert (await house.rounds(3)).config_id in refused


async def test_one_policy_that_cannot_be_planned_is_told_and_stops_nothing_else(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.open("a")

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(house.planner, "_decide", broken)
    await eventually(house.heard, "the daemon heard the engine")
    await house.planner.plan_once()
    assert house.planner.alarms[SELECTOR] == "not planned: a bug"


async def test_a_chunk_that_is_not_finite_takes_its_setting_out(house: House) -> None:
    house.double.makes_nan = {BEST.config_id}
    house.open("a")
    with pytest.raises(EngineError, match="not finite"):
        await house.round()
    await eventually(lambda: house.thrown_away == 1, "the daemon heard of it")
    house.open("b")
    assert await house.rounds(2) != BEST
    events = [event.document for event in await house.store.audit.recent(10)]
    assert any("a chunk was not finite" in document for document in events)


async def test_chunks_of_settings_that_the_engine_cannot_be_under_leave_no_trace(house: House) -> None:
    house.open("a")
    await house.rounds(1)
    (session,) = house.fleet.sessions()
    (report,) = [replace(house.steered._not_finite("a"), setting_id="0" * 16)]
    before = house.planner.pins()
    await house.planner.on_chunks(session, (report,))
    assert house.planner.pins() == before
    assert not await house.store.audit.recent(10, AuditEvent.ARM_PINNED_OFF)


async def test_what_was_learned_and_pushed_survives_a_restart(house: House) -> None:
    house.double.pass_s = 0.09
    house.open("a")
    await house.rounds(8)
    version = house.fleet.last_version
    await house.planner.stop()
    house.planner = house._planner()
    await house.planner.restore()
    house.steered.step("a")
    assert await house.rounds(2) == FAST
    seen = house.planner.plans()[SELECTOR, "e0"].arm(BEST.config_id)
    assert seen is not None
    assert seen.fps_end_to_end == pytest.approx(8 / 0.45, rel=0.1)
    assert house.fleet.last_version <= version + 1


async def test_a_late_refusal_accuses_the_setting_that_it_was_about(house: House) -> None:
    house.open("a")
    await house.rounds(2)
    house.steered.limit_memory(200)
    assert await house.round() == SMALL
    about_small = house.fleet.last_version
    house.steered.limit_memory(0)
    assert await house.rounds(12) == BEST
    late = Applied(
        version=about_small, setting_id=FAST.config_id, chunk=3, transition=Transition.NONE, seconds=0.0, keeps_kv=True,
        refused={"kv": "no room"},
    )  # fmt: skip
    await house.planner.on_applied(house.fleet.sessions()[0], late)
    assert [pin.arm_id for _, pin in house.planner.pins()] == [SMALL.config_id]
    forgotten = replace(late, version=about_small - 1_000)
    await house.planner.on_applied(house.fleet.sessions()[0], forgotten)
    assert len(house.planner.pins()) == 1, "nobody knows what that version asked for"


async def test_a_setting_outlives_daemons_that_start_without_the_engine(house: House) -> None:
    house.double.pass_s = 0.09
    house.open("a")
    assert await house.rounds(8) == FAST
    (told,) = [r for r in house.fleet.desired(SELECTOR).resources if r.name == "engine_setting/e0"]  # type: ignore[union-attr]
    await asyncio.to_thread(house.agent.close, 0.2)
    await house.planner.stop()
    for _ in range(3):
        fleet = FleetServer(house.store, clock=house.clock)
        planner = VideoPlanner(lambda: house.policies, house.store, fleet, Metrics(), house.clock, interval_s=1.0)
        await planner.restore()
        await planner.plan_once()
        published = fleet.desired(SELECTOR)
        assert published is not None
        assert [r.message for r in published.resources if r.name == told.name] == [told.message]
        await planner.stop()


async def test_who_is_gone_for_minutes_leaves_the_snapshot_and_comes_back_to_its_setting(house: House) -> None:
    def told(fleet: FleetServer) -> list[str]:
        published = fleet.desired(SELECTOR)
        assert published is not None
        return [resource.name for resource in published.resources if resource.name != "class_rules"]

    house.double.pass_s = 0.09
    house.open("a")
    assert await house.rounds(8) == FAST
    identity, address = house.agent.identity, house.agent._connection._address
    await asyncio.to_thread(house.agent.close, 0.2)
    await eventually(lambda: not house.fleet.sessions(), "it is gone")
    house.clock.advance(ABSENT_S)
    await house.planner.plan_once()
    assert told(house.fleet) == ["engine_setting/e0"], "a short absence changes nothing"
    house.clock.advance(1.0)
    assert await house.planner.plan_once() == 1
    assert told(house.fleet) == []
    assert await house.planner.plan_once() == 0, "said once"
    version = await house.store.versions.get(house.fleet.last_version)
    assert version is not None and "e0" not in version.explanations_json
    assert house.planner.plans()[SELECTOR, "e0"].setting == FAST, "a person can still ask"
    await house.planner.stop()
    house.planner = house._planner()
    await house.planner.restore()
    # Nothing can be decided, so what it gets is what was remembered.
    await house.store.profiles.delete([record.key for record in await house.store.profiles.list()])
    house.agent = VideoAgent(identity, address, initial=BEST, timing=AgentTiming(backoff_first_s=0.02))
    house.agent.start()
    await eventually(lambda: bool(house.fleet.sessions()), "it is back")
    await house.planner.plan_once()
    assert told(house.fleet) == ["engine_setting/e0"]
    await eventually(lambda: house.agent.setting() is not None, "it has its setting")
    found = house.agent.setting()
    assert found is not None and found[1].configuration == FAST


async def test_a_setting_that_the_engine_does_not_have_any_more_is_not_what_it_comes_back_to(house: House) -> None:
    house.open("a")
    assert await house.rounds(2) == BEST
    identity, address = house.agent.identity, house.agent._connection._address
    await asyncio.to_thread(house.agent.close, 0.2)
    await eventually(lambda: not house.fleet.sessions(), "it is gone")
    await house.store.profiles.delete([record.key for record in await house.store.profiles.list()])
    house.planner.profiles_changed()
    fewer = identity.space_json.replace('"values":[2,4]', '"values":[1,2]')
    assert fewer != identity.space_json
    initial = setting("bf16", 2)
    house.agent = VideoAgent(replace(identity, space_json=fewer), address, initial=initial, timing=AgentTiming())
    house.agent.start()
    await eventually(lambda: bool(house.fleet.sessions()), "it is back")
    (session,) = house.fleet.sessions()
    await house.planner.on_session(session)
    await house.planner.plan_once()
    published = house.fleet.desired(SELECTOR)
    assert published is not None and [r.name for r in published.resources] == ["class_rules"]


async def test_a_setting_out_of_use_can_be_released_and_the_other_planner_lets_it_be(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.double.makes_nan = {BEST.config_id}
    house.open("a")
    with pytest.raises(EngineError, match="not finite"):
        await house.round()
    await eventually(lambda: house.thrown_away == 1, "the daemon heard of it")
    (((selector, agent_id), pin),) = house.planner.pins()
    assert (selector, agent_id, pin.arm_id) == (SELECTOR, "e0", BEST.config_id)
    other = Planner(lambda: house.policies, house.store, house.fleet, Metrics(), house.clock, interval_s=1.0)
    caplog.clear()
    await other.restore()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert await house.planner.release(BEST.config_id, "another deployment") == []
    assert await house.planner.release(BEST.config_id, None) == [((SELECTOR, "e0"), pin)]
    assert house.planner.pins() == []
    assert [event.event for event in await house.store.audit.recent(1)] == [AuditEvent.ARM_RELEASED]
    assert await house.planner.release(BEST.config_id, None) == []


async def test_profiles_are_looked_through_once_for_engines_of_a_kind(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def counted(*arguments: Any) -> Any:
        looks.append(1)
        return fitting_of(*arguments)

    monkeypatch.setattr(video_fittings, "fitting_of", counted)
    house.open("a", "b")
    await house.rounds(6)
    before = len(looks)
    assert 1 <= before <= 2
    await house.keep(replace(PROFILES[0], forward_s=0.2))
    assert await house.rounds(2) == FAST
    assert len(looks) == before + 1, "again, for there are other profiles"


async def test_without_a_profile_nothing_is_pushed_and_the_operator_is_told(house: House) -> None:
    await house.store.profiles.delete([record.key for record in await house.store.profiles.list()])
    house.planner.profiles_changed()
    house.open("a")
    assert await house.rounds(2) == BEST
    assert "no profile of workload shapes fits e0" in house.planner.alarms[SELECTOR]
    assert not house.double.asked


async def test_a_policy_that_goes_away_leaves_the_engine_as_it_is(house: House) -> None:
    house.open("a", "b")
    assert await house.rounds(2) == FAST
    house.policies = PolicySet(2, "h2", ())
    assert await house.rounds(2) == FAST
    assert house.agent.setting() is None
