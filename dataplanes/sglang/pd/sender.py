"""The prefill side: one arm for each transfer, coded where it can be, SGLang's own raw path everywhere else."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from controld.contract.clock import Clock
from controld.contract.decision import DEFAULT_CLASS, sampled_index
from dataplanes.kvcodec import KVCodec, KVLayout
from dataplanes.sglang.pd.edge import Guarded
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.lane import LATE_S, AckBook, Lane, Outcome, Piece, Target
from dataplanes.sglang.pd.memory import Pages
from dataplanes.sglang.pd.messages import Ack, Finish, Grant
from dataplanes.sglang.pd.offers import MAX_OPEN, OfferBook
from dataplanes.sglang.pd.page_sizes import PageSizes
from dataplanes.sglang.pd.peers import Messenger, Peers
from dataplanes.sglang.pd.ports import PlaneAgent
from dataplanes.sglang.pd.receiver import Refusal
from dataplanes.sglang.pd.requests import RequestBook, transfer_id_of
from dataplanes.sglang.pd.shelf import CodecShelf
from dataplanes.sglang.pd.staging import MARK_BYTES, cut_pages
from dataplanes.sglang.pd.transfer import LINK_GROUP, TIER, RawReason, Transfer, WireSpan
from dataplanes.sglang.pd.write_overhead import WriteOverhead

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_SWEEP_INTERVAL_S: Final = 10.0
_SWEEP_AGE_S: Final = 30.0

SendRaw = Callable[[Pages, Pages], int]
"""SGLang's own path for these source and target pages; its status."""


@dataclass(frozen=True, slots=True)
class QueuedChunk:
    """What a worker knows of the chunk that it works on.

    Args:
        first_page: position of its first page among the pages that are sent for the request.
        tokens: valid tokens in it, or None where SGLang does not say.
        prefix_tokens: tokens of the request that the receiver already has.
        enqueued_s: when SGLang handed it over; monotonic.
    """

    room: int
    first_page: int
    tokens: int | None
    is_last: bool
    prefix_tokens: int
    enqueued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderParts:
    """What a sender works with.

    Args:
        layout, layout_digest: of our pool.
        piece_bytes: raw size of a piece to aim at.
        new_lane: makes a worker's pipeline; called once in each worker thread that needs one.
        room_is_open: whether SGLang still has a room.
        faults: damage on purpose, for tests.
    """

    agent: PlaneAgent
    clock: Clock
    layout: KVLayout
    layout_digest: bytes
    shelf: CodecShelf
    requests: RequestBook
    peers: Peers
    acks: AckBook
    message: Messenger
    new_lane: Callable[[], Lane]
    piece_bytes: int
    room_is_open: Callable[[int], bool]
    faults: Faults


class _Worker(threading.local):
    chunk: QueuedChunk | None = None
    wire_bytes: int = 0
    lane: Lane | None = None
    spans: list[WireSpan] | None = None


class Sender:
    """Sends chunks; called in SGLang's transfer workers, each of which handles the chunks of a transfer in order.

    Nothing of ours is raised into a worker: an exception would end its thread, a non-zero status would blacklist the
    receiver. What goes wrong on our side is logged, counted and sent raw.
    """

    def __init__(self, parts: SenderParts) -> None:
        self._parts = parts
        self._worker = _Worker()
        self._transfers: OrderedDict[tuple[int, str], Transfer] = OrderedDict()
        self._sizes = PageSizes(layout=parts.layout, piece_bytes=parts.piece_bytes)
        self._offers = OfferBook(agent=parts.agent, clock=parts.clock, requests=parts.requests, sizes=self._sizes)
        self._lock = threading.Lock()
        self._writes_return_early = False
        self._overhead = WriteOverhead()
        self._swept_s = parts.clock.monotonic_s()

    def offered(self, room: int, pages: int) -> None:
        """SGLang queued a chunk of a request; the first one counts for the whole request. Scheduler's thread."""
        self._offers.add(room, pages)

    def begin_chunk(self, chunk: QueuedChunk | None) -> None:
        """The worker takes a chunk; what it did before is over."""
        before, self._worker.chunk = self._worker.chunk, chunk
        self._worker.wire_bytes = 0
        if before is not None and before.is_last:
            self._guarded(lambda: self._finish_room(before.room))
        now_s = self._parts.clock.monotonic_s()
        if now_s - self._swept_s > _SWEEP_INTERVAL_S:
            self._swept_s = now_s
            self._guarded(lambda: self._sweep(now_s))

    @property
    def wire_bytes_of_chunk(self) -> int:
        """What this worker's chunk put on the wire so far, to all of its receivers."""
        return self._worker.wire_bytes

    def class_of(self, room: int) -> str:
        """The service class of a request that was offered."""
        return self._offers.class_of(room)

    def raw_bytes(self, pages: int) -> int:
        """Raw bytes of so many pages."""
        return self._sizes.raw_bytes(pages * self.page_tokens)

    def send(self, session: str, source: Pages, target: Pages, *, refusal: str, send_raw: SendRaw) -> int:
        """One chunk to one receiver.

        Args:
            session: the receiver's engine session.
            source, target: pages, pairwise.
            refusal: why this chunk must go raw whatever was drawn; empty where it need not.
            send_raw: SGLang's own path.

        Returns:
            SGLang's status: zero unless its own raw path failed.
        """
        transfer = self._guarded(lambda: self._transfer_for(session, refusal))
        if transfer is None:
            return send_raw(source, target)
        if transfer.abandoned:
            return 0
        start_s = self._parts.clock.monotonic_s()
        transfer.begin_work(start_s, self._worker.chunk.enqueued_s if self._worker.chunk else start_s)
        status = 0
        left: Sequence[tuple[Pages, Pages]] = ((source, target),)
        if transfer.is_coded:
            undelivered = self._guarded(lambda: self._send_coded(transfer, source, target))
            if undelivered is None:
                transfer.fall_back(RawReason.EXCEPTION)
            else:
                left = [(piece.source_pages, piece.target_pages) for piece in undelivered]
        if left:
            status = self._send_raw(transfer, left, send_raw)
        transfer.end_work(self._parts.clock.monotonic_s())
        transfer.tokens += self._valid_tokens(len(source))
        transfer.failed = transfer.failed or status != 0
        if transfer.failed:
            self._guarded(lambda: self._finish(transfer))
        return status

    def note_engine_write(self, start_s: float, end_s: float, size_bytes: int) -> None:
        """The engine wrote KV for this thread's chunk and says that the bytes have arrived."""
        if self._worker.spans is not None:
            self._worker.spans.append(WireSpan(start_s, end_s, size_bytes))

    def on_ack(self, ack: Ack) -> None:
        """A receiver answered for a chunk."""
        if not self._parts.acks.deliver(ack):
            self._parts.agent.count("pd.ack_unawaited")

    def on_grant(self, grant: Grant) -> None:
        """A receiver lends slots."""
        self._parts.peers.take_grant(grant)

    def _transfer_for(self, session: str, refusal: str) -> Transfer | None:
        chunk = self._worker.chunk
        if chunk is None:
            self._parts.agent.count("pd.chunk_unknown")
            return None
        with self._lock:
            transfer = self._transfers.get((chunk.room, session))
        if transfer is None:
            transfer = self._draw(chunk, session)
            with self._lock:
                self._transfers[chunk.room, session] = transfer
                if len(self._transfers) > MAX_OPEN:
                    self._transfers.popitem(last=False)
                    self._parts.agent.count("pd.transfer_forgotten")
        if transfer.is_coded and refusal:
            transfer.fall_back(refusal)
        return transfer

    def _draw(self, chunk: QueuedChunk, session: str) -> Transfer:
        parts = self._parts
        facts = parts.requests.find(chunk.room)
        offer = self._offers.begin(chunk.room)
        service_class = offer.service_class if offer else DEFAULT_CLASS
        transfer_id = transfer_id_of(facts, room=chunk.room, receiver=session)
        if facts is not None:
            tokens = facts.prompt_tokens - chunk.prefix_tokens
        else:
            # The chunk may be one fair part of what was offered.
            tokens = offer.tokens if offer else chunk.tokens or 0
        expected_bytes = self._sizes.raw_bytes(tokens)
        draw = parts.agent.draw(
            transfer_id=transfer_id,
            service_class=service_class,
            raw_bytes=expected_bytes,
            tier=TIER,
            link_group=LINK_GROUP,
        )
        return Transfer(
            transfer_id=transfer_id,
            room=chunk.room,
            session=session,
            service_class=service_class,
            expected_bytes=expected_bytes,
            arm=draw.drawn.arm,
            table_version=draw.drawn.table_version,
            explored=draw.drawn.explored,
            bandwidth_bytes_per_s=draw.bandwidth_bytes_per_s,
            load=draw.load,
            check_token=self._check_token(transfer_id, chunk, tokens) if draw.self_check else None,
        )

    @staticmethod
    def _check_token(transfer_id: str, chunk: QueuedChunk, tokens: int) -> int | None:
        """Which of the tokens that are to be sent is looked at: each is as likely, however they come in chunks."""
        return chunk.prefix_tokens + sampled_index(transfer_id, tokens) if tokens > 0 else None

    def _send_coded(self, transfer: Transfer, source: Pages, target: Pages) -> Sequence[Piece]:
        """Send what can be sent coded; the pieces that were not delivered."""
        pieces = self._cut(source, target, self._parts.layout.page_tokens)
        ready = self._prepare(transfer)
        if isinstance(ready, RawReason):
            transfer.fall_back(ready)
            return pieces
        codec, where = ready
        codec = self._parts.faults.spoil_codec(codec)
        lane = self._lane()
        piece_tokens = self._sizes.piece_tokens(codec)
        if codec.max_frame_bytes(piece_tokens) + MARK_BYTES > min(lane.area.slot_bytes, where.grant.slot_bytes):
            transfer.fall_back(RawReason.FRAME_TOO_LARGE)
            return pieces
        cut = self._cut(source, target, piece_tokens)
        outcome = lane.send(codec, where, cut, transfer.coded_chunks, _index_of(transfer.check_token, cut))
        self._account(transfer, outcome)
        self._take_check(transfer, outcome)
        return () if transfer.abandoned else outcome.undelivered

    def _prepare(self, transfer: Transfer) -> tuple[KVCodec, Target] | RawReason:
        parts = self._parts
        found = parts.peers.find(transfer.session)
        if found is None:
            return RawReason.NO_CAPABILITY
        endpoint, capability = found
        if capability.layout_digest != parts.layout_digest:
            return RawReason.LAYOUT
        assert transfer.arm.configuration is not None
        codec = parts.shelf.find(transfer.arm.configuration)
        if codec is None:
            return RawReason.CODEC_NOT_READY
        grant = parts.peers.grant(transfer.session)
        if grant is None:
            return RawReason.NO_SLOTS
        return codec, Target(transfer.session, endpoint, grant, transfer.room, transfer.transfer_id)

    def _cut(self, source: Pages, target: Pages, piece_tokens: int) -> list[Piece]:
        chunk = self._worker.chunk
        assert chunk is not None
        first_token = chunk.prefix_tokens + chunk.first_page * self.page_tokens
        cuts = cut_pages(
            len(source),
            self._valid_tokens(len(source)),
            first_token=first_token,
            page_tokens=self.page_tokens,
            piece_tokens=piece_tokens,
        )
        facts = self._parts.requests.find(chunk.room)
        request_tokens = facts.prompt_tokens if facts else 0
        return [
            Piece(source[start:end], target[start:end], tokens, first_token + start * self.page_tokens, request_tokens)
            for start, end, tokens in cuts
        ]

    def _account(self, transfer: Transfer, outcome: Outcome) -> None:
        for piece in outcome.delivered:
            transfer.chunks += 1
            transfer.coded_chunks += 1
            transfer.raw_bytes += self._sizes.raw_bytes(piece.tokens)
            transfer.wire_bytes += piece.frame_bytes
            transfer.encode_s += piece.encode_s
            transfer.decode_s += piece.decode_s
            if piece.span is not None:
                self._observe(transfer, piece.span)
            if piece.late_s > LATE_S and not self._writes_return_early:
                self._writes_return_early = True
                self._parts.agent.count("pd.engine_returns_early")
                _log.warning(
                    "the engine's writes return before the bytes are there: raw sends tell nothing of the wire"
                )
        # Bytes of refused frames went over the wire, too.
        refused_bytes = sum(piece.frame_bytes for piece in outcome.undelivered if piece.write_start_s)
        transfer.wire_bytes += refused_bytes
        self._worker.wire_bytes += refused_bytes + sum(piece.frame_bytes for piece in outcome.delivered)
        transfer.encode_s += sum(piece.encode_s for piece in outcome.undelivered)
        if outcome.reason:
            transfer.nacked = transfer.nacked or outcome.nacked
            transfer.fall_back(outcome.reason)
            transfer.abandoned = outcome.reason == f"{RawReason.NACK}:{Refusal.ROOM_GONE}"
            if outcome.reason in (RawReason.ACK_TIMEOUT, RawReason.ENGINE_WRITE):
                self._parts.peers.drop_grant(transfer.session)

    def _take_check(self, transfer: Transfer, outcome: Outcome) -> None:
        checked = outcome.checked
        # Of a room that was given up meanwhile the pages may have had a new owner while they were compared.
        if checked is None or not self._parts.room_is_open(transfer.room):
            return
        transfer.reconstruction_error = checked.error
        if checked.fault:
            transfer.fall_back(f"{RawReason.SELF_CHECK}:{checked.fault}")

    def _send_raw(self, transfer: Transfer, left: Sequence[tuple[Pages, Pages]], send_raw: SendRaw) -> int:
        source = np.concatenate([pages for pages, _ in left])
        target = np.concatenate([pages for _, pages in left])
        self._worker.spans = []
        start_s = self._parts.clock.monotonic_s()
        try:
            status = send_raw(source, target)
        finally:
            recorded, self._worker.spans = self._worker.spans, None
        size_bytes = self._sizes.raw_bytes(len(source) * self.page_tokens)
        # Where SGLang writes from threads of its own, the whole call is the span.
        spans = recorded or [WireSpan(start_s, self._parts.clock.monotonic_s(), size_bytes)]
        if status == 0:
            transfer.chunks += 1
            transfer.raw_bytes += size_bytes
            transfer.wire_bytes += size_bytes
            self._worker.wire_bytes += size_bytes
            for span in spans:
                self._observe(transfer, span, is_raw=True)
        return status

    def _observe(self, transfer: Transfer, span: WireSpan, *, is_raw: bool = False) -> None:
        transfer.spans.append(span)
        if not (is_raw and self._writes_return_early):
            with self._lock:
                span = self._overhead.without(span)
            self._parts.agent.observe_wire(
                tier=TIER,
                link_group=LINK_GROUP,
                start_s=span.start_s,
                end_s=span.end_s,
                wire_bytes=span.wire_bytes,
                service_class=transfer.service_class,
            )

    def _finish_room(self, room: int) -> None:
        with self._lock:
            finished = [transfer for (of_room, _), transfer in self._transfers.items() if of_room == room]
        for transfer in finished:
            self._finish(transfer)
        self._offers.close(room)
        self._parts.requests.forget(room)

    def _sweep(self, now_s: float) -> None:
        """Close what SGLang gave up without a last chunk."""
        for room in self._offers.older_than(_SWEEP_AGE_S, now_s):
            if not self._parts.room_is_open(room):
                with self._lock:
                    aborted = [transfer for (of_room, _), transfer in self._transfers.items() if of_room == room]
                for transfer in aborted:
                    transfer.abandoned = True
                    transfer.fall_back(RawReason.ABORTED)
                self._finish_room(room)

    def _finish(self, transfer: Transfer) -> None:
        with self._lock:
            if self._transfers.pop((transfer.room, transfer.session), None) is None:
                return
        effect = transfer.to_effect(finished_unix_s=self._parts.clock.unix_s())
        self._parts.agent.count(f"pd.{effect.path.value}")
        if effect.reason:
            self._parts.agent.count(f"pd.raw.{effect.reason}")
        found = self._parts.peers.find(transfer.session)
        if transfer.coded_chunks and found is not None:
            finish = Finish(
                transfer_id=transfer.transfer_id,
                arm_id=effect.arm_id,
                service_class=effect.service_class,
                link_group=effect.link_group,
                path=effect.path.value,
                reason=effect.reason,
                table_version=effect.table_version,
                explored=effect.explored,
            )
            self._parts.message(found[0], finish.to_frames())
        self._parts.agent.report(effect)

    def _lane(self) -> Lane:
        if self._worker.lane is None:
            self._worker.lane = self._parts.new_lane()
        return self._worker.lane

    @property
    def part_tokens(self) -> int:
        """See `PageSizes.part_tokens`."""
        return self._sizes.part_tokens

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the pool."""
        return self._sizes.page_tokens

    def _valid_tokens(self, pages: int) -> int:
        chunk = self._worker.chunk
        in_pages = pages * self.page_tokens
        return in_pages if chunk is None or chunk.tokens is None else min(chunk.tokens, in_pages)

    def _guarded(self, work: Callable[[], _Result]) -> _Result | None:
        """The edge between our code and SGLang's threads."""
        with Guarded(self._parts.agent, "the PD plane failed; this goes raw"):
            return work()
        return None


def _index_of(token: int | None, pieces: Sequence[Piece]) -> int | None:
    """Which of the pieces holds a token of the request; None where none does."""
    if token is None:
        return None
    holding = (index for index, piece in enumerate(pieces) if 0 <= token - piece.first_token < piece.tokens)
    return next(holding, None)
