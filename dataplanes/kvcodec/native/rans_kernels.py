"""The native entropy coder: rows of symbols under calibrated tables."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplanes.kvcodec.native.library import CodedRowsStruct, Status, load_rans_library
from dataplanes.kvcodec.predictive.tables import PROBABILITY_BITS, PROBABILITY_TOTAL, TABLE_SYMBOLS, table_sizes

Bytes = NDArray[np.uint8]
Symbols = NDArray[np.int16]

_STATE_BYTES: Final = 128
_WORST_SYMBOL_BYTES: Final = 4
_ESCAPE: Final = 255


class RansTables:
    """Tables as the kernels read them.

    Args:
        frequencies: int32 `[tables, 256]`: of each table's symbols, summing to 2**12; the last of a row is the escape.
    """

    def __init__(self, frequencies: NDArray[np.int32]) -> None:
        self.escapes = np.asarray(table_sizes(frequencies) - 1, np.uint8)
        wide = frequencies.astype(np.uint64)
        starts = wide.cumsum(1) - wide
        # floor(x / f) for x < 2**31 is x * ceil(2**(31 + s) / f) >> (31 + s), where 2**s is the next power of two;
        # f = 1 has no such reciprocal in 32 bits, and takes what is missing from the bias.
        shift = np.ceil(np.log2(np.maximum(wide, 1))).astype(np.uint64)
        one, divisor = wide <= 1, np.maximum(wide, 1)
        reciprocal = ((np.uint64(1) << (shift + np.uint64(31))) + divisor - np.uint64(1)) // divisor
        reciprocal = np.where(one, np.uint64(2**32 - 1), reciprocal)
        bias = starts + np.where(one, np.uint64(PROBABILITY_TOTAL - 1), np.uint64(0))
        complement = np.uint64(PROBABILITY_TOTAL) - divisor
        packed = bias | complement << np.uint64(13) | np.where(one, np.uint64(0), shift - np.uint64(1)) << np.uint64(25)
        self.encoding = np.ascontiguousarray(np.stack([reciprocal, packed], axis=-1).astype(np.uint32))
        self.decoding = np.empty((len(frequencies), PROBABILITY_TOTAL), np.uint32)
        for table, row in enumerate(frequencies):
            symbols = np.repeat(np.arange(TABLE_SYMBOLS), row)
            offset = np.arange(PROBABILITY_TOTAL) - starts[table].astype(np.int64)[symbols]
            shown = np.where(symbols == self.escapes[table], _ESCAPE, symbols)
            self.decoding[table] = shown << 24 | offset << PROBABILITY_BITS | (row[symbols] - 1)


class RansCoder:
    """Rows of several kinds under shared tables; safe in any number of threads.

    Args:
        tables: what codes them.
        lengths: int32 `[kinds]`: symbols of a row, multiples of 32.
        chosen: uint8 `[kinds, longest]`: the table of each symbol.
    """

    def __init__(self, tables: RansTables, lengths: NDArray[np.int32], chosen: NDArray[np.uint8]) -> None:
        self._tables = tables
        self._lengths = np.ascontiguousarray(lengths)
        self._chosen = np.ascontiguousarray(chosen)
        self._escapes = np.ascontiguousarray(tables.escapes[self._chosen])

    def symbol_count(self, kinds: NDArray[np.int32]) -> int:
        """Symbols of rows of these kinds."""
        return int(self._lengths[kinds].sum())

    def encode(self, symbols: Symbols, kinds: NDArray[np.int32]) -> Bytes:
        """The bytes of rows of these kinds, one behind another."""
        out = np.empty(_STATE_BYTES + symbols.size * _WORST_SYMBOL_BYTES, np.uint8)
        rows = self._rows(kinds)
        size = _library().kv_rans_encode(
            ctypes.byref(rows), symbols.ctypes.data, symbols.size, out.ctypes.data, out.size
        )
        return out[out.size - size :]

    def decode(self, coded: Bytes, kinds: NDArray[np.int32]) -> Symbols | None:
        """Undo `encode`; None if the bytes are not what it makes."""
        symbols = np.empty(self.symbol_count(kinds), np.int16)
        rows = self._rows(kinds)
        status = _library().kv_rans_decode(ctypes.byref(rows), coded.ctypes.data, coded.size, symbols.ctypes.data)
        return symbols if Status(status) is Status.DONE else None

    def _rows(self, kinds: NDArray[np.int32]) -> CodedRowsStruct:
        """Points into `kinds`, which the caller keeps."""
        return CodedRowsStruct(
            rows=kinds.size,
            kinds=kinds.ctypes.data,
            lengths=self._lengths.ctypes.data,
            longest=self._chosen.shape[1],
            tables=self._chosen.ctypes.data,
            escapes=self._escapes.ctypes.data,
            decoding=self._tables.decoding.ctypes.data,
            encoding=self._tables.encoding.ctypes.data,
        )


def _library() -> ctypes.CDLL:
    library = load_rans_library()
    assert library is not None
    return library
