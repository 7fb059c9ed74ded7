"""Whatever breaks inside the agent, the data plane gets an answer, and telemetry gets the count."""

from __future__ import annotations

import logging
import math
import threading

import pytest

from controld.contract.decision import RAW
from dataplanes.agent import Agent, RawReason
from dataplanes.agent.counters import Counters, ErrorEdge
from dataplanes.agent.plain_text import plain_text

TRANSFER = {"transfer_id": "t", "service_class": "chat", "raw_bytes": 14_000_000, "tier": "pd"}


class BrokenClock:
    """Reads once, for the agent's start; then fails."""

    def __init__(self):
        self.broken = False

    def monotonic_s(self):
        if self.broken:
            raise OSError("no clock")
        return 100.0

    def unix_s(self):
        return 1.7e9


class UnhashableText(str):
    __slots__ = ()
    __hash__ = None


def test_no_call_raises_whatever_the_data_plane_passes(make_agent):
    agent = make_agent("unix:///nobody/listens/here.sock")
    agent.start()
    nonsense = UnhashableText("pd")
    assert agent.draw(**{**TRANSFER, "tier": nonsense}).reason is RawReason.INTERNAL_ERROR
    assert agent.draw(**{**TRANSFER, "tier": []}).drawn.arm.arm_id == RAW
    agent.offered(tier=nonsense, raw_bytes=1)
    agent.offered(tier="pd", raw_bytes=-1)
    agent.withdrawn(tier=nonsense, raw_bytes=1)
    agent.observe_wire(tier=nonsense, start_s=0.0, end_s=1.0, wire_bytes=1)
    agent.observe_wire(tier="pd", start_s=math.nan, end_s=1.0, wire_bytes=1)
    agent.observe_wire(tier="pd", start_s=2.0, end_s=1.0, wire_bytes=1)
    agent.observe_wire(tier="pd", start_s=None, end_s=1.0, wire_bytes=1)
    agent.report(None)
    agent.count(None, None)
    agent.not_attached(None)
    assert agent.classify(extra_key=nonsense, priority=object()) == "default"
    counters = agent.snapshot().counters
    assert counters["internal_error.draw"] == 2
    assert counters["internal_error.observe_wire"] == 4
    assert counters["internal_error.offered"] == 2
    assert counters["internal_error.report"] == 1
    assert counters["internal_error.count"] == 1
    assert counters["internal_error"] == sum(n for name, n in counters.items() if name.startswith("internal_error."))


def test_a_fault_under_the_draw_is_a_raw_transfer_and_shows_in_telemetry(
    daemon, make_agent, make_snapshot, until, caplog
):
    clock = BrokenClock()
    agent = make_agent(daemon.address, clock=clock)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    stream.wait_for("telemetry", 2)
    clock.broken = True
    with caplog.at_level(logging.ERROR, logger="dataplanes.agent.counters"):
        for _ in range(100):
            draw = agent.draw(**TRANSFER)
            assert (draw.drawn.arm.arm_id, draw.reason) == (RAW, RawReason.INTERNAL_ERROR)
    whole = [r for r in caplog.records if "agent error in draw" in r.getMessage()]
    assert len(whole) == 1  # logged whole, once; counted each time
    assert whole[0].exc_info is not None
    clock.broken = False
    assert agent.draw(**TRANSFER).reason is None

    def newest() -> object:
        # Telemetry that was due while the clock was broken has ended its stream.
        return [telemetry for stream in daemon.streams for telemetry in stream.of_kind("telemetry")][-1]

    until(lambda: newest().counters.get("internal_error.draw") == 100, "telemetry shows the faults")
    assert newest().counters["draw_error"] == 100


def test_the_stream_survives_faults_in_its_own_thread(daemon, make_agent, make_snapshot, until):
    clock = BrokenClock()
    agent = make_agent(daemon.address, clock=clock)
    agent.start()
    stream = daemon.stream()
    stream.wait_for("telemetry")
    clock.broken = True
    stream.send(snapshot=make_snapshot(1))  # cannot be applied: no lease without a clock
    again = daemon.stream(1)
    clock.broken = False
    again.send(snapshot=make_snapshot(2))
    again.wait_for("ack")
    assert agent.draw(**TRANSFER).drawn.table_version == 2
    assert agent.snapshot().counters["internal_error.stream"] >= 1


def test_an_agent_that_was_never_started_answers(identity, make_effect):
    agent = Agent(identity, "unix:///nobody/listens/here.sock")
    assert agent.draw(**TRANSFER).reason is RawReason.NO_TABLE
    agent.report(make_effect())
    agent.attached()
    agent.close()
    assert agent.snapshot().unacknowledged_effects == 1


@pytest.mark.parametrize("address", ["", "nonsense", "unix://", "host:99999", "dns:///\x00", "256.256.256.256:1"])
def test_an_impossible_address_is_an_absent_daemon(make_agent, until, address):
    agent = make_agent(address)
    agent.start()
    until(
        lambda: (
            agent.snapshot().counters.get("streams_ended", 0) + agent.snapshot().counters.get("internal_error", 0) > 0
        ),
        "it failed",
    )
    assert agent.draw(**TRANSFER).reason is RawReason.NO_TABLE


def test_counters_lose_nothing_under_threads_and_forget_no_ended_thread():
    counters = Counters()

    def count():
        for _ in range(20_000):
            counters.count("a")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen = [counters.totals().get("a", 0) for _ in range(20)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert counters.totals() == {"a": 160_000}
    assert counters.totals() == {"a": 160_000}


def test_counter_names_are_bounded():
    counters = Counters()
    for number in range(10_000):
        counters.count(f"name-{number}")
    assert len(counters.totals()) <= Counters.MAX_NAMES + 1
    assert sum(counters.totals().values()) == 10_000


def test_different_faults_are_each_logged(caplog):
    edge = ErrorEdge(Counters())
    for error in (KeyError("a"), KeyError("b"), ValueError("c")):
        edge.caught("here", error)
    edge.caught("there", KeyError("d"))
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("text", "plain"),
    [("a\nb\t c", "a b c"), ("x" * 5000, "x" * 2000), ("\x00", "?"), ("\udc80é", "?é"), (None, "None"), ("", "")],
)
def test_texts_are_made_plain(text, plain):
    assert plain_text(text) == plain
