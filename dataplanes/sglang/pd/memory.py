"""The KV pool as planes of tokens: the one place that touches memory which SGLang owns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from controld.contract.errors import ControldError
from dataplanes.kvcodec import KVLayout

Pages = npt.NDArray[np.int32]


class PoolError(ControldError):
    """Memory or pages that this plane cannot work with."""


class PoolMemory(Protocol):
    """How raw addresses become tensors. One implementation per kind of device.

    A CUDA one would wrap the address with `__cuda_array_interface__`, allocate staging on the device and synchronise a
    side stream in `settle`; none is included, because none was tested.
    """

    def view(self, address: int, size_bytes: int) -> Tensor:
        """A flat uint8 tensor over memory that someone else owns and keeps alive."""
        ...

    def staging(self, size_bytes: int) -> Tensor:
        """Fresh memory, flat uint8, that a transfer engine can register."""
        ...

    def settle(self) -> None:
        """Return once everything queued on the device is done, so that an engine may read or a peer be told."""
        ...


class HostMemory:
    """Host memory, as SGLang's CPU engine uses it. Work on it is synchronous."""

    def view(self, address: int, size_bytes: int) -> Tensor:
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address)))

    def staging(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def settle(self) -> None:
        return


class PagedPool:
    """The planes of SGLang's KV pool, read and written by page.

    Args:
        memory: how addresses become tensors.
        addresses: start of each plane.
        sizes_bytes: of each plane.
        layout: shapes, element type and page size; as many planes as addresses.

    Raises:
        PoolError: a plane is no whole number of tokens.
    """

    def __init__(
        self, memory: PoolMemory, *, addresses: Sequence[int], sizes_bytes: Sequence[int], layout: KVLayout
    ) -> None:
        self.memory = memory
        self.layout = layout
        self._planes: list[Tensor] = []
        dtype = layout.dtype.torch_dtype
        for address, size_bytes, plane in zip(addresses, sizes_bytes, layout.planes, strict=True):
            if size_bytes % (plane.heads * plane.head_dim * dtype.itemsize):
                raise PoolError(f"a plane of {size_bytes} bytes is no whole number of tokens", code="pd.pool")
            self._planes.append(memory.view(address, size_bytes).view(dtype).view(-1, plane.heads, plane.head_dim))
        self._tokens = min(plane.shape[0] for plane in self._planes)

    @property
    def planes(self) -> Sequence[Tensor]:
        """All planes, each `[tokens of the pool, heads, head_dim]`: codecs read and write them where they lie."""
        return self._planes

    def rows(self, pages: Pages, tokens: int) -> Tensor:
        """Which row of the planes holds each of the first `tokens` tokens of these pages, int64, in order.

        Raises:
            PoolError: the pages do not hold so many tokens, or lie outside the pool.
        """
        page_tokens = self.layout.page_tokens
        if not 0 < tokens <= len(pages) * page_tokens:
            raise PoolError(f"{tokens} tokens in {len(pages)} pages", code="pd.pages")
        if int(pages.min()) < 0 or (int(pages.max()) + 1) * page_tokens > self._tokens:
            raise PoolError("a page outside the pool", code="pd.pages")
        slots = (pages.astype(np.int64)[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)[:tokens]
        return torch.from_numpy(slots)
