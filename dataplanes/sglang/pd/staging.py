"""Staging slots: memory registered with the transfer engine, cut into equal slots, and who may use which.

A frame lies at the start of a slot and is followed by its arrival mark: the chunk's sequence number and the frame's
size. The mark is written in the same engine write, behind the frame, so that a receiver can tell a frame that has not
arrived from one that is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dataplanes.sglang.pd.memory import PoolMemory

_MARK = struct.Struct("<QQ")
MARK_BYTES = _MARK.size


class StagingArea:
    """Equal slots in one piece of memory.

    Args:
        memory: where it is allocated.
        slots: how many.
        slot_bytes: size of each, the arrival mark included.
    """

    def __init__(self, memory: PoolMemory, *, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._bytes = memory.staging(slots * slot_bytes)

    @property
    def address(self) -> int:
        """Where it starts."""
        return int(self._bytes.data_ptr())

    @property
    def size_bytes(self) -> int:
        """Size of all slots."""
        return self.slots * self.slot_bytes

    def slot(self, index: int) -> Tensor:
        """A slot's bytes."""
        return self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def slot_address(self, index: int) -> int:
        """Where a slot starts."""
        return self.address + index * self.slot_bytes

    def write_mark(self, index: int, frame_bytes: int, sequence: int) -> int:
        """Put the arrival mark behind a frame; returns how many bytes to send."""
        mark = memoryview(_MARK.pack(sequence, frame_bytes))
        target = self.slot(index).numpy()[frame_bytes : frame_bytes + MARK_BYTES]
        target.data[:] = mark
        return frame_bytes + MARK_BYTES

    def has_arrived(self, index: int, frame_bytes: int, sequence: int) -> bool:
        """Whether the mark of this very frame is there."""
        found = self.slot(index).numpy()[frame_bytes : frame_bytes + MARK_BYTES]
        return found.tobytes() == _MARK.pack(sequence, frame_bytes)


@dataclass(slots=True)
class _Loan:
    slots: tuple[int, ...]
    used_s: float
    busy: int = field(default=0)


class LoanBook:
    """Which sender holds which of the receiver's slots. Times are passed in; not thread-safe.

    Args:
        slots: how many there are to lend.
        lease_s: a loan that was not used for so long ends when somebody else needs its slots.
    """

    def __init__(self, slots: int, lease_s: float) -> None:
        self.lease_s = lease_s
        self._free = list(range(slots))
        self._loans: dict[int, _Loan] = {}
        self._last_id = 0

    def lend(self, wanted: int, now_s: float) -> tuple[int, tuple[int, ...]]:
        """A new loan: its id and its slots, which are fewer than wanted (or none) when others hold them."""
        if len(self._free) < wanted:
            self._reclaim(now_s)
        slots = tuple(self._free[:wanted])
        del self._free[:wanted]
        self._last_id += 1
        if slots:
            self._loans[self._last_id] = _Loan(slots, now_s)
        return self._last_id, slots

    def slot_of(self, grant_id: int, index: int, now_s: float) -> int | None:
        """The area's slot for a grant's slot, and its loan counts as used; None where there is no such loan."""
        loan = self._loans.get(grant_id)
        if loan is None or index >= len(loan.slots):
            return None
        loan.used_s = now_s
        return loan.slots[index]

    def begin_use(self, grant_id: int) -> None:
        """A loan with a chunk in work is not reclaimed."""
        self._loans[grant_id].busy += 1

    def end_use(self, grant_id: int, now_s: float) -> None:
        """The chunk is done."""
        loan = self._loans[grant_id]
        loan.busy -= 1
        loan.used_s = now_s

    def _reclaim(self, now_s: float) -> None:
        for grant_id, loan in list(self._loans.items()):
            if not loan.busy and now_s - loan.used_s > self.lease_s:
                self._free += loan.slots
                del self._loans[grant_id]


def cut_pages(
    pages: int, tokens: int, *, first_token: int, page_tokens: int, piece_tokens: int
) -> Sequence[tuple[int, int, int]]:
    """Cut a run of pages into pieces that end at multiples of `piece_tokens` of the request's token positions.

    Args:
        pages: how many pages; the run starts at a page boundary.
        tokens: valid tokens in them; the last page may be partial.
        first_token: position in the request of the first one.
        page_tokens: tokens per page.
        piece_tokens: a multiple of `page_tokens`.

    Returns:
        `(first page, last page + 1, valid tokens)` of each piece; pages without a valid token are left out.
    """
    pieces = []
    start = 0
    used = min(pages, -(-tokens // page_tokens))
    while start < used:
        position = first_token + start * page_tokens
        to_boundary = piece_tokens - position % piece_tokens
        end = min(used, start + max(1, to_boundary // page_tokens))
        valid = min(tokens, end * page_tokens) - start * page_tokens
        pieces.append((start, end, valid))
        start = end
    return pieces
