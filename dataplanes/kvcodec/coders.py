"""Lossless coders of byte rows, found by name.

A coder sees bytes, nothing of KV. `entropy` Huffman-codes bytes that hold two or more symbols each, with Zstandard's
literal coder: a new table every 128 KiB or less, within about half a per cent of the bytes' entropy, at gigabytes per
second, from an ordinary wheel. An arithmetic coder over single symbols would win nothing on it: sharing a byte already
exploits what neighbouring tokens have in common.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from dataplanes.kvcodec.errors import FrameError, FrameErrorReason

Bytes = NDArray[np.uint8]
_Readable = bytes | bytearray | memoryview


class Coder(ABC):
    """One lossless coder. Stateless between calls and safe in any number of threads.

    A frame's sections are coded in one call: each return from native code into a busy interpreter may cost a switch
    interval (5 ms) of waiting for its lock.
    """

    name: ClassVar[str]
    packs_symbols: ClassVar[bool]
    """Whether it wants as many symbols in each byte as fit, rather than one."""

    @abstractmethod
    def max_bytes(self, size: int) -> int:
        """An upper bound of what `encode` makes of a section of `size` bytes."""

    @abstractmethod
    def encode(self, sections: Sequence[Bytes]) -> list[Bytes]:
        """Code flat arrays, each on its own; any may be empty."""

    @abstractmethod
    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """The plain bytes of each section: new arrays, or views of `sections`; perhaps read-only.

        Args:
            sections: what `encode` returned.
            sizes: how many bytes each stands for.

        Raises:
            FrameError: a section does not stand for its size. Never reads outside `sections`, never allocates more
                than `sizes`.
        """


class StoredCoder(Coder):
    """One byte per symbol, as it is."""

    name = "none"
    packs_symbols = False

    def max_bytes(self, size: int) -> int:
        """Exact."""
        return size

    def encode(self, sections: Sequence[Bytes]) -> list[Bytes]:
        """Nothing to do."""
        return list(sections)

    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """Views, checked for length only."""
        for section, size in zip(sections, sizes, strict=True):
            if len(section) != size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"{len(section)} stored bytes where {size} belong")
        return [np.frombuffer(section, np.uint8) for section in sections]


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

    def encode(self, sections: Sequence[Bytes]) -> list[Bytes]:
        """One Zstandard frame per section; nothing for nothing."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            # A context belongs to one thread at a time.
            compressor = self._local.compressor = zstandard.ZstdCompressor(compression_params=self._parameters)
        filled: list[_Readable] = [section.data for section in sections if section.size]
        coded = iter(compressor.multi_compress_to_buffer(filled, threads=0) if filled else ())
        return [np.frombuffer(next(coded), np.uint8) if section.size else section for section in sections]

    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """Every section must announce the size that belongs to it."""
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        filled: list[_Readable] = [section for section, size in zip(sections, sizes, strict=True) if size]
        filled_sizes = np.array([size for size in sizes if size], np.uint64)
        try:
            for section, size in zip(sections, sizes, strict=True):
                announced = zstandard.get_frame_parameters(section).content_size if size else len(section)
                if announced != size:
                    raise FrameError(FrameErrorReason.PAYLOAD, f"coded bytes stand for {announced}, not {size}")
            plain = iter(
                decompressor.multi_decompress_to_buffer(filled, decompressed_sizes=filled_sizes.data, threads=0)
                if filled
                else ()
            )
        except zstandard.ZstdError as error:
            raise FrameError(FrameErrorReason.PAYLOAD, f"undecodable symbols: {error}") from error
        return [np.frombuffer(next(plain), np.uint8) if size else np.empty(0, np.uint8) for size in sizes]


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


class CalibratedCoder(StoredCoder):
    """Interleaved rANS with an artefact's tables: its stage codes the symbols itself, and they pass through here."""

    name = "rans"

    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """Views, of at most the announced size."""
        for section, size in zip(sections, sizes, strict=True):
            if len(section) > size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"{len(section)} coded bytes where {size} are the most")
        return [np.frombuffer(section, np.uint8) for section in sections]


STORED: Final = StoredCoder()

CODERS: Final[dict[str, Coder]] = {
    coder.name: coder for coder in (STORED, BitpackCoder(), EntropyCoder(), ZstdCoder(), CalibratedCoder())
}
"""Every coder by the name that configurations use."""
