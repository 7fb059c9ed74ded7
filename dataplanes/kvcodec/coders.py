"""Lossless coders of byte rows, found by name.

A coder sees bytes, nothing of KV. `entropy` Huffman-codes bytes that hold two or more symbols each, with Zstandard's
literal coder: a new table every 128 KiB or less, within about half a per cent of the bytes' entropy, at gigabytes per
second, from an ordinary wheel. An arithmetic coder over single symbols would win nothing on it: sharing a byte already
exploits what neighbouring tokens have in common.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from dataplanes.kvcodec.errors import FrameError, FrameErrorReason

Bytes = NDArray[np.uint8]


class Coder(ABC):
    """One lossless coder. Stateless between calls and safe in any number of threads."""

    name: ClassVar[str]
    packs_symbols: ClassVar[bool]
    """Whether it wants as many symbols in each byte as fit, rather than one."""

    @abstractmethod
    def max_bytes(self, size: int) -> int:
        """An upper bound of what `encode` makes of `size` bytes."""

    @abstractmethod
    def encode(self, plain: Bytes) -> Bytes:
        """Code a flat array, which may be empty."""

    @abstractmethod
    def decode(self, coded: memoryview, size: int) -> Bytes:
        """The plain bytes: a new array, or a view of `coded`.

        Args:
            coded: what `encode` returned.
            size: how many bytes `coded` stands for.

        Raises:
            FrameError: `coded` does not stand for `size` bytes. Never reads outside `coded`, never allocates more than
                `size`.
        """


class StoredCoder(Coder):
    """One byte per symbol, as it is."""

    name = "none"
    packs_symbols = False

    def max_bytes(self, size: int) -> int:
        """Exact."""
        return size

    def encode(self, plain: Bytes) -> Bytes:
        """Nothing to do."""
        return plain

    def decode(self, coded: memoryview, size: int) -> Bytes:
        """A view, checked for length only."""
        if len(coded) != size:
            raise FrameError(FrameErrorReason.PAYLOAD, f"{len(coded)} stored bytes where {size} belong")
        return np.frombuffer(coded, np.uint8)


class BitpackCoder(StoredCoder):
    """Packed symbols, stored as they are."""

    name = "bitpack"
    packs_symbols = True


class ZstdCoder(Coder):
    """Packed symbols through Zstandard, level 3: finds repeats as well as skewed counts."""

    name = "zstd"
    packs_symbols = True
    _parameters: ClassVar[zstandard.ZstdCompressionParameters] = zstandard.ZstdCompressionParameters.from_level(
        3, write_content_size=1, write_checksum=0
    )

    def __init__(self) -> None:
        self._local = threading.local()

    def max_bytes(self, size: int) -> int:
        """Zstandard's own bound, rounded up."""
        return size + (size >> 7) + 512 if size else 0

    def encode(self, plain: Bytes) -> Bytes:
        """One Zstandard frame; nothing for nothing."""
        if plain.size == 0:
            return plain
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            # A context belongs to one thread at a time.
            compressor = self._local.compressor = zstandard.ZstdCompressor(compression_params=self._parameters)
        return np.frombuffer(compressor.compress(plain.data), np.uint8)

    def decode(self, coded: memoryview, size: int) -> Bytes:
        """Checks the announced size before anything is decoded."""
        plain = np.empty(size, np.uint8)
        if size == 0:
            if len(coded):
                raise FrameError(FrameErrorReason.PAYLOAD, f"{len(coded)} coded bytes that stand for none")
            return plain
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            announced = zstandard.get_frame_parameters(coded).content_size
            if announced != size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"coded bytes stand for {announced}, not {size}")
            with decompressor.stream_reader(coded) as reader:
                found = reader.readinto(plain.data)
        except zstandard.ZstdError as error:
            raise FrameError(FrameErrorReason.PAYLOAD, f"undecodable symbols: {error}") from error
        if found != size:
            raise FrameError(FrameErrorReason.PAYLOAD, f"{found} decoded bytes where {size} belong")
        return plain


class EntropyCoder(ZstdCoder):
    """Packed symbols through Zstandard's Huffman coder alone: matches are as good as switched off."""

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


STORED: Final = StoredCoder()

CODERS: Final[dict[str, Coder]] = {coder.name: coder for coder in (STORED, BitpackCoder(), EntropyCoder(), ZstdCoder())}
"""Every coder by the name that configurations use."""
