"""Lossless coders of symbol rows, found by name.

A coder sees rows of small integers, nothing of KV. `entropy` packs as many symbols as fit into a byte and Huffman-codes
the bytes with Zstandard's literal coder, one block (one table) or more per row: with two or three symbols per code
word it comes within about half a per cent of the symbols' entropy, at gigabytes per second, from an ordinary wheel.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.errors import FrameError, FrameErrorReason
from dataplanes.numerics import packing

Bytes = NDArray[np.uint8]


class Coder(ABC):
    """One lossless coder. Stateless between calls and safe in any number of threads."""

    name: ClassVar[str]

    @abstractmethod
    def max_bytes(self, rows: int, length: int, levels: int) -> int:
        """An upper bound of what `encode` returns, in bytes."""

    @abstractmethod
    def encode(self, symbols: Tensor, levels: int) -> Bytes:
        """Code symbols.

        Args:
            symbols: uint8 `[rows, length]` on any device, each below `levels`; `length` may be 0.
            levels: size of the alphabet, 2..256.
        """

    @abstractmethod
    def decode(self, data: memoryview, rows: int, length: int, levels: int) -> Tensor:
        """The symbols, uint8 `[rows, length]` on the CPU.

        Raises:
            FrameError: `data` is not what `encode` makes of such rows. Never reads outside `data`, never allocates
                more than the rows need.
        """


class PlainCoder(Coder):
    """One byte per symbol."""

    name = "none"

    def max_bytes(self, rows: int, length: int, levels: int) -> int:
        """Exact."""
        return rows * length

    def encode(self, symbols: Tensor, levels: int) -> Bytes:
        """The symbols themselves."""
        return _host_bytes(symbols)

    def decode(self, data: memoryview, rows: int, length: int, levels: int) -> Tensor:
        """A view of `data` where it is writable memory, checked for length only."""
        return _exact_rows(data, rows, length)


class BitpackCoder(Coder):
    """Mixed-radix packing: as many symbols per byte as fit."""

    name = "bitpack"

    def max_bytes(self, rows: int, length: int, levels: int) -> int:
        """Exact."""
        return rows * packing.packed_length(length, levels)

    def encode(self, symbols: Tensor, levels: int) -> Bytes:
        """Packed on the symbols' device."""
        return _host_bytes(packing.pack(symbols, levels))

    def decode(self, data: memoryview, rows: int, length: int, levels: int) -> Tensor:
        """Unpacked on the CPU."""
        return packing.unpack(_exact_rows(data, rows, packing.packed_length(length, levels)), levels, length)


class ZstdCoder(Coder):
    """Packed bytes through Zstandard as one stream; finds repeats as well as skewed counts."""

    name = "zstd"
    _parameters: ClassVar[zstandard.ZstdCompressionParameters] = zstandard.ZstdCompressionParameters.from_level(
        3, write_content_size=1, write_checksum=0
    )

    def __init__(self) -> None:
        self._local = threading.local()

    def max_bytes(self, rows: int, length: int, levels: int) -> int:
        """Zstandard's own bound, plus a block header per row."""
        size = rows * packing.packed_length(length, levels)
        return size + (size >> 7) + 16 * rows + 512

    def encode(self, symbols: Tensor, levels: int) -> Bytes:
        """One Zstandard frame; empty for no symbols."""
        if symbols.numel() == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._compress(_host_bytes(packing.pack(symbols, levels)), symbols.shape[0]), np.uint8)

    def decode(self, data: memoryview, rows: int, length: int, levels: int) -> Tensor:
        """Checks the announced size before anything is allocated."""
        width = packing.packed_length(length, levels)
        if rows * width == 0:
            return _exact_rows(data, rows, length)
        plain = np.empty(rows * width, np.uint8)
        try:
            announced = zstandard.get_frame_parameters(data).content_size
            if announced != plain.size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"{announced} coded bytes where {plain.size} belong")
            with self._decompressor().stream_reader(data) as reader:
                found = reader.readinto(plain.data)
        except zstandard.ZstdError as error:
            raise FrameError(FrameErrorReason.PAYLOAD, f"undecodable symbols: {error}") from error
        if found != plain.size:
            raise FrameError(FrameErrorReason.PAYLOAD, f"{found} coded bytes where {plain.size} belong")
        return packing.unpack(torch.from_numpy(plain).view(rows, width), levels, length)

    def _compress(self, plain: Bytes, rows: int) -> bytes:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(compression_params=self._parameters)
        return bytes(compressor.compress(plain.data))

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        # A context belongs to one thread at a time.
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        return decompressor


class EntropyCoder(ZstdCoder):
    """Packed bytes through Zstandard's Huffman coder alone: matches are as good as switched off."""

    name = "entropy"
    _parameters = zstandard.ZstdCompressionParameters(
        compression_level=1,
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=17,
        target_length=0,
        write_content_size=1,
        write_checksum=0,
    )


def _host_bytes(symbols: Tensor) -> Bytes:
    array: Bytes = symbols.contiguous().cpu().numpy()
    return array.reshape(-1)


def _exact_rows(data: memoryview, rows: int, length: int) -> Tensor:
    if len(data) != rows * length:
        raise FrameError(FrameErrorReason.PAYLOAD, f"{len(data)} bytes of symbols where {rows * length} belong")
    if rows * length == 0:
        return torch.empty(rows, length, dtype=torch.uint8)
    array = np.frombuffer(data, np.uint8)
    # torch refuses read-only memory; frames that arrive in a staging buffer are writable and not copied.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(rows, length)


CODERS: Final[dict[str, Coder]] = {
    coder.name: coder for coder in (PlainCoder(), BitpackCoder(), EntropyCoder(), ZstdCoder())
}
"""Every coder by the name that configurations use."""
