"""Transfers in the simulated world: what overlaps, what waits, and what is never more than the link carries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.arrivals import TrafficClass, gap_for_load, generate, one_after_another
from controld.sim.deciders.base import SilentDecider, Situation
from controld.sim.deciders.fixed import StaticArm
from controld.sim.engine import simulate
from controld.sim.link import LinkTruth
from controld.sim.metrics import regret
from controld.sim.record import Arrival, Choice
from controld.sim.schedule import Drift, RateSchedule, Trait
from controld.sim.world import CodecTruth, Noise, World

Build = Callable[..., Any]


def two_peers(count: int = 40) -> list[Arrival]:
    classes = [TrafficClass(peer=0, median_bytes=5e6, log_sd=0.8), TrafficClass(peer=1, median_bytes=9e6, log_sd=0.3)]
    return generate(classes, count=count, gap_s=0.3, seed=3)


class Turns(SilentDecider):
    """Goes round the arms, and keeps the spans that it is told of."""

    name = "turns"

    def __init__(self, arms: tuple[str, ...]) -> None:
        self.arms = arms
        self.spans: list[tuple[float, float, float]] = []
        self.seen: list[Situation] = []

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        self.seen.append(situation)
        return Choice(self.arms[situation.index % len(self.arms)])

    def wire_span(self, arrival: Arrival, start_s: float, end_s: float, wire_bytes: float) -> None:
        self.spans.append((start_s, end_s, wire_bytes))


def test_one_chunk_takes_the_sum_of_its_stages(world_of: Build, arms: tuple[str, ...]) -> None:
    world = world_of(chunk_bytes=1e9)
    (record,) = simulate(world, [Arrival(at_s=2.0, raw_bytes=12_000_000)], StaticArm(arms[0])).records
    encode_s, decode_s, wire_s = 2e-3 + 12e6 / 200e6, 2e-3 + 12e6 / 300e6, 2e6 / 12.5e6
    assert record.total_s == pytest.approx(encode_s + wire_s + 5e-4 + decode_s)
    assert (record.encode_s, record.decode_s) == (pytest.approx(encode_s), pytest.approx(decode_s))
    assert (record.arrived_s, record.wait_s) == (2.0, 0.0)
    assert record.wire_s == pytest.approx(wire_s + 5e-4)


def test_stages_of_chunks_overlap_up_to_the_slowest(world_of: Build, arms: tuple[str, ...]) -> None:
    def seconds(chunk_bytes: float, slots: int) -> float:
        world = world_of(20e6, chunk_bytes=chunk_bytes, slots=slots)
        return simulate(world, [Arrival(at_s=0.0, raw_bytes=12_000_000)], StaticArm(arms[0])).records[0].total_s

    stages = (2e-3 + 12e6 / 200e6, 2e6 / 20e6, 2e-3 + 12e6 / 300e6)
    serial, overlapped, one_slot = seconds(1e9, 4), seconds(1e6, 4), seconds(1e6, 1)
    assert max(stages) < overlapped < max(stages) + 0.25 * (sum(stages) - max(stages))
    assert serial == pytest.approx(sum(stages) + 5e-4)
    # With one slot nothing overlaps, and every chunk pays the round trip.
    assert one_slot == pytest.approx(sum(stages) + 12 * 5e-4)


def test_raw_pays_its_own_overhead(world_of: Build) -> None:
    world = world_of(raw_a_s=3e-3, raw_b_s_per_byte=1e-9)
    (record,) = simulate(world, [Arrival(at_s=0.0, raw_bytes=10_000_000)], StaticArm(RAW)).records
    assert record.total_s == pytest.approx(3e-3 + 1e-2 + 0.8 + 5e-4)
    assert record.wire_s == pytest.approx(record.total_s)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_working_a_transfer_through_is_what_its_events_would_be(
    world_of: Build, arms: tuple[str, ...], slots: int
) -> None:
    schedule = RateSchedule.parse("0s=100Mbit,5s~20Mbit,9s=1Gbit")
    world = world_of(
        link=LinkTruth(schedule=schedule, rtt_s=0.02, rest_s=0.1), slots=slots, noise=Noise.even(0.2), chunk_bytes=7e5
    )
    arrivals = generate([TrafficClass(median_bytes=4e6, log_sd=1.0)], count=60, gap_s=0.2, seed=5)
    quick = simulate(world, arrivals, Turns((RAW, *arms)), seed=9)
    by_events = simulate(world, arrivals, Turns((RAW, *arms)), seed=9, always_events=True)
    for one, other in zip(quick.records, by_events.records, strict=True):
        assert one.finished_s == pytest.approx(other.finished_s, rel=1e-9)
        assert (one.encode_s, one.decode_s) == (pytest.approx(other.encode_s), pytest.approx(other.decode_s))
        assert (one.wire_s, one.wire_bytes) == (pytest.approx(other.wire_s), pytest.approx(other.wire_bytes))


def test_nothing_is_lost_and_nothing_added(world_of: Build, arms: tuple[str, ...]) -> None:
    decider = Turns((RAW, *arms))
    arrivals = two_peers()
    run = simulate(world_of(noise=Noise.even(0.3)), arrivals, decider, seed=1)
    assert [record.index for record in run.records] == list(range(len(arrivals)))
    shares = dict(zip((RAW, *arms), (1.0, 1 / 6, 1 / 3, 1 / 1.4), strict=True))
    for record, arrival in zip(run.records, arrivals, strict=True):
        assert record.raw_bytes == arrival.raw_bytes
        assert record.wire_bytes == pytest.approx(arrival.raw_bytes * shares[record.arm_id])
        assert record.arrived_s <= record.started_s < record.finished_s
    assert sum(size for _, _, size in decider.spans) == pytest.approx(sum(r.wire_bytes for r in run.records))


def test_the_link_never_carries_more_than_its_rate(world_of: Build, arms: tuple[str, ...]) -> None:
    schedule = RateSchedule.parse("0s=200Mbit,3s~10Mbit,8s=80Mbit")
    decider = Turns(arms)
    world = world_of(link=LinkTruth(schedule=schedule), chunk_bytes=3e5)
    simulate(world, two_peers(), decider)
    grid = [step / 20 for step in range(400)]
    rates = [schedule.rate((low + high) / 2, 0) for low, high in itertools.pairwise(grid)]
    ends = sorted(decider.spans, key=lambda span: span[1])
    # Bytes whose last one arrived within a window cannot be more than the window carries and one chunk.
    for first in range(0, len(grid) - 20, 7):
        low, high = grid[first], grid[first + 20]
        carried = sum(rates[first : first + 20]) / 20
        arrived = sum(size for _, end, size in ends if low < end - 5e-4 <= high)
        assert arrived <= carried + 3e5 * 1.0 + 1.0


def test_a_peer_serves_one_after_another_in_order(world_of: Build, arms: tuple[str, ...]) -> None:
    run = simulate(world_of(), two_peers(), StaticArm(arms[1]))
    for peer in (0, 1):
        mine = [record for record in run.records if record.peer == peer]
        for before, after in itertools.pairwise(mine):
            assert after.started_s >= before.finished_s
            assert after.started_s == pytest.approx(max(after.arrived_s, before.finished_s))
    together = [(a, b) for a in run.records for b in run.records if a.peer < b.peer]
    assert any(a.started_s < b.finished_s and b.started_s < a.finished_s for a, b in together)


def test_codecs_that_run_together_slow_each_other(world_of: Build, arms: tuple[str, ...]) -> None:
    arrivals = [Arrival(at_s=0.0, raw_bytes=9_000_000, peer=peer) for peer in (0, 1, 2)]
    alone = simulate(world_of(1e9), arrivals, StaticArm(arms[0]))
    busy = simulate(world_of(1e9, contention=1.0), arrivals, StaticArm(arms[0]))
    quiet = simulate(world_of(1e9, contention=1.0), arrivals[:1], StaticArm(arms[0]))
    assert busy.records[2].encode_s > 2 * alone.records[2].encode_s
    assert quiet.records[0].encode_s == pytest.approx(alone.records[0].encode_s)


def test_a_drift_slows_an_arm_from_its_transfer_on(world_of: Build, arms: tuple[str, ...]) -> None:
    drift = Drift(factor=4.0, arm_id=arms[0], from_transfer=5, until_transfer=8)
    worse = Drift(factor=3.0, arm_id=arms[0], from_transfer=6, traits=(Trait.LOSS,))
    arrivals = one_after_another([TrafficClass()], count=10, pause_s=1.0, seed=0)
    records = simulate(world_of(drifts=(drift, worse)), arrivals, StaticArm(arms[0]), in_flight=1).records
    usual = records[0].encode_s
    assert [round(record.encode_s / usual, 6) for record in records] == [1.0] * 5 + [4.0] * 3 + [1.0] * 2
    assert [record.loss_nats for record in records] == pytest.approx([0.01] * 6 + [0.03] * 4)
    other = simulate(world_of(drifts=(drift,)), arrivals, StaticArm(arms[1]), in_flight=1).records
    assert other[6].encode_s == pytest.approx(other[0].encode_s)


def test_one_in_flight_begins_when_the_one_before_has_ended(world_of: Build) -> None:
    arrivals = one_after_another([TrafficClass()], count=5, pause_s=0.25, seed=0)
    records = simulate(world_of(), arrivals, StaticArm(RAW), in_flight=1).records
    assert all(record.wait_s == 0 for record in records)
    for before, after in itertools.pairwise(records):
        assert after.arrived_s == pytest.approx(before.finished_s + 0.25)


def test_equal_seeds_give_equal_records(world_of: Build, arms: tuple[str, ...]) -> None:
    world = world_of(noise=Noise.even(0.3), contention=0.2)
    first = simulate(world, two_peers(), Turns((RAW, *arms)), seed=4)
    again = simulate(world, two_peers(), Turns((RAW, *arms)), seed=4)
    other = simulate(world, two_peers(), Turns((RAW, *arms)), seed=5)
    assert first.records == again.records
    assert first.records != other.records


def test_noise_is_of_the_transfer_and_not_of_what_was_chosen(world_of: Build, arms: tuple[str, ...]) -> None:
    world = world_of(noise=Noise(encode=0.4))
    arrivals = one_after_another([TrafficClass()], count=20, pause_s=0.0, seed=0)
    one, other = (simulate(world, arrivals, StaticArm(arm), seed=2, in_flight=1).records for arm in arms[:2])
    ratios = {round(a.encode_s / b.encode_s, 9) for a, b in zip(one, other, strict=True)}
    assert len(ratios) == 1


def test_a_queue_behaves_as_theory_says() -> None:
    # M/D/1 at rho 0.5: the mean wait is rho S / (2 (1 - rho)), half a service time of 1 s.
    world = World(codecs={}, link=LinkTruth(schedule=RateSchedule.constant(1e6), rtt_s=0.0), raw_a_s=0.0)
    classes = [TrafficClass(median_bytes=1e6)]
    gap_s = gap_for_load(classes, load=0.5, bandwidth_bytes_per_s=1e6)
    run = simulate(world, generate(classes, count=6_000, gap_s=gap_s, seed=11), StaticArm(RAW))
    assert gap_s == 2.0
    mean_wait_s = sum(record.wait_s for record in run.records) / len(run.records)
    assert mean_wait_s == pytest.approx(0.5, rel=0.1)


def test_the_decider_is_told_what_waits(world_of: Build) -> None:
    decider = Turns((RAW,))
    arrivals = [Arrival(at_s=0.0, raw_bytes=1_000_000, peer=peer) for peer in (0, 0, 0, 1)]
    simulate(world_of(), arrivals, decider)
    assert [(s.begun, s.behind, s.elsewhere) for s in decider.seen[:2]] == [(0, 0, 0), (1, 0, 3)]


def test_arrivals_that_cannot_be_are_refused(world_of: Build) -> None:
    late = [Arrival(at_s=1.0, raw_bytes=1), Arrival(at_s=0.0, raw_bytes=1)]
    with pytest.raises(FieldError, match="order of time"):
        simulate(world_of(), late, StaticArm(RAW))
    with pytest.raises(FieldError, match="no bytes"):
        simulate(world_of(), [Arrival(at_s=0.0, raw_bytes=0)], StaticArm(RAW))


def test_runs_of_other_arrivals_are_not_compared(world_of: Build) -> None:
    arrivals = two_peers(4)
    run = simulate(world_of(), arrivals, StaticArm(RAW))
    other = replace(run, records=run.records[:3])
    assert regret(run, run) == 0.0
    with pytest.raises(FieldError, match="not of the same"):
        regret(run, other)


def test_worlds_that_cannot_be_are_refused(world_of: Build) -> None:
    for changes in ({"slots": 0}, {"codecs": {RAW: CodecTruth()}}, {"drifts": (Drift(factor=2.0, arm_id="nobody"),)}):
        with pytest.raises(FieldError):
            world_of(**changes)
