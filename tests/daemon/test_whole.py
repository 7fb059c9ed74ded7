"""The whole daemon as a process, with a real agent: nothing acknowledged is lost, and nothing heavy is loaded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from controld.candidates.profile import Profile, StageTime
from controld.cli.main import main
from controld.contract.configuration import Configuration
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as EffectPath
from controld.store.records import ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.agent import Agent, AgentIdentity
from dataplanes.sglang.demo.daemon import Daemon, DaemonError
from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import DEPLOYMENT, SERVED_CLASS, policy_text

CODED = Configuration({"quantise": "levels", "key_levels": 12, "code": "entropy"})
HARDWARE = "cpu/2/1"
POLICY = policy_text(DEMO, {}).replace("tenants:", "links: {default: {rate: 20Mbit}}\ntenants:")


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)


async def keep_profile(state_dir: Path) -> None:
    profile = Profile(
        configuration=CODED, workload="general", model_fingerprint="m", loss_mean_nats=0.01, loss_se_nats=0.001,
        loss_samples=12, worst_prompt_tokens=2048, ratio=4.5, encode=StageTime(1e-3, 5e-9),
        decode=StageTime(1e-3, 5e-9), median_transfer_bytes=14e6, sender_hardware=HARDWARE, receiver_hardware=HARDWARE,
    )  # fmt: skip
    key = ProfileKey(
        model_fingerprint="m",
        workload="general",
        config_id=profile.arm_id,
        sender_hardware=HARDWARE,
        receiver_hardware=HARDWARE,
    )
    store = await SqliteStore.open(state_dir)
    await store.profiles.upsert([ProfileRecord(key=key, document=profile.to_json(), updated_unix_s=1.0)])
    await store.close()


@pytest.fixture
async def daemon(tmp_path: Path) -> Daemon:
    await keep_profile(tmp_path / "state")
    return Daemon(tmp_path, {"demo.yaml": POLICY})


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Agent]:
    with closing(attached(daemon)) as made:
        yield made


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Agent]]:
    """A running daemon and its agent for the tests that change neither policies nor what was learned."""
    root = tmp_path_factory.mktemp("watched")
    asyncio.run(keep_profile(root / "state"))
    with Daemon(root, {"demo.yaml": POLICY}) as daemon, closing(attached(daemon)) as agent:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
        yield daemon, agent


def attached(daemon: Daemon) -> Agent:
    identity = AgentIdentity(
        deployment=DEPLOYMENT, agent_id="prefill-0", kind="sglang", role="prefill", model_fingerprint="m", device="cpu",
        torch_version="2", threads=1, tiers=("pd",),
    )  # fmt: skip
    made = Agent(identity, daemon.fleet_address)
    made.start()
    made.attached()
    return made


def effect(number: int, table_version: int = 1) -> Effect:
    return Effect(
        transfer_id=f"t{number}", half=Half.SENDER, arm_id=CODED.config_id, table_version=table_version,
        service_class="chat",
        tier="pd", link_group="default", tokens=600, chunks=8, raw_bytes=14_000_000, wire_bytes=3_100_000, encode_s=0.1,
        wire_s=1.2 + number % 5 / 10, decode_s=0.1, wait_s=0.0, total_s=1.4, path=EffectPath.CODED,
        verdict=Verdict.VERIFIED, bandwidth_bytes_per_s=2.5e6, finished_unix_s=time.time(),
    )  # fmt: skip


def learned(daemon: Daemon) -> str:
    return json.dumps(daemon.get("/v1/posteriors"), sort_keys=True)


def stored(daemon: Daemon) -> int:
    return sum(row["transfers"] for row in daemon.get("/v1/status")["transfers"])


def evidence(daemon: Daemon) -> int:
    return int(daemon.get("/v1/posteriors")["posteriors"][0]["tables"][0]["evidence"])


def coded_in_slow_cell(agent: Agent) -> bool:
    draw = agent.draw(transfer_id="x", service_class="chat", raw_bytes=20_000_000, tier="pd")
    return draw.drawn.arm.arm_id == CODED.config_id


@pytest.mark.slow
def test_killed_five_times_it_loses_no_acknowledged_effect_and_no_lesson(daemon: Daemon, agent: Agent) -> None:
    reported = 0
    daemon.start()
    try:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
        generation = daemon.get("/v1/policies")["generation"]
        for _ in range(5):
            for _ in range(40):
                agent.report(effect(reported))
                reported += 1
            wait_until(lambda: agent.snapshot().unacknowledged_effects == 0, "all effects are acknowledged")
            wait_until(lambda: evidence(daemon) == reported, "all effects are learned")  # noqa: B023 - called at once
            before = learned(daemon)
            agent.report(effect(reported))  # in flight while it dies
            reported += 1
            daemon.kill()
            assert coded_in_slow_cell(agent), "the last known good table goes on without the daemon"
            daemon.start()
            after_restart = json.loads(learned(daemon))
            wait_until(lambda: stored(daemon) == reported, "the effect in flight is back")  # noqa: B023
            assert daemon.get("/v1/policies")["generation"] == generation
            # The effect in flight may be in already; without it nothing may differ.
            if json.dumps(after_restart, sort_keys=True) != before:
                assert evidence(daemon) == reported
        assert stored(daemon) == reported
    finally:
        daemon.stop()


def test_the_running_daemon_has_loaded_nothing_heavy(watched: tuple[Daemon, Agent]) -> None:
    daemon, _ = watched
    daemon.get("/v1/candidates")
    daemon.get("/v1/explain?class=chat&bytes=20MB&bandwidth=20Mbit")
    assert daemon.process is not None
    loaded = {mapped.path for mapped in psutil.Process(daemon.process.pid).memory_maps()}
    heavy = [path for path in loaded if any(f"/{name}/" in path for name in ("torch", "scipy", "pandas"))]
    assert any("/numpy/" in path for path in loaded), "the test sees what is loaded"
    assert not heavy


def test_explanations_follow_a_transfer_over_a_restart(daemon: Daemon, agent: Agent) -> None:
    with daemon:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
        agent.report(effect(0, agent.snapshot().applied.version))
        wait_until(lambda: stored(daemon) == 1, "the effect is stored")
    with daemon:
        answer = daemon.get("/v1/decisions/t0/explain")
        assert "DRAWN" in answer["text"]
        assert answer["decision"]["winner"] == CODED.config_id
        with pytest.raises(DaemonError, match="404"):
            daemon.get("/v1/decisions/none/explain")


def test_a_policy_edit_reaches_the_agent_and_a_broken_one_does_not(daemon: Daemon, agent: Agent) -> None:
    with daemon:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
        daemon.write_policies({"demo.yaml": POLICY.replace("explore: 2%", "explore: 2")})
        with pytest.raises(DaemonError, match=r"demo\.yaml:"):
            daemon.reload()
        assert coded_in_slow_cell(agent), "the last good policy stays in force"
        daemon.write_policies({"demo.yaml": POLICY.replace("tiers: [pd]", "tiers: [prefix_store]")})
        daemon.reload()
        wait_until(lambda: not coded_in_slow_cell(agent), "the class stays raw in a tier that it does not name")


def test_a_policy_that_goes_away_while_the_daemon_is_down_is_withdrawn(daemon: Daemon, agent: Agent) -> None:
    with daemon:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
    daemon.write_policies({"demo.yaml": POLICY.replace(f"deployment: {DEPLOYMENT}", "deployment: other")})
    assert coded_in_slow_cell(agent), "nobody told the agent yet"
    with daemon:
        wait_until(lambda: not coded_in_slow_cell(agent), "the agent goes raw")


def test_metrics_name_agents_and_reloads(watched: tuple[Daemon, Agent]) -> None:
    daemon, _ = watched
    daemon.reload()
    wait_until(lambda: 'state="attached"} 1.0' in daemon.text("/metrics"), "the agent is counted")
    assert 'controld_reloads_total{outcome="accepted"} 1.0' in daemon.text("/metrics")


def test_an_edit_is_judged_before_it_is_applied(
    watched: tuple[Daemon, Agent], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, agent = watched
    edited = tmp_path / "edited.yaml"
    edited.write_text(POLICY.replace("tiers: [pd]", "tiers: [prefix_store]"))
    before = daemon.get("/v1/policies")
    assert main(["--config", str(daemon.config), "diff", str(daemon.policy_dir)]) == 0
    assert capsys.readouterr().out == "nothing would change: this is what generation 1 says\n"
    assert main(["--config", str(daemon.config), "diff", str(edited)]) == 0
    text = capsys.readouterr().out
    assert "classes.chat.tiers: pd -> prefix_store" in text
    assert "class chat, tier pd" not in text, "a tier that no class names has no table"
    assert "tier pd is named no more: everything goes raw there" in text
    edited.write_text(POLICY.replace("explore: 2%", "explore: 2"))
    assert main(["--config", str(daemon.config), "--json", "diff", str(edited)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["file"] == str(edited)
    assert daemon.get("/v1/policies") == before
    assert coded_in_slow_cell(agent)


def test_status_shows_tenants_and_how_alike_they_were_slowed_down(
    daemon: Daemon, agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = "tenants:\n  - {name: acme, weight: 1}\n"
    daemon.write_policies(
        {"demo.yaml": POLICY.replace("tenants:\n", tenants).replace("default\n    match", "acme\n    match")}
    )
    with daemon:
        wait_until(lambda: agent.tenancy().weights == {"acme": 0.5, "default": 0.5}, "the agent knows the tenants")
        for number in range(4):
            agent.report(replace(effect(number), service_class="default" if number % 2 else SERVED_CLASS))

        def plane() -> dict[str, Any]:
            (found,) = daemon.get("/v1/status")["tenants"]
            return found

        wait_until(lambda: sum(each["transfers"] for each in plane()["tenants"]) == 4, "all transfers are told")
        acme, default = plane()["tenants"]
        assert (acme["name"], acme["transfers"], acme["raw_bytes"]) == ("acme", 2, 28_000_000)
        assert min(acme["slowdown"], default["slowdown"]) > 0
        assert main(["status", "--config", str(daemon.config)]) == 0
        shown = capsys.readouterr().out
        assert "Tenants since the daemon started" in shown
        assert f"fairness of sglang/{DEPLOYMENT}: Jain's index of slowdown {plane()['jain_index']:.2f}" in shown
        assert f'controld_tenant_raw_bytes_total{{deployment="{DEPLOYMENT}",tenant="acme"}} 2.8e+07' in daemon.text(
            "/metrics"
        )


def test_a_worse_codec_is_an_alarm_until_a_person_releases_it(
    daemon: Daemon, agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    """No profile says what is normal here, so the first twenty checked transfers do."""
    with daemon:
        wait_until(lambda: coded_in_slow_cell(agent), "the agent draws the coded arm")
        for number in range(23):
            checked = 0.02 if number < 20 else 0.2
            agent.report(dataclasses.replace(effect(number), reconstruction_error=checked))
        wait_until(lambda: not coded_in_slow_cell(agent), "the arm is out of the table")
        status = daemon.get("/v1/status")
        (alarm,) = status["alarms"]
        assert f"{CODED.config_id} is out of use for class chat: reconstruction error 10 times" in alarm["what"]
        (row,) = status["guard"]
        assert (row["state"], row["samples"], row["normal_from"]) == ("pinned_off", 23, "first samples")
        (pin,) = daemon.get("/v1/pins")["pins"]
        assert (pin["arm_id"], pin["service_class"], pin["until_unix_s"]) == (CODED.config_id, "chat", None)
        assert 'controld_self_checks_total{service_class="chat"} 23.0' in daemon.text("/metrics")
        assert main(["--config", str(daemon.config), "status"]) == 0
        assert "Quality guard" in capsys.readouterr().out
        assert main(["--config", str(daemon.config), "release", "0123456789abcdef"]) == 1
        assert main(["--config", str(daemon.config), "release", CODED.config_id]) == 0
        assert "may be used again for class chat; it was out: reconstruction error" in capsys.readouterr().out
        wait_until(lambda: coded_in_slow_cell(agent), "the arm is back")
        assert daemon.get("/v1/status")["alarms"] == []
