"""One transfer that has the machines to itself, worked out in one go: chunk by chunk, without events.

The engine's events give the same numbers (`tests/sim/test_engine.py` compares them); this is some ten times as quick,
and what the oracle looks ahead with.
"""

from __future__ import annotations

from dataclasses import dataclass

from controld.sim.link import FifoLink
from controld.sim.world import Work, World

Span = tuple[float, float, float]
"""From the hand-over to the link until the acknowledgement, in seconds, and wire bytes."""

NO_NOISE = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Course:
    """How a transfer went."""

    finished_s: float
    encode_s: float
    decode_s: float
    wire_bytes: float
    spans: list[Span]


def work_through(
    work: Work,
    link: FifoLink,
    *,
    now_s: float,
    begun: int,
    slots: int,
    rtt_s: float,
    noise: tuple[float, float, float] = NO_NOISE,
) -> Course:
    """Encode, send and decode every chunk; the link is left as it is afterwards."""
    half_rtt_s = rtt_s / 2
    encode_noise, wire_noise, decode_noise = noise
    encoder_s = decoder_s = now_s
    wire_bytes = 0.0
    spans: list[Span] = []
    acknowledged: list[float] = []
    last = work.chunks - 1
    for chunk in range(work.chunks):
        share = work.last_share if chunk == last else 1.0
        if chunk >= slots and acknowledged[chunk - slots] > encoder_s:
            encoder_s = acknowledged[chunk - slots]
        encode_s = work.encode_s * share + (work.encode_a_s if chunk == 0 else 0.0)
        encoder_s += encode_s if work.is_raw else encode_s * encode_noise
        size_bytes = work.wire_bytes * share
        arrived_s = link.send(encoder_s, size_bytes * wire_noise, begun)[1] + half_rtt_s
        if arrived_s > decoder_s:
            decoder_s = arrived_s
        decoder_s += (work.decode_s * share + (work.decode_a_s if chunk == 0 else 0.0)) * decode_noise
        wire_bytes += size_bytes
        spans.append((encoder_s, arrived_s + half_rtt_s, size_bytes))
        acknowledged.append(decoder_s + half_rtt_s)
    chunks = last + work.last_share
    return Course(
        acknowledged[-1],
        0.0 if work.is_raw else (work.encode_a_s + chunks * work.encode_s) * encode_noise,
        (work.decode_a_s + chunks * work.decode_s) * decode_noise,
        wire_bytes,
        spans,
    )


def service_alone_s(
    world: World, arm_id: str, raw_bytes: float, *, now_s: float, begun: int, link: FifoLink | None = None
) -> float:
    """Seconds from the first work to the last acknowledgement if every stage takes its mean.

    Args:
        begun: transfers begun before, for what counts them.
        link: its state, which is left as it is; None: a link that has rested.
    """
    course = work_through(
        world.work(arm_id, raw_bytes, now_s, begun),
        FifoLink(world.link) if link is None else link.copy(),
        now_s=now_s,
        begun=begun,
        slots=world.slots,
        rtt_s=world.link.rtt_s,
    )
    return course.finished_s - now_s


def least_possible_s(world: World, arm_id: str, raw_bytes: float, *, now_s: float, begun: int) -> float:
    """A lower bound of `service_alone_s` that costs next to nothing: the longest stage alone, on the best link."""
    work = world.work(arm_id, raw_bytes, now_s, begun)
    chunks = work.chunks - 1 + work.last_share
    encode_s, decode_s = work.encode_a_s + chunks * work.encode_s, work.decode_a_s + chunks * work.decode_s
    wire_s = chunks * work.wire_bytes / world.link.schedule.best_bytes_per_s(begun)
    return world.link.rtt_s + max(encode_s, wire_s, decode_s)
