"""The decode side: verify each frame and decode it into the pool before SGLang hears of success, and answer for it."""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from controld.contract.clock import Clock
from controld.contract.effect import Effect, Half, Path, Verdict
from dataplanes.kvcodec import FrameError, KVLayout, decode_frame, peek_header
from dataplanes.sglang.pd.edge import END_PATIENCE_S, Guarded
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.memory import PagedPool, PoolError
from dataplanes.sglang.pd.messages import Ack, Cancel, Chunk, Finish, Grant, Open
from dataplanes.sglang.pd.peers import Messenger
from dataplanes.sglang.pd.ports import PlaneAgent
from dataplanes.sglang.pd.staging import MARK_BYTES, LoanBook, StagingArea
from dataplanes.sglang.pd.transfer import TIER

_log = logging.getLogger(__name__)

ARRIVAL_PATIENCE_S: Final = 10.0
"""How long a frame may be awaited after its message; an engine that confirms arrival never needs any of it."""

DAMAGE_PATIENCE_S: Final = 0.05
"""How long a frame whose mark is there may fail its checksum before it counts as damaged."""

_POLL_S: Final = 0.001
_MAX_OPEN_TRANSFERS: Final = 10_000


class Refusal(enum.StrEnum):
    """Why a chunk is answered with a NACK, besides the reasons of `FrameErrorReason`."""

    NOT_ARRIVED = "not_arrived"
    NO_SLOT = "no_slot"
    LAYOUT = "layout"
    PAGES = "pages"
    ROOM_GONE = "room_gone"
    EXCEPTION = "exception"


class _RefusedError(Exception):
    def __init__(self, refusal: str) -> None:
        super().__init__(refusal)
        self.refusal = refusal


@dataclass(slots=True)
class _Received:
    tokens: int = 0
    chunks: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    decode_s: float = 0.0
    wait_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class _Timing:
    arrived_s: float
    verify_s: float = 0.0
    decode_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverParts:
    """What a receiver works with.

    Args:
        area: staging slots, registered with the engine before any sender hears of them.
        room_is_alive: whether SGLang still awaits KV for a room.
        faults: damage on purpose, for tests.
        artefacts: calibrated data that frames may name.
    """

    agent: PlaneAgent
    clock: Clock
    layout: KVLayout
    pool: PagedPool
    area: StagingArea
    loans: LoanBook
    message: Messenger
    room_is_alive: Callable[[int], bool]
    faults: Faults
    artefacts: Mapping[str, object]


class Receiver:
    """Messages come in on SGLang's thread; frames are decoded by one thread of our own, in their order."""

    def __init__(self, parts: ReceiverParts) -> None:
        self._parts = parts
        self._work: queue.SimpleQueue[tuple[Chunk, float] | Finish | None] = queue.SimpleQueue()
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        # Held from the last look at `_cancelled` to the end of a decoding, so that a cancelled chunk is never written.
        self._writing = threading.Lock()
        self._loans = threading.Lock()
        self._transfers: OrderedDict[str, _Received] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="controld-decode", daemon=True)
        self._is_stopped = False

    def start(self) -> None:
        """Start the decode thread."""
        self._thread.start()

    def stop(self) -> None:
        """After this returns nothing is written to the pool; what is queued was refused and the decode thread ended."""
        with self._writing:
            self._is_stopped = True
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join(END_PATIENCE_S)

    def on_open(self, message: Open) -> None:
        """Lend slots."""
        now_s = self._parts.clock.monotonic_s()
        with self._loans:
            grant_id, slots = self._parts.loans.lend(message.wanted_slots, now_s)
        if not slots:
            self._parts.agent.count("pd.no_slots_left")
        grant = Grant(
            nonce=message.nonce,
            grant_id=grant_id,
            lease_s=self._parts.loans.lease_s,
            slot_bytes=self._parts.area.slot_bytes,
            addresses=tuple(self._parts.area.slot_address(slot) for slot in slots),
        )
        self._parts.message(message.reply_to, grant.to_frames())

    def on_chunk(self, message: Chunk) -> None:
        """Queue a frame for decoding."""
        self._work.put((message, self._parts.clock.monotonic_s()))

    def on_cancel(self, message: Cancel) -> None:
        """After this returns, none of these chunks will be written to the pool."""
        with self._writing:
            for sequence in message.sequences:
                self._cancelled[sequence] = None
            while len(self._cancelled) > _MAX_OPEN_TRANSFERS:
                self._cancelled.popitem(last=False)

    def on_finish(self, message: Finish) -> None:
        """Report our half once what came before is done."""
        self._work.put(message)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            with Guarded(self._parts.agent, "the decode thread goes on without this message"):
                if isinstance(item, Finish):
                    self._report(item)
                else:
                    self._answer(*item)

    def _answer(self, chunk: Chunk, arrived_s: float) -> None:
        timing = _Timing(arrived_s)
        refusal = ""
        with Guarded(self._parts.agent, f"a chunk of transfer {chunk.transfer_id} is refused") as taking:
            try:
                self._take(chunk, timing)
            except _RefusedError as error:
                refusal = error.refusal
            except FrameError as error:
                refusal = error.reason.value
            except PoolError:
                refusal = Refusal.PAGES
        if taking.error is not None:
            refusal = f"{Refusal.EXCEPTION}:{type(taking.error).__name__}"
        if refusal:
            _log.warning("NACK for a chunk of transfer %s: %s", chunk.transfer_id, refusal)
            self._parts.agent.count(f"pd.nack.{refusal}")
        now_s = self._parts.clock.monotonic_s()
        self._note(chunk, timing, refusal, now_s)
        ack = Ack(
            sequence=chunk.sequence,
            refusal=refusal,
            verify_s=timing.verify_s,
            decode_s=timing.decode_s,
            held_s=now_s - arrived_s,
            late_s=timing.late_s,
        )
        self._parts.message(chunk.reply_to, ack.to_frames())

    def _take(self, chunk: Chunk, timing: _Timing) -> None:
        parts, clock = self._parts, self._parts.clock
        with self._loans:
            slot = parts.loans.slot_of(chunk.grant_id, chunk.slot, timing.arrived_s)
            if slot is None or chunk.frame_bytes + MARK_BYTES > parts.area.slot_bytes:
                raise _RefusedError(Refusal.NO_SLOT)
            parts.loans.begin_use(chunk.grant_id)
        try:
            started_s = clock.monotonic_s()
            self._await_frame(chunk, slot, timing)
            verified_s = clock.monotonic_s()
            timing.verify_s = verified_s - started_s - timing.late_s
            frame = parts.area.slot(slot)[: chunk.frame_bytes]
            rows = parts.pool.rows(chunk.pages, chunk.tokens)
            with self._writing:
                if self._is_stopped or chunk.sequence in self._cancelled or not parts.room_is_alive(chunk.room):
                    raise _RefusedError(Refusal.ROOM_GONE)
                decode_frame(frame, parts.pool.planes, rows=rows, artefacts=parts.artefacts)
                parts.faults.spoil_decoded(parts.pool.planes, rows)
                parts.pool.memory.settle()
            timing.decode_s = clock.monotonic_s() - verified_s
        finally:
            with self._loans:
                parts.loans.end_use(chunk.grant_id, clock.monotonic_s())

    def _await_frame(self, chunk: Chunk, slot: int, timing: _Timing) -> None:
        """Return once the frame is whole.

        An engine that confirms arrival has the frame here before its message. For one that does not, the mark behind
        the frame tells "not yet" from "damaged", so that damage is answered at once and slowness is not.
        """
        parts, clock = self._parts, self._parts.clock
        frame = parts.area.slot(slot)[: chunk.frame_bytes]
        wake = threading.Event()
        while not parts.area.has_arrived(slot, chunk.frame_bytes, chunk.sequence):
            timing.late_s = clock.monotonic_s() - timing.arrived_s
            if self._is_stopped:
                raise _RefusedError(Refusal.ROOM_GONE)
            if timing.late_s > ARRIVAL_PATIENCE_S:
                raise _RefusedError(Refusal.NOT_ARRIVED)
            wake.wait(_POLL_S)
        parts.faults.spoil_staging(frame)
        deadline_s = clock.monotonic_s() + DAMAGE_PATIENCE_S
        while True:
            try:
                header = peek_header(frame)
            except FrameError:
                if clock.monotonic_s() > deadline_s:
                    raise
                wake.wait(_POLL_S)
                continue
            break
        if header.layout != parts.layout:
            raise _RefusedError(Refusal.LAYOUT)

    def _note(self, chunk: Chunk, timing: _Timing, refusal: str, now_s: float) -> None:
        received = self._transfers.setdefault(chunk.transfer_id, _Received(first_s=timing.arrived_s))
        if len(self._transfers) > _MAX_OPEN_TRANSFERS:
            self._transfers.popitem(last=False)
        received.wire_bytes += chunk.frame_bytes
        received.last_s = now_s
        busy_s = timing.verify_s + timing.decode_s
        received.wait_s += max(0.0, now_s - timing.arrived_s - timing.late_s - busy_s)
        if not refusal:
            received.chunks += 1
            received.tokens += chunk.tokens
            received.raw_bytes += self._parts.layout.raw_bytes(len(chunk.pages) * self._parts.layout.page_tokens)
            received.decode_s += busy_s

    def _report(self, finish: Finish) -> None:
        received = self._transfers.pop(finish.transfer_id, None)
        if received is None:
            self._parts.agent.count("pd.finish_unknown")
            return
        path = Path(finish.path)
        self._parts.agent.report(
            Effect(
                transfer_id=finish.transfer_id,
                half=Half.RECEIVER,
                arm_id=finish.arm_id,
                table_version=finish.table_version,
                service_class=finish.service_class,
                tier=TIER,
                link_group=finish.link_group,
                tokens=received.tokens,
                chunks=received.chunks,
                raw_bytes=received.raw_bytes,
                wire_bytes=received.wire_bytes,
                encode_s=0.0,
                wire_s=0.0,
                decode_s=received.decode_s,
                wait_s=received.wait_s,
                total_s=received.last_s - received.first_s,
                path=path,
                verdict=Verdict.VERIFIED if path is Path.CODED else Verdict.NACK,
                reason=finish.reason,
                explored=finish.explored,
                finished_unix_s=self._parts.clock.unix_s(),
            )
        )
