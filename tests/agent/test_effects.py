"""Effects: numbered, batched, kept until committed, sent again after a reconnect."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from controld.contract.rpc.convert import effect_from_proto
from dataplanes.agent.effect_ring import EffectRing


def test_effects_arrive_whole_in_order_and_in_batches(daemon, make_agent, make_effect, until):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    stream.wait_for("telemetry")
    effects = [make_effect(f"t{number}", wire_bytes=number) for number in range(1000)]
    for effect in effects:
        agent.report(effect)
    until(lambda: len(stream.effect_seqs()) == 1000, "all effects arrived")
    assert stream.effect_seqs() == list(range(1, 1001))
    arrived = [effect_from_proto(message) for report in stream.of_kind("effects") for message in report.effects]
    assert arrived == effects
    assert len(stream.of_kind("effects")) < 100


def test_a_lone_effect_does_not_wait_long(daemon, make_agent, make_effect):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    stream.wait_for("telemetry")
    began_s = time.monotonic()
    agent.report(make_effect())
    stream.wait_for("effects")
    assert time.monotonic() - began_s < 5.0, "on a busy machine too"


def test_what_is_not_acknowledged_comes_again_and_what_is_does_not(daemon, make_agent, make_effect, until):
    agent = make_agent(daemon.address)
    agent.start()
    first = daemon.stream()
    first.wait_for("telemetry")
    for number in range(10):
        agent.report(make_effect(f"t{number}"))
    until(lambda: len(first.effect_seqs()) == 10, "they arrived")
    first.send(effect_ack={"up_to_seq": 4})
    until(lambda: agent.snapshot().unacknowledged_effects == 6, "four are committed")
    daemon.stop()
    for number in range(10, 13):
        agent.report(make_effect(f"t{number}"))  # while nobody listens
    daemon.start()
    second = daemon.stream(1)
    until(lambda: len(second.effect_seqs()) == 9, "the rest arrived")
    assert second.effect_seqs() == list(range(5, 14))
    sent_again = {e.seq: e.transfer_id for report in second.of_kind("effects") for e in report.effects}
    assert sent_again == {seq: f"t{seq - 1}" for seq in range(5, 14)}
    assert second.wait_for("hello")[0].instance_id == first.wait_for("hello")[0].instance_id
    second.send(effect_ack={"up_to_seq": 13})
    until(lambda: agent.snapshot().unacknowledged_effects == 0, "all are committed")


def test_the_welcome_says_what_need_not_come_again(daemon, make_agent, make_effect, until):
    agent = make_agent(daemon.address)
    agent.start()
    first = daemon.stream()
    for number in range(6):
        agent.report(make_effect(f"t{number}"))
    until(lambda: len(first.effect_seqs()) == 6, "they arrived")
    daemon.stop()
    daemon.welcome.welcome.effects_acked_up_to = 4
    daemon.start()
    second = daemon.stream(1)
    until(lambda: len(second.effect_seqs()) == 2, "the rest arrived")
    assert second.effect_seqs() == [5, 6]


def test_an_acknowledgement_of_what_was_never_sent_is_refused(daemon, make_agent, make_effect, until):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    agent.report(make_effect())
    stream.wait_for("effects")
    stream.send(effect_ack={"up_to_seq": 99})
    until(lambda: agent.snapshot().counters.get("effect_ack_refused") == 1, "the refusal is counted")
    assert agent.snapshot().unacknowledged_effects == 1


def test_a_full_ring_drops_the_oldest_and_counts(daemon, make_agent, make_effect, until):
    daemon.stop()
    agent = make_agent(daemon.address, effect_ring_capacity=100)
    agent.start()
    for number in range(130):
        agent.report(make_effect(f"t{number}"))
    assert agent.snapshot().unacknowledged_effects == 100
    assert agent.snapshot().counters["effects_overflowed"] == 30
    daemon.start()
    stream = daemon.stream()
    until(lambda: len(stream.effect_seqs()) == 100, "the newest arrived")
    assert stream.effect_seqs() == list(range(31, 131))


def test_an_effect_that_cannot_be_sent_does_not_hold_up_the_others(daemon, make_agent, make_effect, until):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    agent.report(make_effect("good-1"))
    agent.report(make_effect("bad-\udc80"))  # no UTF-8 for it
    agent.report(make_effect("good-2", reason="decoder:\x00\x1bbroken"))
    until(lambda: stream.effect_seqs() == [1, 3], "the others arrived")
    assert agent.snapshot().counters["effects_unsendable"] == 1
    assert stream.of_kind("effects")[-1].effects[-1].reason == "decoder:??broken"
    stream.send(effect_ack={"up_to_seq": 3})
    until(lambda: agent.snapshot().unacknowledged_effects == 0, "all are done with")


@given(
    capacity=st.integers(1, 8),
    steps=st.lists(st.one_of(st.just("append"), st.integers(0, 30)), max_size=60),
    cursor=st.integers(0, 40),
    limit=st.integers(1, 10),
)
def test_the_ring_behaves_as_a_list_of_numbered_effects(capacity, steps, cursor, limit):
    dropped = []
    ring = EffectRing(capacity, on_overflow=lambda: dropped.append(1))
    model: list[int] = []
    given_out = lost = 0
    for step in steps:
        if step == "append":
            given_out += 1
            ring.append(given_out)  # any value will do
            model.append(given_out)
            if len(model) > capacity:
                model.pop(0)
                lost += 1
        else:
            accepted = ring.acknowledge(step)
            assert accepted == (step <= given_out)
            if accepted:
                model = [seq for seq in model if seq > step]
    assert len(ring) == len(model)
    assert ring.last_seq() == given_out
    assert len(dropped) == lost
    assert ring.after(cursor, limit) == [(seq, seq) for seq in model if seq > cursor][:limit]
