"""One transfer worker's pipeline: the worker encodes from the pool, a wire thread writes, the receiver decodes.

All three work on different pieces of one chunk at the same time. A piece holds one slot pair (ours and the receiver's)
from its encoding to the receiver's answer, so the number of slots bounds how far encoding runs ahead.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from controld.contract.clock import Clock
from dataplanes.kvcodec import KVCodec
from dataplanes.sglang.pd.edge import END_PATIENCE_S, Counting, Guarded
from dataplanes.sglang.pd.memory import PagedPool, Pages
from dataplanes.sglang.pd.messages import Ack, Cancel, Chunk, Endpoint, Grant
from dataplanes.sglang.pd.peers import Messenger
from dataplanes.sglang.pd.self_check import Checked, SelfCheck
from dataplanes.sglang.pd.staging import MARK_BYTES, StagingArea
from dataplanes.sglang.pd.transfer import RawReason, WireSpan

ACK_PATIENCE_S: Final = 30.0
"""Without any progress and with nothing being written for so long, the receiver is given up."""

LATE_S: Final = 0.002
"""A frame that came so much after its message was not confirmed by the engine."""

_WAKE_S: Final = 0.5
_COUNT_UNKNOWN: Final = 0


Write = Callable[[str, int, int, int], int]
"""`(session, source, target, size) -> 0 or an error`: one engine write between two addresses, done on arrival."""


@dataclass(slots=True)
class Piece:
    """A run of pages that becomes one frame.

    Args:
        source_pages, target_pages: in the sender's and the receiver's pool.
        tokens: valid tokens.
        first_token: position in the request of the first one.
        request_tokens: length of the request; 0 if not known.
    """

    source_pages: Pages
    target_pages: Pages
    tokens: int
    first_token: int
    request_tokens: int
    frame_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    late_s: float = 0.0
    write_start_s: float = 0.0
    write_end_s: float = 0.0
    span: WireSpan | None = None
    delivered: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch of pieces.

    Args:
        delivered: verified and decoded by the receiver.
        undelivered: to be sent raw.
        reason: why there are undelivered ones; empty otherwise.
        nacked: whether the receiver refused a frame.
        checked: what the sender found when it decoded a frame itself; None where it did not or could not.
    """

    delivered: tuple[Piece, ...]
    undelivered: tuple[Piece, ...]
    reason: str
    nacked: bool
    checked: Checked | None = None


class _Batch:
    """The pieces of one call, shared by the worker, the wire thread and whoever reads the answers."""

    def __init__(self, slots: int, clock: Clock) -> None:
        self.changed = threading.Condition()
        self.free_slots = list(range(slots))
        self.in_flight: dict[int, tuple[Piece, int]] = {}
        self.writing = 0
        self.reason = ""
        self.nacked = False
        self.progress_s = clock.monotonic_s()
        self._clock = clock

    def take_slot(self) -> int | None:
        """A free slot; None once the batch has failed."""
        with self.changed:
            self._wait(lambda: bool(self.free_slots) or bool(self.reason))
            return None if self.reason else self.free_slots.pop()

    def drain(self) -> None:
        """Return when nothing is in flight, or the batch was given up."""
        with self.changed:
            self._wait(lambda: not self.in_flight)

    def fail(self, reason: str) -> None:
        """No more pieces; those in flight may still arrive."""
        with self.changed:
            self.reason = self.reason or reason
            self.changed.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self.changed.wait(_WAKE_S)
            idle_s = self._clock.monotonic_s() - self.progress_s
            if not done() and not self.writing and idle_s > ACK_PATIENCE_S:
                self.reason = self.reason or RawReason.ACK_TIMEOUT
                return


@dataclass(frozen=True, slots=True)
class Target:
    """Where a batch goes.

    Args:
        session: the receiver's engine session.
        endpoint: where its manager listens.
        grant: its slots.
        room, transfer_id: for the receiver's book-keeping.
    """

    session: str
    endpoint: Endpoint
    grant: Grant
    room: int
    transfer_id: str


@dataclass(frozen=True, slots=True)
class _Written:
    batch: _Batch
    piece: Piece
    slot: int
    sequence: int
    size_bytes: int
    target: Target


class AckBook:
    """Which batch awaits which answer; the thread that reads SGLang's socket delivers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._awaited: dict[int, _Batch] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(secrets.randbits(31) << 32)

    def next_sequence(self) -> int:
        """A number that no other sender uses."""
        return next(self._numbers)

    def expect(self, sequence: int, batch: _Batch) -> None:
        """An answer will come."""
        with self._lock:
            self._awaited[sequence] = batch

    def withdraw(self, sequence: int) -> None:
        """An answer that still comes is ignored."""
        with self._lock:
            self._awaited.pop(sequence, None)

    def deliver(self, ack: Ack) -> bool:
        """Hand an answer to its batch; false where nobody waits for it any more."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            batch = self._awaited.pop(ack.sequence, None)
        if batch is None:
            return False
        with batch.changed:
            piece, slot = batch.in_flight.pop(ack.sequence)
            batch.progress_s = now_s
            if ack.refusal:
                batch.nacked = True
                batch.reason = batch.reason or f"{RawReason.NACK}:{ack.refusal}"
            else:
                piece.delivered = True
                piece.decode_s = ack.verify_s + ack.decode_s
                piece.late_s = ack.late_s
                piece.span = WireSpan(piece.write_start_s, _arrival_s(piece, ack, now_s), piece.frame_bytes)
                batch.free_slots.append(slot)
            batch.changed.notify_all()
        return True


def _arrival_s(piece: Piece, ack: Ack, now_s: float) -> float:
    """When a frame's last byte was at the receiver, on the sender's clock.

    The receiver says whether the frame was there when its message came. If so, the engine's write had returned on the
    receiving engine's confirmation, and that return is the arrival; the answer would add two messages and whatever the
    receiver's threads waited for. If not, the arrival is the answer less the time that the receiver held the frame.
    """
    if ack.late_s <= LATE_S:
        return piece.write_end_s
    return max(piece.write_end_s, now_s - ack.held_s + ack.late_s)


@dataclass(slots=True)
class Lane:
    """The pipeline of one transfer worker; `send` is called by that worker only.

    Args:
        area: this lane's staging slots, registered with the engine.
        pool: the sender's KV.
        write: one engine write.
        message: sends a message to the receiver's manager.
        acks: shared by all lanes of a manager.
        reply_to: where answers go.
        clock: monotonic seconds.
        counting: takes counts of errors.
        self_check: decodes frames of ours.
    """

    area: StagingArea
    pool: PagedPool
    write: Write
    message: Messenger
    acks: AckBook
    reply_to: Endpoint
    clock: Clock
    counting: Counting
    self_check: SelfCheck
    _wire: queue.SimpleQueue[_Written | None] = field(default_factory=queue.SimpleQueue)
    _queueing: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _is_stopped: bool = False

    def start(self) -> None:
        """Start the wire thread."""
        self._thread = threading.Thread(target=self._write_loop, name="controld-wire", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when the wire thread has written what is queued and has ended; an engine that hangs is left behind."""
        with self._queueing:
            self._is_stopped = True
            self._wire.put(None)
        if self._thread is not None:
            self._thread.join(END_PATIENCE_S)

    def send(
        self, codec: KVCodec, target: Target, pieces: Sequence[Piece], first_index: int, check_index: int | None = None
    ) -> Outcome:
        """Encode, write and await the receiver's answer for each piece. Pieces that fail are returned, never raised.

        Args:
            first_index: how many frames of the transfer came before.
            check_index: which of the pieces to decode here, too, once all of them are on their way.
        """
        kept: Tensor | None = None
        batch = _Batch(min(self.area.slots, len(target.grant.addresses)), self.clock)
        # Whatever a codec does, what is in flight must be settled before its pages are sent another way.
        with Guarded(self.counting, f"encoding for {target.transfer_id} failed, its pages go raw") as encoding:
            for index, piece in enumerate(pieces):
                slot = batch.take_slot()
                if slot is None:
                    break
                self._encode(codec, piece, slot, chunk_index=first_index + index)
                if batch.reason:
                    break
                self._hand_over(batch, piece, slot, target)
                if index == check_index:
                    # The slot stays as it is until this thread takes it again for a later piece.
                    kept = self.self_check.keep(self.area.slot(slot)[: piece.frame_bytes])
        if encoding.error is not None:
            batch.fail(f"{RawReason.EXCEPTION}:{type(encoding.error).__name__}")
        checked = None
        if kept is not None and check_index is not None and not batch.reason:
            # While the wire and the receiver work this thread would only wait.
            piece = pieces[check_index]
            checked = self.self_check.look(kept, piece.source_pages, piece.tokens)
        batch.drain()
        self._cancel(batch, target)
        return Outcome(
            delivered=tuple(piece for piece in pieces if piece.delivered),
            undelivered=tuple(piece for piece in pieces if not piece.delivered),
            reason=batch.reason,
            nacked=batch.nacked,
            checked=checked,
        )

    def _encode(self, codec: KVCodec, piece: Piece, slot: int, *, chunk_index: int) -> None:
        start_s = self.clock.monotonic_s()
        room = self.area.slot(slot)[: self.area.slot_bytes - MARK_BYTES]
        piece.frame_bytes = codec.encode_into(
            self.pool.planes,
            room,
            rows=self.pool.rows(piece.source_pages, piece.tokens),
            first_token=piece.first_token,
            chunk_index=chunk_index,
            chunk_count=_COUNT_UNKNOWN,
            request_tokens=piece.request_tokens,
        )
        self.pool.memory.settle()
        piece.encode_s = self.clock.monotonic_s() - start_s

    def _hand_over(self, batch: _Batch, piece: Piece, slot: int, target: Target) -> None:
        sequence = self.acks.next_sequence()
        size_bytes = self.area.write_mark(slot, piece.frame_bytes, sequence)
        with self._queueing:
            if self._is_stopped:
                batch.fail(RawReason.ABORTED)
                return
            with batch.changed:
                batch.in_flight[sequence] = (piece, slot)
                batch.writing += 1
            self.acks.expect(sequence, batch)
            self._wire.put(_Written(batch, piece, slot, sequence, size_bytes, target))

    def _cancel(self, batch: _Batch, target: Target) -> None:
        with batch.changed:
            sequences = tuple(batch.in_flight)
            batch.in_flight.clear()
        for sequence in sequences:
            self.acks.withdraw(sequence)
        if sequences:
            self.message(target.endpoint, Cancel(sequences=sequences).to_frames())

    def _write_loop(self) -> None:
        while (item := self._wire.get()) is not None:
            with Guarded(self.counting, f"writing for {item.target.transfer_id} failed, its pages go raw") as writing:
                self._write(item)
            if writing.error is not None:
                self._give_up(item, f"{RawReason.EXCEPTION}:{type(writing.error).__name__}")
            with item.batch.changed:
                item.batch.writing -= 1
                item.batch.changed.notify_all()

    def _write(self, item: _Written) -> None:
        piece, target, batch = item.piece, item.target, item.batch
        if batch.reason:
            self._give_up(item, batch.reason)
            return
        piece.write_start_s = self.clock.monotonic_s()
        source, destination = self.area.slot_address(item.slot), target.grant.addresses[item.slot]
        if self.write(target.session, source, destination, item.size_bytes) != 0:
            self._give_up(item, RawReason.ENGINE_WRITE)
            return
        piece.write_end_s = self.clock.monotonic_s()
        with batch.changed:
            batch.progress_s = piece.write_end_s
        chunk = Chunk(
            sequence=item.sequence,
            grant_id=target.grant.grant_id,
            slot=item.slot,
            frame_bytes=piece.frame_bytes,
            room=target.room,
            tokens=piece.tokens,
            pages=piece.target_pages,
            transfer_id=target.transfer_id,
            reply_to=self.reply_to,
        )
        self.message(target.endpoint, chunk.to_frames())

    def _give_up(self, item: _Written, reason: str) -> None:
        self.acks.withdraw(item.sequence)
        with item.batch.changed:
            item.batch.in_flight.pop(item.sequence, None)
            item.batch.reason = item.batch.reason or reason
            item.batch.changed.notify_all()
