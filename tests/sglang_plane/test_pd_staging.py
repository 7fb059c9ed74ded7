"""Slots, loans and cuts: who may write where, and where a chunk is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplanes.kvcodec import KVDtype, KVLayout
from dataplanes.sglang.pd.memory import HostMemory, PagedPool, PoolError
from dataplanes.sglang.pd.staging import LoanBook, StagingArea, cut_pages

LAYOUT = KVLayout.keys_then_values(layers=2, heads=1, head_dim=4, dtype=KVDtype.BFLOAT16, page_tokens=4)


def test_a_frame_has_arrived_only_with_its_own_mark() -> None:
    area = StagingArea(HostMemory(), slots=2, slot_bytes=64)
    assert not area.has_arrived(1, 40, sequence=9)
    assert area.write_mark(1, 40, sequence=9) == 56
    assert area.has_arrived(1, 40, sequence=9)
    assert not area.has_arrived(1, 40, sequence=8)
    assert not area.has_arrived(1, 39, sequence=9)
    assert not area.has_arrived(0, 40, sequence=9)
    assert area.slot_address(1) == area.address + 64


class TestLoans:
    def test_a_slot_is_lent_once(self) -> None:
        loans = LoanBook(slots=5, lease_s=10)
        first, slots = loans.lend(4, now_s=0)
        _, others = loans.lend(4, now_s=1)
        assert len(slots) == 4
        assert len(others) == 1
        assert not set(slots) & set(others)
        assert loans.slot_of(first, 3, now_s=2) == slots[3]
        assert loans.slot_of(first, 4, now_s=2) is None
        assert loans.slot_of(99, 0, now_s=2) is None

    def test_an_idle_loan_ends_when_its_slots_are_needed(self) -> None:
        loans = LoanBook(slots=2, lease_s=10)
        old, _ = loans.lend(2, now_s=0)
        assert loans.lend(2, now_s=9)[1] == ()
        assert len(loans.lend(2, now_s=11)[1]) == 2
        assert loans.slot_of(old, 0, now_s=11) is None

    def test_a_loan_in_use_is_never_reclaimed(self) -> None:
        loans = LoanBook(slots=2, lease_s=10)
        grant, _ = loans.lend(2, now_s=0)
        loans.begin_use(grant)
        assert loans.lend(2, now_s=100)[1] == ()
        loans.end_use(grant, now_s=100)
        assert loans.lend(2, now_s=105)[1] == ()
        assert len(loans.lend(2, now_s=111)[1]) == 2


@given(
    pages=st.integers(0, 40),
    spare_tokens=st.integers(0, 15),
    first_page=st.integers(0, 40),
    piece_pages=st.integers(1, 8),
)
def test_cuts_cover_every_token_once_and_follow_positions(
    pages: int, spare_tokens: int, first_page: int, piece_pages: int
) -> None:
    page_tokens = 16
    tokens = max(0, pages * page_tokens - spare_tokens)
    cuts = cut_pages(
        pages,
        tokens,
        first_token=first_page * page_tokens,
        page_tokens=page_tokens,
        piece_tokens=piece_pages * page_tokens,
    )
    assert sum(valid for _, _, valid in cuts) == tokens
    position = 0
    for start, end, valid in cuts:
        assert start == position
        assert 0 < valid <= (end - start) * page_tokens
        position = end
    # Every inner cut lies on a multiple of the piece, so that groups of tokens are whole however a prompt is chunked.
    assert all((first_page + end) % piece_pages == 0 for _, end, _ in cuts[:-1])


class TestPool:
    def pool(self) -> tuple[torch.Tensor, PagedPool]:
        memory = torch.arange(4 * 32 * 4, dtype=torch.float32).to(torch.bfloat16).view(4, 32, 1, 4)
        pool = PagedPool(
            HostMemory(),
            addresses=[plane.data_ptr() for plane in memory],
            sizes_bytes=[plane.nbytes for plane in memory],
            layout=LAYOUT,
        )
        return memory, pool

    def test_rows_follow_pages_and_stop_at_the_last_token(self) -> None:
        import numpy as np

        memory, pool = self.pool()
        rows = pool.rows(np.array([5, 2], np.int32), 6)
        assert rows.tolist() == [20, 21, 22, 23, 8, 9]
        assert all(torch.equal(plane[rows], memory[n][rows]) for n, plane in enumerate(pool.planes))

    def test_planes_are_the_pool_itself(self) -> None:
        memory, pool = self.pool()
        pool.planes[1][7] = 0
        assert not memory[1, 7].any()

    @pytest.mark.parametrize(("pages", "tokens"), [([8], 1), ([-1], 1), ([0], 5), ([0], 0)])
    def test_pages_outside_the_pool_are_refused(self, pages: list[int], tokens: int) -> None:
        import numpy as np

        _, pool = self.pool()
        with pytest.raises(PoolError):
            pool.rows(np.array(pages, np.int32), tokens)
