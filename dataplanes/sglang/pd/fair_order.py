"""The order in which a transfer worker takes its chunks: by the tenants' shares where controld names some, else as they
came.

SGLang's queue stays what it is, and everybody goes on putting into it; only its worker, the one consumer that it has,
asks here. Whatever waits is moved over when the worker asks for more, and kept in the order of arrival beside the fair
queue, which only proposes who is next: so whatever goes wrong with the proposing, every chunk is still handed out once,
the oldest first.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from controld.contract.fair_queue import FairQueue, Tenancy
from dataplanes.sglang.pd.edge import Counting, Guarded
from dataplanes.sglang.pd.staging import cut_pages

_log = logging.getLogger(__name__)

_RATIO_GAIN: Final = 0.2
_MAX_CLASSES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is known of a chunk that waits.

    Args:
        room: SGLang's bootstrap room; its chunks keep their order.
        service_class: of the request.
        raw_bytes: of its pages.
    """

    room: int
    service_class: str
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class _Served:
    waiting: Waiting
    tenant: str
    cost_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderParts:
    """What an order works with; everything is called in the worker's thread.

    Args:
        describe: what is known of a chunk.
        split: a large chunk in parts, in order; asked only where tenants share, so that nobody waits for all of it.
        tenancy: who shares the link; the same object until something changes.
        wire_bytes: what the worker's last chunk put on the wire.
        on_take: told of each chunk that the worker takes, and of None when it asks for the next one.
        counting: takes counts of errors.
    """

    describe: Callable[[Any], Waiting]
    split: Callable[[Any], Sequence[Any]]
    tenancy: Callable[[], Tenancy]
    wire_bytes: Callable[[], int]
    on_take: Callable[[Any], None]
    counting: Counting


class FairOrder:
    """What a transfer worker asks for chunks instead of SGLang's `FastQueue`.

    A chunk costs its raw bytes times the class's usual share of them on the wire; what it really took is settled when
    the worker asks for the next one. Chunks of one room are never reordered. A fault of ours leaves the order of
    arrival until nothing waits any more.

    Args:
        queue: SGLang's; one worker takes from it.
    """

    def __init__(self, queue: Any, parts: OrderParts) -> None:
        self._queue = queue
        self._parts = parts
        self._numbers = itertools.count()
        self._arrived: dict[int, Any] = {}
        self._known: dict[int, _Served] = {}
        self._wire_share: dict[str, float] = {}
        self._tenancy = Tenancy()
        self._fair: FairQueue[int] | None = FairQueue()
        self._served: _Served | None = None
        self._is_closing = False
        if not isinstance(getattr(queue, "_buf", None), deque):
            _log.warning("the transfer queue does not show what waits: chunks are sent in the order of arrival")
            parts.counting.count("pd.queue_opaque")

    def put(self, item: Any) -> None:
        """SGLang's own `put`."""
        self._queue.put(item)

    def get(self) -> Any:
        """The next chunk; None once the worker must end and nothing that came before waits."""
        self._settle()
        self._parts.on_take(None)
        if self._fair is None and not self._arrived:
            self._fair, self._tenancy = FairQueue(), Tenancy()
        self._move_over()
        while not self._arrived and not self._is_closing:
            self._take_in(self._queue.get())
            self._move_over()
        if not self._arrived:
            return None
        chunk = self._choose()
        self._parts.on_take(chunk)
        return chunk

    def _move_over(self) -> None:
        while not self._is_closing and self._has_more():
            self._take_in(self._queue.get())

    def _has_more(self) -> bool:
        # Nobody else takes, so what is there now will be there when we take it. A queue of another make shows nothing
        # and is taken from one by one, in its own order.
        waiting = getattr(self._queue, "_buf", None)
        return isinstance(waiting, deque) and len(waiting) > 0

    def _take_in(self, chunk: Any) -> None:
        if chunk is None:
            self._is_closing = True
            return
        parts: Sequence[Any] = (chunk,)
        with self._guarded():
            if len(self._parts.tenancy().weights) > 1:
                parts = self._parts.split(chunk)
        for part in parts:
            self._queue_one(part)

    def _queue_one(self, chunk: Any) -> None:
        number = next(self._numbers)
        self._arrived[number] = chunk
        if self._fair is None:
            return
        with self._guarded() as guarded:
            self._follow_tenancy(self._fair)
            waiting = self._parts.describe(chunk)
            cost_bytes = waiting.raw_bytes * self._wire_share.get(waiting.service_class, 1.0)
            tenant = self._fair.push(
                number,
                tenant=self._tenancy.tenant(waiting.service_class),
                transfer=waiting.room,
                cost_bytes=cost_bytes,
            )
            self._known[number] = _Served(waiting, tenant, cost_bytes)
        if guarded.error is not None:
            self._give_up()

    def _choose(self) -> Any:
        number = next(iter(self._arrived))
        if self._fair is not None:
            with self._guarded() as guarded:
                proposed = self._fair.pop()
                if proposed in self._arrived:
                    number = proposed
            if guarded.error is not None:
                self._give_up()
        self._served = self._known.pop(number, None)
        return self._arrived.pop(number)

    def _follow_tenancy(self, fair: FairQueue[int]) -> None:
        tenancy = self._parts.tenancy()
        if tenancy is not self._tenancy:
            fair.set_weights(tenancy.weights)
            self._tenancy = tenancy

    def _settle(self) -> None:
        """Charge what the last chunk really took, and learn from it what its class usually takes."""
        served, self._served = self._served, None
        if served is None or self._fair is None:
            return
        with self._guarded() as guarded:
            taken_bytes = self._parts.wire_bytes()
            self._fair.charge(served.tenant, taken_bytes - served.cost_bytes)
            name, raw_bytes = served.waiting.service_class, served.waiting.raw_bytes
            # A chunk that was dropped tells nothing of its class.
            if taken_bytes and raw_bytes and (name in self._wire_share or len(self._wire_share) < _MAX_CLASSES):
                share = taken_bytes / raw_bytes
                usual = self._wire_share.get(name, share)
                self._wire_share[name] = usual + _RATIO_GAIN * (share - usual)
        if guarded.error is not None:
            self._give_up()

    def _give_up(self) -> None:
        self._parts.counting.count("pd.fair_order_given_up")
        self._fair = None
        self._known.clear()

    def _guarded(self) -> Guarded:
        return Guarded(self._parts.counting, "chunks are sent in the order of arrival")


def split_chunk(chunk: Any, *, first_token: int, page_tokens: int, part_tokens: int) -> Sequence[Any]:
    """A `TransferKVChunk` as several, which SGLang's worker sends one by one as it does those of a chunked prefill.

    Args:
        first_token: position in the request of the chunk's first token.
        part_tokens: parts end at multiples of it, counted in the request; a multiple of `page_tokens`.

    Returns:
        The chunk itself where it is small enough, or waits for an event that only its first user may await.
    """
    pages, start = len(chunk.prefill_kv_indices), chunk.index_slice.start or 0
    if chunk.wait_event is not None or chunk.indices_event is not None or pages * page_tokens <= part_tokens:
        return (chunk,)
    tokens = pages * page_tokens if chunk.num_kv_tokens is None else min(chunk.num_kv_tokens, pages * page_tokens)
    cuts = cut_pages(pages, tokens, first_token=first_token, page_tokens=page_tokens, piece_tokens=part_tokens)
    parts = []
    for number, (begin, end, valid) in enumerate(cuts, 1):
        is_end = number == len(cuts)
        # The end keeps whatever else hangs on the chunk, and pages that hold no token.
        end = pages if is_end else end
        part = replace(
            chunk,
            prefill_kv_indices=chunk.prefill_kv_indices[begin:end],
            index_slice=slice(start + begin, start + end),
            num_kv_tokens=None if chunk.num_kv_tokens is None else valid,
        )
        if not is_end:
            part = replace(part, is_last_chunk=False, prefill_aux_index=None, state_indices=None)
        parts.append(part)
    return parts or (chunk,)
