"""Lossless coders of byte rows, found by name.

A coder sees bytes, nothing of KV. `entropy` Huffman-codes bytes that hold two or more symbols each, with Zstandard's
literal coder: a new table every 128 KiB or less, within about half a per cent of the bytes' entropy, at gigabytes per
second, from an ordinary wheel. An arithmetic coder over single symbols would win nothing on it: sharing a byte already
exploits what neighbouring tokens have in common. `splitzip` is for sections of exponents and FP8 bytes.
`lz4` and `blosc2` are there to be compared with, where their packages are installed. No strategy space offers them:
`entropy` makes quantised KV smaller than either, `splitzip` lossless KV, and neither is slower than them both ways.
"""

from __future__ import annotations

import importlib.util
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from dataplanes.kvcodec import splitzip
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


class SplitzipCoder(Coder):
    """SplitZip: see `splitzip`. Its sections are exponents or FP8 bytes; others stay as they are."""

    name = "splitzip"
    packs_symbols = False

    def max_bytes(self, size: int) -> int:
        """A section never grows."""
        return size

    def encode(self, sections: Sequence[Bytes]) -> list[Bytes]:
        """All sections in one native call."""
        return splitzip.encode_sections(sections)

    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """All sections in one native call."""
        return splitzip.decode_sections([np.frombuffer(section, np.uint8) for section in sections], sizes)


class _BlockCoder(Coder):
    """An outside library that codes one block at a time. What it cannot make smaller is stored, known by its length."""

    def max_bytes(self, size: int) -> int:
        """A section never grows."""
        return size

    def encode(self, sections: Sequence[Bytes]) -> list[Bytes]:
        """Block by block."""
        coded = [np.frombuffer(self._compress(section), np.uint8) if section.size else section for section in sections]
        return [new if new.size < old.size else old for new, old in zip(coded, sections, strict=True)]

    def decode(self, sections: Sequence[memoryview], sizes: Sequence[int]) -> list[Bytes]:
        """Block by block."""
        plain = []
        for section, size in zip(sections, sizes, strict=True):
            if len(section) > size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"{len(section)} coded bytes stand for {size}")
            is_stored = len(section) == size
            plain.append(np.frombuffer(section, np.uint8) if is_stored else self._decompress(section, size))
        return plain

    @abstractmethod
    def _compress(self, section: Bytes) -> bytes: ...

    @abstractmethod
    def _decompress(self, section: memoryview, size: int) -> Bytes:
        """Exactly `size` bytes, which are more than the section has.

        Raises:
            FrameError: it does not stand for them.
        """


class Lz4Coder(_BlockCoder):
    """Packed symbols through LZ4's block format, default speed: finds repeats only, and KV has hardly any."""

    name = "lz4"
    packs_symbols = True

    def _compress(self, section: Bytes) -> bytes:
        data: bytes = _module("lz4.block").compress(section.data, store_size=False)
        return data

    def _decompress(self, section: memoryview, size: int) -> Bytes:
        lz4 = _module("lz4.block")
        try:
            plain = lz4.decompress(section, uncompressed_size=size)
        except lz4.LZ4BlockError as error:
            raise FrameError(FrameErrorReason.PAYLOAD, f"undecodable symbols: {error}") from error
        if len(plain) != size:
            raise FrameError(FrameErrorReason.PAYLOAD, f"coded bytes stand for {len(plain)}, not {size}")
        return np.frombuffer(plain, np.uint8)


class Blosc2Coder(_BlockCoder):
    """Whole symbols through Blosc2: bits of one weight together, then Zstandard, in one thread.

    A bit-plane coder: planes that are always zero cost next to nothing, which is bit-packing to whole bits; the others
    are close to noise.
    """

    name = "blosc2"
    packs_symbols = False
    _header: ClassVar = struct.Struct("<4xiii")
    """Version and flags, then plain bytes, block bytes, coded bytes."""

    def _compress(self, section: Bytes) -> bytes:
        blosc2 = _module("blosc2")
        data: bytes = blosc2.compress2(
            section,
            typesize=1,
            codec=blosc2.Codec.ZSTD,
            clevel=5,
            nthreads=1,
            filters=[blosc2.Filter.BITSHUFFLE],
            filters_meta=[0],
        )
        return data

    def _decompress(self, section: memoryview, size: int) -> Bytes:
        if len(section) < self._header.size:
            raise FrameError(FrameErrorReason.PAYLOAD, "shorter than a Blosc2 header")
        plain_bytes, _, coded_bytes = self._header.unpack_from(section)
        if (plain_bytes, coded_bytes) != (size, len(section)):
            raise FrameError(FrameErrorReason.PAYLOAD, f"coded bytes stand for {plain_bytes}, not {size}")
        plain = np.empty(size, np.uint8)
        try:
            _module("blosc2").decompress2(section, dst=plain, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise FrameError(FrameErrorReason.PAYLOAD, f"undecodable symbols: {error}") from error
        return plain


def _module(name: str) -> ModuleType:
    """Imported when first used: Blosc2's package takes most of a second, and few configurations want it."""
    return importlib.import_module(name)


STORED: Final = StoredCoder()

_ALWAYS: Final = (STORED, BitpackCoder(), EntropyCoder(), ZstdCoder(), SplitzipCoder())
_WHERE_INSTALLED: Final = tuple(
    coder for coder in (Lz4Coder(), Blosc2Coder()) if importlib.util.find_spec(coder.name) is not None
)

CODERS: Final[dict[str, Coder]] = {coder.name: coder for coder in (*_ALWAYS, CalibratedCoder(), *_WHERE_INSTALLED)}
"""Every coder by the name that configurations use."""

OFFERED_CODERS: Final = tuple(coder.name for coder in _ALWAYS)
"""Those that a strategy space offers whatever is calibrated: the same wherever the codec runs."""

SPLITZIP: Final = SplitzipCoder.name
"""Where it fits: lossless planes and FP8 bytes."""
