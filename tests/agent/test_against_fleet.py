"""The agent against the real fleet server with its real store, in this process and in one that is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.decision import ClassRule
from controld.contract.errors import FieldError
from controld.contract.snapshot import ClassRules, Resource
from controld.contract.trial import SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from controld.fleet import FleetServer, FleetSettings, Selector
from controld.store.sqlite import SqliteStore
from dataplanes.agent import Agent, AgentIdentity, AgentTiming

PATIENCE_S = 60.0
SELECTOR = Selector("sglang", "chat")
TRANSFER = {"transfer_id": "t", "service_class": "chat", "raw_bytes": 14_000_000, "tier": "pd"}
RULES = Resource("classes", ClassRules((ClassRule("chat", extra_key="class=chat"),)))

# `publishing` serves one table and keeps its state in a directory, as the daemon does.
SERVER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from controld.contract.decision import RAW, Arm, DecisionTable, Mixture
    from controld.contract.snapshot import Resource
    from controld.fleet import FleetServer, Selector
    from controld.store.sqlite import SqliteStore

    async def main(address, state):
        server = FleetServer(await SqliteStore.open(Path(state)))
        await server.start([address])
        table = DecisionTable(
            tier="pd", link_group="default", version=1, classes=("default",), size_edges_bytes=(),
            bandwidth_edges_bytes_per_s=(), load_edges=(), arms=(Arm(RAW),), mixtures=(Mixture((0,), (1.0,)),),
            cells=(0,), prior_bandwidth_bytes_per_s=1e7,
        )
        await server.publish(Selector("sglang", "chat"), [Resource("pd/default", table)], policy_generation=1)
        print("up", flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main(*sys.argv[1:]))
    """
)


async def eventually(condition, what):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


class Heard:
    def __init__(self):
        self.effects = []
        self.trials = []

    async def on_effects(self, _session, effects):
        self.effects.extend(effects)

    async def on_trial_result(self, _session, outcome):
        self.trials.append(outcome)


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
async def store(tmp_path):
    opened = await SqliteStore.open(tmp_path / "state")
    yield opened
    await opened.close()


@pytest.fixture
async def start_server(store, tmp_path, heard):
    servers = []
    address = f"unix://{tmp_path}/fleet.sock"

    async def start(**settings):
        server = FleetServer(
            store,
            settings=FleetSettings(**settings),
            on_effects=heard.on_effects,
            on_trial_result=heard.on_trial_result,
        )
        servers.append(server)
        await server.start([address])
        return server, address

    yield start
    for server in servers:
        await server.stop(0.2)


@pytest.fixture
async def start_agent(make_agent):
    """Agents that are closed off the event loop, on which the server has to answer them."""
    agents = []

    def start(address, **options):
        agent = make_agent(address, **options)
        agent.start()
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        await asyncio.to_thread(agent.close, 0.5)


def session_of(server, agent_id="p0"):
    return next((s for s in server.sessions() if s.agent_id == agent_id), None)


async def test_a_published_version_is_drawn_from_and_shows_as_effective(start_server, start_agent, make_table):
    server, address = await start_server()
    agent = start_agent(address)
    agent.attached()
    version = await server.publish(SELECTOR, [Resource("pd/default", make_table()), RULES], policy_generation=3)
    await eventually(lambda: agent.draw(**TRANSFER).drawn.table_version == version, "the table is in force")
    assert agent.classify(extra_key="class=chat", priority=None) == "chat"
    assert agent.snapshot().applied.policy_generation == 3
    await eventually(lambda: session_of(server).effective_version == version, "the server knows")
    session = session_of(server)
    assert (session.attached, session.acked_version, session.desired_version) == (True, version, version)
    assert session.identity.instance_id == agent.instance_id
    newer = await server.publish(SELECTOR, [Resource("pd/default", make_table(arm=2))], policy_generation=4)
    await eventually(lambda: agent.draw(**TRANSFER).drawn.table_version == newer, "the newer table is in force")
    assert agent.snapshot().applied.rules == ()  # what was not published again is gone


async def test_a_refused_version_keeps_the_last_known_good_and_shows_as_degraded(start_server, start_agent, make_table):
    def validate(configuration):
        if configuration["key_levels"] == 12:
            raise FieldError("configuration.key_levels", "12 does not run here")

    server, address = await start_server(lease_interval_s=0.1)
    agent = start_agent(address, validate_configuration=validate)
    good = make_table()
    without_twelve = type(good)(
        **{f: getattr(good, f) for f in good.__slots__ if not f.startswith("_")} | {"arms": good.arms[:3]}
    )
    version = await server.publish(SELECTOR, [Resource("pd/default", without_twelve)], policy_generation=1)
    await eventually(lambda: agent.draw(**TRANSFER).drawn.table_version == version, "the good one is in force")
    bad = await server.publish(SELECTOR, [Resource("pd/default", good)], policy_generation=2)
    await eventually(lambda: session_of(server).degraded, "the refusal is known")
    session = session_of(server)
    assert (session.desired_version, session.effective_version) == (bad, version)
    assert "12 does not run here" in session.last_failed.error
    assert session.last_failed.resource == "pd/default"
    left_s = agent.snapshot().lease_left_s
    await eventually(lambda: agent.snapshot().lease_left_s > left_s, "the lease of the good one is renewed")
    assert agent.draw(**TRANSFER).drawn.table_version == version


async def test_a_short_lease_is_kept_alive_by_renewals(start_server, start_agent, make_table):
    clock = ManualClock()
    server, address = await start_server(lease_ttl_s=0.5, lease_interval_s=0.1)
    agent = start_agent(address, clock=clock)
    await server.publish(SELECTOR, [Resource("pd/default", make_table())], policy_generation=1)
    await eventually(lambda: agent.draw(**TRANSFER).reason is None, "the table is in force")
    for _ in range(5):
        clock.advance(0.4)
        assert agent.draw(**TRANSFER).reason is None
        await eventually(lambda: agent.snapshot().lease_left_s == pytest.approx(0.5), "it is renewed")
    await server.stop(0.1)
    await eventually(lambda: not agent.snapshot().connected, "no renewal is under way")
    clock.advance(0.4)
    assert agent.draw(**TRANSFER).reason is None
    clock.advance(0.2)
    assert agent.draw(**TRANSFER).reason == "lease_expired", "the lease ends without the server"


async def test_a_table_larger_than_a_page_arrives_with_twenty_thousand_rules(start_server, start_agent, make_table):
    server, address = await start_server(page_bytes=64 * 1024)
    agent = start_agent(address)
    rules = [
        Resource(
            f"classes-{part:02}", ClassRules(tuple(ClassRule("chat", priority=part * 1000 + n) for n in range(1000)))
        )
        for part in range(20)
    ]
    await server.publish(SELECTOR, [Resource("pd/default", make_table()), *rules], policy_generation=1)
    await eventually(lambda: len(agent.snapshot().applied.rules) == 20_000, "all pages are in")
    assert agent.classify(extra_key=None, priority=19_999) == "chat"


async def test_effects_are_stored_once_over_restarts_of_the_server(
    start_server, start_agent, store, heard, make_effect
):
    server, address = await start_server(drain_reconnect_s=0.0)
    agent = start_agent(address)
    total = 0
    for _ in range(4):
        for _ in range(300):
            agent.report(make_effect(f"t{total}"))
            total += 1
        await asyncio.sleep(0.03)
        await server.stop(0.05)
        server, _ = await start_server(drain_reconnect_s=0.0)
    await eventually(lambda: agent.snapshot().unacknowledged_effects == 0, "all effects are committed")
    assert await store.effects.count() == total
    assert sorted(int(record.effect.transfer_id[1:]) for record in heard.effects) == list(range(total))
    assert sorted(record.seq for record in heard.effects) == list(range(1, total + 1))
    assert {record.instance_id for record in heard.effects} == {agent.instance_id}


async def test_a_trial_goes_out_and_its_result_comes_back(start_server, timing, heard):
    server, address = await start_server()
    task = TrialTask(
        study_id="s",
        trial_id="t",
        workload="dialogue",
        lossy=Configuration({"transform": "hadamard"}),
        coders=("bits",),
        prompt_tokens=(256,),
        segments_per_length=1,
    )

    def measure(asked, progress, cancelled):
        loss = SegmentLoss(prompt_tokens=256, segment=0, loss_nats=0.01, top1_agreement=1.0)
        progress(TrialOutcome(study_id=asked.study_id, trial_id=asked.trial_id, status=TrialStatus.PROGRESS))
        return TrialOutcome(
            study_id=asked.study_id, trial_id=asked.trial_id, status=TrialStatus.MEASURED, losses=(loss,)
        )

    worker = Agent(
        AgentIdentity(deployment="chat", agent_id="w0", kind="sglang", role="profiler"), address, timing=timing
    )
    worker.on_trial(measure)
    worker.start()
    await eventually(lambda: session_of(server, "w0") is not None, "the worker is attached")
    server.request_trial("w0", task)
    await eventually(lambda: heard.trials and heard.trials[-1].status is TrialStatus.MEASURED, "the result is in")
    assert heard.trials[-1].losses[0].loss_nats == 0.01
    await asyncio.to_thread(worker.close, 0.5)


async def test_a_successor_takes_over_and_the_older_instance_goes_on_without_harm(
    start_server, start_agent, make_table
):
    server, address = await start_server()
    await server.publish(SELECTOR, [Resource("pd/default", make_table())], policy_generation=1)
    older = start_agent(address)
    await eventually(lambda: older.draw(**TRANSFER).reason is None, "the older one is served")
    await asyncio.sleep(0.01)
    newer = start_agent(address)
    await eventually(lambda: newer.draw(**TRANSFER).reason is None, "the newer one is served")
    await eventually(lambda: not older.snapshot().connected, "the older one was sent away")
    assert session_of(server).identity.instance_id == newer.instance_id
    assert older.draw(**TRANSFER).reason is None
    assert "internal_error" not in older.snapshot().counters


@pytest.mark.slow
def test_killing_the_server_five_times_loses_and_doubles_no_effect(tmp_path, identity, make_effect):
    address, state = f"unix://{tmp_path}/fleet.sock", tmp_path / "state"
    timing = AgentTiming(telemetry_interval_s=0.1, backoff_first_s=0.05, backoff_max_s=0.2)
    agent = Agent(identity, address, timing=timing)
    agent.start()
    stop = threading.Event()
    reported, draws_off = [0], []

    def transfers():
        while not stop.wait(0.002):
            draw = agent.draw(**TRANSFER)
            if draw.reason is not None:
                draws_off.append(draw.reason)
            agent.report(make_effect(f"t{reported[0]}"))
            reported[0] += 1

    def start():
        process = subprocess.Popen([sys.executable, "-c", SERVER, address, str(state)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"up\n"
        process.stdout.close()
        return process

    process = start()
    wait_until(lambda: agent.draw(**TRANSFER).reason is None)
    plane = threading.Thread(target=transfers)
    plane.start()
    acknowledged_at_kills = []
    for _ in range(5):
        target = reported[0] + 200
        wait_until(lambda: reported[0] > target and agent.snapshot().unacknowledged_effects < 150)  # noqa: B023
        acknowledged_at_kills.append(reported[0] - agent.snapshot().unacknowledged_effects)
        process.kill()
        process.wait()
        process = start()
    stop.set()
    plane.join()
    wait_until(lambda: agent.snapshot().unacknowledged_effects == 0)
    agent.close()
    process.kill()
    process.wait()

    async def stored():
        store = await SqliteStore.open(state)
        records = [record for _, record in await store.effects.after(0, 1_000_000)]
        await store.close()
        return records

    records = asyncio.run(stored())
    assert sorted(record.seq for record in records) == list(range(1, reported[0] + 1))
    assert sorted(int(record.effect.transfer_id[1:]) for record in records) == list(range(reported[0]))
    assert not draws_off  # the last known good served every draw
    assert acknowledged_at_kills == sorted(acknowledged_at_kills)
    assert "internal_error" not in agent.snapshot().counters


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
