"""SplitZip: short codes for the commonest exponents of a byte section, escapes for all others.

Source: SplitZip (arXiv 2605.01708): a bfloat16 element is its exponent, which a 4-bit code of the sixteen commonest
stands for, and eight bits of sign and mantissa as they are. Its FP8 e5m2 form is the same with three bits left. e4m3,
which the paper leaves out, is read likewise: its exponent and first mantissa bit make one of 32 symbols.

Two things differ from the paper. Its codebook comes from a calibration; here each section carries its own, so
that nothing has to be agreed on. Its escapes take 7 bytes (chunk, place, exponent); here a chunk of 1024 states how
many it has, in 2 bytes, and each takes 3 (place in the chunk, exponent). With a share e of escapes a bfloat16 element
takes 1.5 + 3 e + 2/1024 bytes instead of the paper's 1.5 + 7 e: at most 0.14 % more, and less from e = 0.05 % on.

```
size           field
1              form: 1 exponent bytes, 2 FP8 bytes
8              n, how many bytes the section stands for, little-endian
16             the symbols that have codes, the commonest first, smaller ones first among equals
ceil(n / 2)    the code of each byte, four bits, the first in the low half
ceil(3 n / 8)  FP8 only: sign and two last bits of each byte, three bits, the first lowest
2 per chunk    how many escapes each chunk of 1024 bytes has, little-endian
2 per escape   where in its chunk, little-endian; its code is 0
1 per escape   its symbol
```
A section takes the form that makes it smallest. One that none makes smaller stays as it is, and is known by its length.
This module is the reference; `native/splitzip.c` makes the same bytes.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplanes.kvcodec.errors import FrameError, FrameErrorReason
from dataplanes.kvcodec.native.library import Status, load_splitzip_library

Bytes = NDArray[np.uint8]

CHUNK: Final = 1024
_CODES: Final = 16
_HEAD_BYTES: Final = 1 + 8 + _CODES
_ESCAPE_BYTES: Final = 3


class Form(enum.IntEnum):
    """What a section's bytes are."""

    EXPONENTS = 1
    FP8 = 2

    @property
    def alphabet(self) -> int:
        """How many symbols there are, of which sixteen have codes."""
        return 256 if self is Form.EXPONENTS else 32

    def symbols(self, plain: Bytes) -> Bytes:
        """What codes stand for: the byte, or the five bits below its sign."""
        return plain if self is Form.EXPONENTS else ((plain >> 2) & 31).astype(np.uint8, copy=False)


def encode_sections(sections: Sequence[Bytes], *, use_native: bool = True) -> list[Bytes]:
    """Code flat uint8 sections, each on its own; a result of the same length is the section itself."""
    library = load_splitzip_library() if use_native else None
    if library is None:
        return [_encode(section) for section in sections]
    sizes = np.array([section.size for section in sections], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if len(sections) else sizes
    arena = np.empty(int(sizes.sum()), np.uint8)
    plain = [np.ascontiguousarray(section) for section in sections]
    coded_sizes = np.zeros_like(sizes)
    library.kv_splitzip_encode(
        len(sections), *_addresses(_places(plain), sizes, starts + arena.ctypes.data, coded_sizes)
    )
    return [
        section if coded_size == section.size else arena[start : start + coded_size]
        for section, start, coded_size in zip(sections, starts, coded_sizes, strict=True)
    ]


def decode_sections(sections: Sequence[Bytes], sizes: Sequence[int], *, use_native: bool = True) -> list[Bytes]:
    """Undo `encode_sections`.

    Raises:
        FrameError: a section does not stand for its size.
    """
    for section, size in zip(sections, sizes, strict=True):
        if section.size > size:
            raise FrameError(FrameErrorReason.PAYLOAD, f"{section.size} coded bytes stand for {size}")
    decoded = [
        section if section.size == size else np.empty(size, np.uint8)
        for section, size in zip(sections, sizes, strict=True)
    ]
    shorter = [index for index, size in enumerate(sizes) if sections[index].size < size]
    library = load_splitzip_library() if use_native else None
    if library is None:
        for index in shorter:
            decoded[index] = _decode(sections[index], sizes[index])
        return decoded
    coded, plain = [sections[index] for index in shorter], [decoded[index] for index in shorter]
    status = library.kv_splitzip_decode(
        len(shorter), *_addresses(_places(coded), _lengths(coded), _places(plain), _lengths(plain))
    )
    if status != Status.DONE:
        raise _damaged()
    return decoded


def _encode(plain: Bytes) -> Bytes:
    counts = np.bincount(plain, minlength=256)
    best, best_size, best_table = None, plain.size, np.empty(0, np.uint8)
    for form in Form:
        folded = np.bincount(form.symbols(np.arange(256, dtype=np.uint8)), counts, form.alphabet)
        table = np.argsort(-folded, kind="stable")[:_CODES].astype(np.uint8)
        size = _fixed_bytes(form, plain.size) + _ESCAPE_BYTES * int(plain.size - folded[table].sum())
        if size < best_size:
            best, best_size, best_table = form, size, table
    if best is None:
        return plain
    lookup = np.full(best.alphabet, _CODES, np.uint8)
    lookup[best_table] = np.arange(_CODES, dtype=np.uint8)
    symbols = best.symbols(plain)
    codes = lookup[symbols]
    escaped = np.flatnonzero(codes == _CODES)
    codes[escaped] = 0
    chunk_counts = np.bincount(escaped // CHUNK, minlength=_chunks(plain.size)).astype("<u2")
    parts = [
        np.array([best], np.uint8),
        np.array([plain.size], "<u8").view(np.uint8),
        best_table,
        _pack_nibbles(codes),
        _pack_triplets(_rests(plain)) if best is Form.FP8 else np.empty(0, np.uint8),
        chunk_counts.view(np.uint8),
        (escaped % CHUNK).astype("<u2").view(np.uint8),
        symbols[escaped],
    ]
    return np.concatenate(parts)


def _decode(coded: Bytes, size: int) -> Bytes:
    if not coded.size or coded[0] not in tuple(Form):
        raise _damaged()
    form = Form(int(coded[0]))
    fixed, chunks = _fixed_bytes(form, size), _chunks(size)
    if coded.size < fixed or int.from_bytes(coded[1:9].tobytes(), "little") != size:
        raise _damaged()
    counts = coded[fixed - 2 * chunks : fixed].copy().view("<u2").astype(np.int64)
    escapes = int(counts.sum())
    if coded.size != fixed + _ESCAPE_BYTES * escapes:
        raise _damaged()
    body = coded[_HEAD_BYTES:]
    symbols: Bytes = coded[9:_HEAD_BYTES][_unpack_nibbles(body, size)]
    places = coded[fixed : fixed + 2 * escapes].copy().view("<u2").astype(np.int64)
    escaped = coded[fixed + 2 * escapes :]
    whole = np.repeat(np.arange(chunks) * CHUNK, counts) + places
    if escapes and (places.max() >= CHUNK or whole.max() >= size or int(escaped.max()) >= form.alphabet):
        raise _damaged()
    symbols[whole] = escaped
    if form is Form.EXPONENTS:
        return symbols
    rests = _unpack_triplets(body[(size + 1) // 2 :], size)
    return (((rests >> 2) << 7) | (symbols << 2) | (rests & 3)).astype(np.uint8, copy=False)


def _rests(plain: Bytes) -> Bytes:
    """Sign and two last bits of FP8 bytes."""
    return (((plain >> 7) << 2) | (plain & 3)).astype(np.uint8, copy=False)


def _fixed_bytes(form: Form, size: int) -> int:
    """Everything but the escapes."""
    triplets = -(-3 * size // 8) if form is Form.FP8 else 0
    return _HEAD_BYTES + (size + 1) // 2 + triplets + 2 * _chunks(size)


def _chunks(size: int) -> int:
    return -(-size // CHUNK)


def _pack_nibbles(values: Bytes) -> Bytes:
    pairs = np.zeros((values.size + 1) // 2 * 2, np.uint8)
    pairs[: values.size] = values
    return (pairs[::2] | (pairs[1::2] << 4)).astype(np.uint8, copy=False)


def _unpack_nibbles(packed: Bytes, size: int) -> Bytes:
    rows = packed[: (size + 1) // 2]
    return np.stack([rows & 15, rows >> 4], axis=1).reshape(-1)[:size]


def _pack_triplets(values: Bytes) -> Bytes:
    bits = np.unpackbits(values[:, None], axis=1, bitorder="little")[:, :3]
    return np.packbits(bits.reshape(-1), bitorder="little")


def _unpack_triplets(packed: Bytes, size: int) -> Bytes:
    bits = np.unpackbits(packed[: -(-3 * size // 8)], bitorder="little")[: 3 * size].reshape(size, 3)
    return (bits[:, 0] | (bits[:, 1] << 1) | (bits[:, 2] << 2)).astype(np.uint8, copy=False)


def _places(arrays: Sequence[Bytes]) -> NDArray[np.int64]:
    return np.array([array.ctypes.data for array in arrays], np.int64)


def _lengths(arrays: Sequence[Bytes]) -> NDArray[np.int64]:
    return np.array([array.size for array in arrays], np.int64)


def _addresses(*arrays: NDArray[np.int64]) -> tuple[ctypes.c_void_p, ...]:
    return tuple(array.ctypes.data_as(ctypes.c_void_p) for array in arrays)


def _damaged() -> FrameError:
    return FrameError(FrameErrorReason.PAYLOAD, "undecodable SplitZip section")
