"""The event loop: peers' queues with one worker each, chunks whose stages overlap, and one link below all of them.

A worker takes the next transfer of its queue when the one before is acknowledged to the end, asks the decider for an
arm, and keeps up to `slots` chunks under way: one being encoded, the others on the wire, being decoded, or waiting for
that. The link carries chunks in the order in which they were encoded, whoever sent them.

With one queue a transfer meets no other one, so it is worked out in one go (`alone`) and only its end is an event.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from controld.contract.errors import FieldError
from controld.sim.alone import NO_NOISE, Span, work_through
from controld.sim.deciders.base import Decider, Situation
from controld.sim.link import FifoLink
from controld.sim.queues import FifoQueue, TransferQueue
from controld.sim.record import Arrival, Choice, Run, TransferRecord
from controld.sim.world import Work, World


class _Event(IntEnum):
    """What happens; of what happens at one moment, what was scheduled first."""

    HANDED_OVER = 0
    ENCODED = 1
    ARRIVED = 2
    DECODED = 3
    ACKNOWLEDGED = 4


class _Job:
    """A transfer under way."""

    __slots__ = (
        "acknowledged", "arrival", "choice", "cost_bytes", "decode_s", "decoded", "encode_s", "encoded", "index",
        "is_decoding", "is_encoding", "loss_nats", "noise", "spans", "started_s", "to_decode", "wire_bytes", "work",
    )  # fmt: skip

    def __init__(self, index: int, arrival: Arrival, cost_bytes: float) -> None:
        self.index = index
        self.arrival = arrival
        self.cost_bytes = cost_bytes
        self.is_encoding = self.is_decoding = False
        self.encoded = self.to_decode = self.decoded = self.acknowledged = 0
        self.encode_s = self.decode_s = self.wire_bytes = 0.0
        self.spans: list[Span] = []
        self.started_s = 0.0
        self.choice: Choice
        self.work: Work
        self.noise = NO_NOISE
        self.loss_nats = 0.0


def simulate(
    world: World,
    arrivals: Sequence[Arrival],
    decider: Decider,
    *,
    seed: int = 0,
    in_flight: int | None = None,
    new_queue: Callable[[], TransferQueue[_Job]] = FifoQueue,
    on_finished: Callable[[int], None] | None = None,
    always_events: bool = False,
) -> Run:
    """Run all arrivals to their end.

    Args:
        arrivals: in the order of their times, unless `in_flight` is given.
        seed: of the noise; equal seeds give the n-th transfer equal noise whatever a decider does.
        in_flight: so many at a time: each further one comes `at_s` after some transfer has ended. None: every arrival
            comes at its own time.
        new_queue: makes a peer's queue.
        on_finished: told how many have finished, for progress.
        always_events: with one queue, too, make every chunk's stages events; slower, and the same.

    Raises:
        FieldError: arrivals are out of order, or one has no bytes.
    """
    if any(arrival.raw_bytes < 1 for arrival in arrivals):
        raise FieldError("arrivals", "a transfer has no bytes")
    if in_flight is None and any(a.at_s > b.at_s for a, b in itertools.pairwise(arrivals)):
        raise FieldError("arrivals", "are not in the order of time")
    return _Simulation(world, arrivals, decider, seed, in_flight, new_queue, on_finished, always_events).run()


class _Simulation:
    def __init__(
        self,
        world: World,
        arrivals: Sequence[Arrival],
        decider: Decider,
        seed: int,
        in_flight: int | None,
        new_queue: Callable[[], TransferQueue[_Job]],
        on_finished: Callable[[int], None] | None,
        always_events: bool,
    ) -> None:
        self._world = world
        self._arrivals = arrivals
        self._decider = decider
        self._on_finished = on_finished
        peers = sorted({arrival.peer for arrival in arrivals})
        self._queues = {peer: new_queue() for peer in peers}
        self._shares_link = len(peers) > 1
        self._alone = not self._shares_link and not always_events
        self._busy: dict[int, bool] = dict.fromkeys(peers, False)
        self._link = FifoLink(world.link)
        self._half_rtt_s = world.link.rtt_s / 2
        self._noise = _noise(world, len(arrivals), seed)
        self._begun = 0
        self._encoding = self._decoding = 0
        self._wire_share: dict[str, float] = {}
        self._records: list[TransferRecord] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, _Event, _Job]] = []
        self._closed = in_flight is not None
        self._next = len(arrivals) if in_flight is None else min(in_flight, len(arrivals))

    def run(self) -> Run:
        for index in range(self._next):
            self._hand_over(index, 0.0)
        handlers = (self._handed_over, self._encoded, self._arrived, self._decoded, self._acknowledged)
        events = self._events
        while events:
            now_s, _, kind, job = heapq.heappop(events)
            handlers[kind](job, now_s)
        return Run(self._decider.name, tuple(sorted(self._records, key=lambda record: record.index)))

    def _at(self, when_s: float, kind: _Event, job: _Job) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, job))

    def _hand_over(self, index: int, after_s: float) -> None:
        arrival = self._arrivals[index]
        self._at(after_s + arrival.at_s, _Event.HANDED_OVER, _Job(index, arrival, 0.0))

    def _handed_over(self, job: _Job, now_s: float) -> None:
        arrival = job.arrival
        if self._closed:
            job.arrival = arrival = Arrival(
                at_s=now_s, raw_bytes=arrival.raw_bytes, service_class=arrival.service_class,
                tenant=arrival.tenant, peer=arrival.peer,
            )  # fmt: skip
        self._decider.offered(arrival, now_s)
        job.cost_bytes = arrival.raw_bytes * self._wire_share.get(arrival.service_class, 1.0)
        queue = self._queues[arrival.peer]
        queue.push(job, tenant=arrival.tenant, transfer=job.index, cost_bytes=job.cost_bytes)
        if not self._busy[arrival.peer]:
            self._begin(arrival.peer, now_s)

    def _begin(self, peer: int, now_s: float) -> None:
        queue = self._queues[peer]
        if not len(queue):
            self._busy[peer] = False
            return
        self._busy[peer] = True
        job = queue.pop()
        arrival, world = job.arrival, self._world
        elsewhere = 0
        if self._shares_link:
            elsewhere = sum(len(q) + self._busy[p] for p, q in self._queues.items() if p != peer)
        job.choice = self._decider.choose(
            arrival, Situation(job.index, now_s, self._begun, len(queue), elsewhere, self._link)
        )
        arm_id = job.choice.arm_id
        job.work = world.work(arm_id, arrival.raw_bytes, now_s, self._begun, cuts_raw=self._shares_link)
        job.loss_nats = world.loss_nats(arm_id, now_s, self._begun)
        job.noise = self._noise[job.index]
        job.started_s = now_s
        self._begun += 1
        if self._alone:
            self._work_through(job, now_s)
        else:
            self._encode(job, now_s)

    def _work_through(self, job: _Job, now_s: float) -> None:
        """All of a transfer that nothing can interfere with; its last acknowledgement is what is left to happen."""
        course = work_through(
            job.work, self._link,
            now_s=now_s, begun=self._begun - 1, slots=self._world.slots, rtt_s=2 * self._half_rtt_s, noise=job.noise,
        )  # fmt: skip
        job.encode_s, job.decode_s, job.wire_bytes = course.encode_s, course.decode_s, course.wire_bytes
        job.spans, job.acknowledged = course.spans, job.work.chunks - 1
        self._at(course.finished_s, _Event.ACKNOWLEDGED, job)

    def _encode(self, job: _Job, now_s: float) -> None:
        """Begin to encode the next chunk, if there is one and a slot for it."""
        work = job.work
        if job.is_encoding or job.encoded == work.chunks or job.encoded - job.acknowledged >= self._world.slots:
            return
        job.is_encoding = True
        if work.is_raw:
            self._at(now_s + (work.encode_a_s if job.encoded == 0 else 0.0), _Event.ENCODED, job)
            return
        seconds = work.encode_s * (work.last_share if job.encoded == work.chunks - 1 else 1.0)
        if job.encoded == 0:
            seconds += work.encode_a_s
        seconds *= job.noise[0] * (1.0 + self._world.contention * self._encoding)
        self._encoding += 1
        job.encode_s += seconds
        self._at(now_s + seconds, _Event.ENCODED, job)

    def _encoded(self, job: _Job, now_s: float) -> None:
        work = job.work
        job.is_encoding = False
        if not work.is_raw:
            self._encoding -= 1
        size_bytes = work.wire_bytes * (work.last_share if job.encoded == work.chunks - 1 else 1.0)
        job.encoded += 1
        job.wire_bytes += size_bytes
        _, sent_s = self._link.send(now_s, size_bytes * job.noise[1], self._begun - 1)
        arrives_s = sent_s + self._half_rtt_s
        job.spans.append((now_s, arrives_s + self._half_rtt_s, size_bytes))
        self._at(arrives_s, _Event.ARRIVED, job)
        self._encode(job, now_s)

    def _arrived(self, job: _Job, now_s: float) -> None:
        if job.work.is_raw:
            self._at(now_s + self._half_rtt_s, _Event.ACKNOWLEDGED, job)
            return
        job.to_decode += 1
        if not job.is_decoding:
            self._decode(job, now_s)

    def _decode(self, job: _Job, now_s: float) -> None:
        work = job.work
        job.is_decoding = True
        job.to_decode -= 1
        seconds = work.decode_s * (work.last_share if job.decoded == work.chunks - 1 else 1.0)
        if job.decoded == 0:
            seconds += work.decode_a_s
        seconds *= job.noise[2] * (1.0 + self._world.contention * self._decoding)
        self._decoding += 1
        job.decode_s += seconds
        self._at(now_s + seconds, _Event.DECODED, job)

    def _decoded(self, job: _Job, now_s: float) -> None:
        self._decoding -= 1
        job.is_decoding = False
        job.decoded += 1
        self._at(now_s + self._half_rtt_s, _Event.ACKNOWLEDGED, job)
        if job.to_decode:
            self._decode(job, now_s)

    def _acknowledged(self, job: _Job, now_s: float) -> None:
        job.acknowledged += 1
        if job.acknowledged < job.work.chunks:
            self._encode(job, now_s)
            return
        self._finish(job, now_s)
        self._begin(job.arrival.peer, now_s)
        if self._closed and self._next < len(self._arrivals):
            self._hand_over(self._next, now_s)
            self._next += 1

    def _finish(self, job: _Job, now_s: float) -> None:
        arrival, choice = job.arrival, job.choice
        for start_s, end_s, size_bytes in job.spans:
            self._decider.wire_span(arrival, start_s, end_s, size_bytes)
        self._wire_share[arrival.service_class] = job.wire_bytes / arrival.raw_bytes
        self._queues[arrival.peer].charge(arrival.tenant, job.wire_bytes - job.cost_bytes)
        record = TransferRecord(
            index=job.index,
            service_class=arrival.service_class,
            tenant=arrival.tenant,
            peer=arrival.peer,
            raw_bytes=arrival.raw_bytes,
            wire_bytes=job.wire_bytes,
            arm_id=choice.arm_id,
            explored=choice.explored,
            arrived_s=arrival.at_s,
            started_s=job.started_s,
            finished_s=now_s,
            encode_s=job.encode_s,
            wire_s=_union_s(job.spans) + (job.work.encode_a_s if job.work.is_raw else 0.0),
            decode_s=job.decode_s,
            chunks=job.work.chunks,
            loss_nats=job.loss_nats,
            table_version=choice.table_version,
            bandwidth_bytes_per_s=choice.bandwidth_bytes_per_s,
            load=choice.load,
        )
        self._records.append(record)
        self._decider.finished(record)
        if self._on_finished is not None:
            self._on_finished(len(self._records))


def _union_s(spans: Sequence[Span]) -> float:
    """Seconds covered by at least one span; they are in the order of their starts."""
    total_s, until_s = 0.0, float("-inf")
    for start_s, end_s, _ in spans:
        if end_s > until_s:
            total_s += end_s - max(start_s, until_s)
            until_s = end_s
    return total_s


def _noise(world: World, count: int, seed: int) -> list[tuple[float, float, float]]:
    """Factors of encode, wire and decode for each transfer; mean 1."""
    spread = np.array([world.noise.encode, world.noise.wire, world.noise.decode])
    if not spread.any():
        return [(1.0, 1.0, 1.0)] * count
    drawn = np.random.default_rng(seed).standard_normal((count, 3))
    factors: list[list[float]] = np.exp(spread * drawn - spread**2 / 2).tolist()
    return [(encode, wire, decode) for encode, wire, decode in factors]
