"""The whole daemon as a process, steering an engine's double: what a person sees of it, and a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.cli.main import main
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.store.records import ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.agent import AgentTiming, VideoAgent
from dataplanes.longlive.agent import SteeredEngine, engine_identity
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec
from dataplanes.sglang.demo.daemon import Daemon

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
    video: {fps: 20, memory: 220B, percentile: 50}
  - {name: default, workload: shapes, tiers: [video], max_quality_loss: 0.05}
"""
BEST = Configuration({"kv": "bf16", "steps": 4, "vae": "async"})
SMALL = Configuration({"kv": "nvfp4", "steps": 4, "vae": "async"})


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)


@pytest.fixture
async def daemon(tmp_path: Path) -> Daemon:
    made = VideoProfile(
        configuration=BEST, source=Source.MEASURED, forward_s=0.05, vae_s=0.1, frames_per_chunk=8, workload="shapes",
        model_fingerprint="m", loss_mean=0.0, loss_se=0.0005, loss_samples=30, provenance="made up for the test",
        memory=VideoMemory(weights_bytes=100, kv_bytes=100, activation_bytes=50),
    )  # fmt: skip
    memory = VideoMemory(weights_bytes=100, kv_bytes=28, activation_bytes=50)
    small = replace(made, configuration=SMALL, loss_mean=0.01, memory=memory)
    store = await SqliteStore.open(tmp_path / "state")
    for one in (made, small):
        key = ProfileKey(
            model_fingerprint="m", workload="shapes", config_id=one.setting_id, sender_hardware="", receiver_hardware=""
        )
        await store.profiles.upsert([ProfileRecord(key=key, document=one.to_json(), updated_unix_s=1.0)])
    await store.close()
    return Daemon(tmp_path, {"video.yaml": POLICY})


@pytest.fixture
def steered(daemon: Daemon, double: Any) -> Iterator[SteeredEngine]:
    double.pass_s, double.vae_s = 0.05, 0.1
    identity = engine_identity(
        double.capabilities(), deployment="video", agent_id="video-0", model_name="double", model_fingerprint="m"
    )
    timing = AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.02, backoff_max_s=0.1)
    agent = VideoAgent(identity, daemon.fleet_address, initial=BEST, timing=timing)
    made = SteeredEngine(double, agent)
    made.load(LoadSpec(checkpoint="", setting=BEST))
    agent.start()
    agent.attached()
    yield made
    agent.close()


@pytest.mark.slow
def test_a_person_sees_why_an_engine_runs_as_it_does_and_a_kill_changes_nothing(
    daemon: Daemon, steered: SteeredEngine, double: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def stepped_into(wanted: Configuration) -> bool:
        steered.step("a")
        return bool(double.setting == wanted)

    with daemon:
        steered.open(SessionSpec(session_id="a", prompt="red square", service_class="live"))
        wait_until(lambda: stepped_into(SMALL), "memory makes it leave bf16")

        def answered() -> bool:
            found = [engine["applied"] for engine in daemon.get("/v1/engines")["engines"]]
            return bool(found) and found[0] is not None and found[0]["setting_id"] == SMALL.config_id

        wait_until(answered, "the daemon has the engine's answer")
        answer = daemon.get("/v1/engines/video-0/explain")
        assert answer["wanted"] == SMALL.config_id
        assert answer["meets_targets"]
        assert main(["--config", str(daemon.config), "explain", "--engine", "video-0"]) == 0
        shown = capsys.readouterr().out
        assert "in force: " in shown
        assert "CHOSEN, meets all targets" in shown
        assert "out: needs 250 B of 220 B" in shown
        assert main(["--config", str(daemon.config), "--json", "explain", "--engine", "video-0"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["setting"]["kv"] == "nvfp4"
        assert main(["--config", str(daemon.config), "explain", "--engine", "nobody"]) == 1
        assert "engines: video-0" in capsys.readouterr().err
        assert main(["--config", str(daemon.config), "status"]) == 0
        assert "Video engines" in capsys.readouterr().out
        edited = daemon.root / "edited.yaml"
        edited.write_text(POLICY.replace("220B", "300B"))
        assert main(["--config", str(daemon.config), "diff", str(edited)]) in (0, 1)
        assert "300" in capsys.readouterr().out, "an edit of a video policy is shown, too"
        status = daemon.get("/v1/status")
        assert status["alarms"] == [], "a video profile is no unreadable KV profile"
        listed = daemon.get("/v1/candidates")
        assert not listed["candidates"]
        assert {one["config_id"] for one in listed["video_candidates"]} == {BEST.config_id, SMALL.config_id}

        daemon.kill()
        assert stepped_into(SMALL), "the last setting outlives the daemon"
        daemon.start()
        wait_until(answered, "the engine tells its answer again")
        assert stepped_into(SMALL)
        daemon.write_policies({"video.yaml": POLICY.replace("220B", "300B")})
        daemon.reload()
        wait_until(lambda: stepped_into(BEST), "an edit of the policy reaches the engine")
        delete = ["--config", str(daemon.config), "candidates", "--delete", "--config-id", BEST.config_id]
        assert main([*delete, "--dry-run"]) == 0
        assert stepped_into(BEST)
        assert main(delete) == 0
        wait_until(lambda: stepped_into(SMALL), "without its profile a setting is not chosen any more")


@pytest.mark.slow
def test_two_engines_under_one_id_are_an_alarm_with_both_instances_until_one_is_gone(
    daemon: Daemon, steered: SteeredEngine
) -> None:
    served = steered._agent
    timing = AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.02, backoff_max_s=0.1)
    clock = ManualClock(unix_origin_s=time.time() - 1000.0)
    older = VideoAgent(served.identity, daemon.fleet_address, initial=BEST, timing=timing, clock=clock)
    try:
        with daemon:
            wait_until(lambda: bool(daemon.get("/v1/engines")["engines"]), "one is served")
            older.start()

            def rivals() -> list[str]:
                (engine,) = daemon.get("/v1/engines")["engines"]
                return [rival["instance_id"] for rival in engine["rivals"]]

            wait_until(lambda: len(rivals()) == 1, "the other one is seen")
            (engine,) = daemon.get("/v1/engines")["engines"]
            both = [engine["instance_id"], *rivals()]
            assert both == [served.instance_id, older.instance_id]
            told = [alarm for alarm in daemon.get("/v1/status")["alarms"] if alarm["where"].endswith("/video-0")]
            assert len(told) == 1 and all(name in told[0]["what"] for name in both)
            served.close()
            wait_until(lambda: not any("video-0" in a["where"] for a in daemon.get("/v1/status")["alarms"]), "one left")
    finally:
        older.close()


@pytest.mark.slow
def test_a_setting_that_makes_no_finite_chunk_is_out_until_a_person_lets_it_back(
    daemon: Daemon, steered: SteeredEngine, double: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    double.makes_nan = {SMALL.config_id}

    def fails() -> bool:
        try:
            steered.step("a")
        except EngineError as error:
            return error.code == "engine.not_finite"
        return False

    with daemon:
        steered.open(SessionSpec(session_id="a", prompt="red square", service_class="live"))
        wait_until(fails, "memory makes it leave bf16, for a setting that fails")
        wait_until(lambda: bool(daemon.get("/v1/pins")["pins"]), "the setting is out of use")
        (pin,) = daemon.get("/v1/pins")["pins"]
        assert (pin["arm_id"], pin["kind"], pin["agent_id"]) == (SMALL.config_id, "longlive", "video-0")
        assert any(
            "video-0" in alarm["where"] and "not finite" in alarm["what"]
            for alarm in daemon.get("/v1/status")["alarms"]
        )
        double.makes_nan = set()
        steered.open(SessionSpec(session_id="b", prompt="red square", service_class="live"))
        wait_until(lambda: steered.step("b").report.setting_id == BEST.config_id, "it goes back")
        daemon.kill()
        daemon.start()
        assert daemon.get("/v1/pins")["pins"] == [pin], "the pin outlives the daemon"
        assert main(["--config", str(daemon.config), "release", SMALL.config_id]) == 0
        assert "longlive/video/video-0" in capsys.readouterr().out
        assert daemon.get("/v1/pins")["pins"] == []
        wait_until(lambda: steered.step("b").report.setting_id == SMALL.config_id, "it is taken again")
