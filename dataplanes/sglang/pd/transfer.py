"""The record of one transfer, from its first chunk to its effect."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from controld.contract.decision import RAW, Arm
from controld.contract.effect import SELF_CHECK_REASON, Effect, Half, Path, Verdict

TIER = "pd"
LINK_GROUP = "default"


class RawReason(enum.StrEnum):
    """Why a transfer, or what was left of it, took SGLang's own raw path (or none) although a codec was drawn."""

    NO_CAPABILITY = "peer_without_plane"
    LAYOUT = "peer_layout_differs"
    UNSUPPORTED_PATH = "unsupported_path"
    CODEC_NOT_READY = "codec_not_ready"
    NO_SLOTS = "no_staging_slots"
    FRAME_TOO_LARGE = "frame_too_large"
    ENGINE_WRITE = "engine_write"
    ACK_TIMEOUT = "ack_timeout"
    NACK = "nack"
    EXCEPTION = "exception"
    SELF_CHECK = SELF_CHECK_REASON
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class WireSpan:
    """Bytes on the wire from the start of the engine's write to their arrival. Seconds on the monotonic clock."""

    start_s: float
    end_s: float
    wire_bytes: int


def union_s(spans: Iterable[WireSpan]) -> float:
    """Seconds covered by at least one span."""
    total_s, covered_until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        start_s = max(span.start_s, covered_until_s)
        if span.end_s > start_s:
            total_s += span.end_s - start_s
            covered_until_s = span.end_s
    return total_s


@dataclass(slots=True)
class Transfer:
    """One request's KV from this rank to one receiver; written by one transfer worker only.

    Args:
        transfer_id: also the decision's id.
        room: SGLang's bootstrap room.
        session: the receiver's engine session.
        service_class: of the request.
        expected_bytes: raw bytes of the whole prompt, for which the arm was drawn.
        arm: what was drawn.
        table_version, explored, bandwidth_bytes_per_s, load: of the draw.
        check_token: position in the request of a token; the frame that holds it is decoded here, too (see
            `self_check`), in whichever chunk it comes. None: no frame is. Where the transfer ends before it, none is.
        reconstruction_error: of that frame.
        abandoned: the receiver no longer wants it; nothing more is written, because its pages may have a new owner.
        failed: SGLang's own raw path failed.
    """

    transfer_id: str
    room: int
    session: str
    service_class: str
    expected_bytes: float
    arm: Arm
    table_version: int
    explored: bool
    bandwidth_bytes_per_s: float
    load: float
    check_token: int | None = None
    reconstruction_error: float | None = None
    raw_reason: str = ""
    nacked: bool = False
    abandoned: bool = False
    failed: bool = False
    tokens: int = 0
    chunks: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    coded_chunks: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    active_s: float = 0.0
    waited_s: float = 0.0
    worked_until_s: float = float("-inf")
    _work_began_s: float = 0.0
    spans: list[WireSpan] = field(default_factory=list)

    @property
    def is_coded(self) -> bool:
        """Whether the next chunk goes through the drawn codec."""
        return self.arm.arm_id != RAW and not self.raw_reason

    def begin_work(self, now_s: float, enqueued_s: float) -> None:
        """Work on a chunk begins; it waited since SGLang handed it over, or since the work before it ended."""
        self.waited_s += max(0.0, now_s - max(enqueued_s, self.worked_until_s))
        self._work_began_s = now_s

    def end_work(self, now_s: float) -> None:
        """The chunk is done."""
        self.active_s += now_s - self._work_began_s
        self.worked_until_s = now_s

    def fall_back(self, reason: str) -> None:
        """From here on raw; the first reason stays."""
        self.raw_reason = self.raw_reason or reason

    def to_effect(self, *, finished_unix_s: float) -> Effect:
        """The complete sender's effect.

        `total_s` is the time in which the transfer was worked on, `wait_s` that in which what was handed over waited
        for its turn: between two chunks of a chunked prefill it waits for the model, which is not the transfer's time.
        """
        if self.failed or self.abandoned:
            path, verdict = Path.FAILED, Verdict.ERROR
        elif self.arm.arm_id == RAW:
            path, verdict = Path.RAW, Verdict.UNVERIFIED
        elif self.raw_reason:
            path, verdict = Path.RAW_FALLBACK, Verdict.NACK if self.nacked else Verdict.UNVERIFIED
        else:
            path, verdict = Path.CODED, Verdict.VERIFIED
        return Effect(
            transfer_id=self.transfer_id,
            half=Half.SENDER,
            arm_id=self.arm.arm_id,
            table_version=self.table_version,
            service_class=self.service_class,
            tier=TIER,
            link_group=LINK_GROUP,
            tokens=self.tokens,
            chunks=self.chunks,
            raw_bytes=self.raw_bytes,
            wire_bytes=self.wire_bytes,
            encode_s=self.encode_s,
            wire_s=union_s(self.spans),
            decode_s=self.decode_s,
            wait_s=self.waited_s,
            total_s=self.active_s,
            path=path,
            verdict=verdict,
            reason=self.raw_reason,
            expected_bytes=self.expected_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            load=self.load,
            explored=self.explored,
            finished_unix_s=finished_unix_s,
            reconstruction_error=self.reconstruction_error,
        )
