"""The sender's look at a frame of its own, on a pool in plain memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import KVCodec, KVDtype, KVLayout
from dataplanes.sglang.pd.memory import HostMemory, PagedPool, Pages
from dataplanes.sglang.pd.self_check import Checked, SelfCheck

LAYOUT = KVLayout.keys_then_values(layers=2, heads=1, head_dim=4, dtype=KVDtype.BFLOAT16, page_tokens=4)
LOSSLESS = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})
PAGES: Pages = np.array([5, 2], np.int32)
TOKENS = 6


class Counts(Counter[str]):
    """Keeps what is counted."""

    def count(self, name: str, n: int = 1) -> None:
        self[name] += n


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(4 * 32 * 4, dtype=torch.float32).to(torch.bfloat16).view(4, 32, 1, 4)


@pytest.fixture
def pool(memory: torch.Tensor) -> PagedPool:
    return PagedPool(
        HostMemory(),
        addresses=[plane.data_ptr() for plane in memory],
        sizes_bytes=[plane.nbytes for plane in memory],
        layout=LAYOUT,
    )


@pytest.fixture
def frame(pool: PagedPool) -> torch.Tensor:
    """These pages as they go over the wire."""
    codec = KVCodec(LOSSLESS, LAYOUT)
    room = torch.zeros(codec.max_frame_bytes(TOKENS), dtype=torch.uint8)
    rows = pool.rows(PAGES, TOKENS)
    size = codec.encode_into(
        pool.planes, room, rows=rows, first_token=0, chunk_index=0, chunk_count=0, request_tokens=0
    )
    return room[:size]


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def self_check(pool: PagedPool, counts: Counts) -> SelfCheck:
    return SelfCheck(pool, {}, counts)


def test_a_copy_outlives_the_slot_and_is_compared_with_the_pool(
    self_check: SelfCheck, frame: torch.Tensor, memory: torch.Tensor, counts: Counts
) -> None:
    kept = self_check.keep(frame)
    assert kept is not None
    frame.zero_()
    assert self_check.look(kept, PAGES, TOKENS) == Checked(error=0.0)
    memory[:, 5 * LAYOUT.page_tokens] += 64
    found = self_check.look(kept, PAGES, TOKENS)
    assert found is not None
    assert found.error is not None
    assert found.error > 0.01
    assert not counts


def test_a_damaged_frame_is_a_fault(self_check: SelfCheck, frame: torch.Tensor, counts: Counts) -> None:
    frame[-1] ^= 1
    assert self_check.look(frame, PAGES, TOKENS) == Checked(fault="checksum")
    assert not counts


def test_pages_that_cannot_be_read_say_nothing_about_the_frame(
    self_check: SelfCheck, frame: torch.Tensor, counts: Counts
) -> None:
    assert self_check.look(frame, np.array([0, 99], np.int32), TOKENS) is None
    assert counts == {"pd.self_check_skipped": 1, "pd.exception": 1}


def test_without_memory_for_a_copy_there_is_none(self_check: SelfCheck, counts: Counts) -> None:
    exbibyte = torch.zeros(1, dtype=torch.uint8).expand(2**60).view(2**30, 2**30)
    assert self_check.keep(exbibyte) is None
    assert counts == {"pd.self_check_skipped": 1, "pd.exception": 1}
