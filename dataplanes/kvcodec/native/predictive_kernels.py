"""Native kernels of the layer-predictive transform codec over the planes of a chunk."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.layout import KVDtype
from dataplanes.kvcodec.native.library import (
    LayersStruct,
    PredictorStruct,
    Status,
    TablesStruct,
    load_predictive_library,
)
from dataplanes.kvcodec.predictive.artefact import GRANULE, PredictiveArtefact
from dataplanes.kvcodec.predictive.place import Place, position_classes
from dataplanes.kvcodec.predictive.rotary import angles
from dataplanes.kvcodec.predictive.tables import PROBABILITY_TOTAL, table_sizes

Bytes = NDArray[np.uint8]
Symbols = NDArray[np.int16]

_DTYPES = {KVDtype.BFLOAT16: 0, KVDtype.FLOAT16: 1, KVDtype.FLOAT32: 2}
_HINTS = 128
_STATE_BYTES = 32
_WORST_SYMBOL_BYTES = 8


class PackedArtefact:
    """An artefact's weights and tables as the kernels read them; shared by all steps.

    Args:
        artefact: kept alive with it.
    """

    def __init__(self, artefact: PredictiveArtefact) -> None:
        self.artefact = artefact
        self.narrow = _panels(artefact.narrow)
        self.widen = _panels(artefact.widen)
        self.analysis = _panels(artefact.analysis)
        self.synthesis = _interleaved(artefact.synthesis)
        self.mean = artefact.mean.contiguous()
        self.bands = np.array(artefact.bands, np.int64)
        self.refinements = np.array(artefact.refinements, np.float32)
        frequencies = artefact.frequencies.numpy()
        self.counts = np.ascontiguousarray(table_sizes(frequencies))
        # What follows an escape is never looked at; the last sum bounds every search.
        self.starts = np.zeros((len(frequencies), frequencies.shape[1] + 1), np.uint32)
        self.starts[:, 1:] = frequencies.cumsum(1)
        slots = np.arange(_HINTS) * (PROBABILITY_TOTAL // _HINTS)
        self.hints = np.stack([np.searchsorted(row[1:], slots, side="right") for row in self.starts]).astype(np.uint8)


class PredictiveKernel:
    """One artefact at one step; safe in any number of threads.

    Args:
        packed: the artefact.
        step: one of its steps.
    """

    def __init__(self, packed: PackedArtefact, step: float) -> None:
        artefact = packed.artefact
        index = artefact.steps.index(step)
        self._packed = packed
        self._step = step
        self._classes = artefact.classes[index].contiguous()
        self._ranks = artefact.ranks[index].contiguous()
        self._class_symbols = self._ranks.sum(1)
        self._tables = TablesStruct(
            classes=self._classes.data_ptr(),
            counts=packed.counts.ctypes.data,
            starts=packed.starts.ctypes.data,
            hints=packed.hints.ctypes.data,
        )

    def symbol_count(self, place: Place, tokens: int) -> int:
        """Symbols of a chunk."""
        return int(self._class_symbols[position_classes(place, tokens, self._packed.artefact.bands)].sum())

    def quantise(self, chunk: JointPlanes, place: Place) -> Symbols | None:
        """Symbols `[layer][token][rank of both]`, flat; None if a value cannot be expressed."""
        symbols = np.empty(self.symbol_count(place, chunk.tokens), np.int16)
        with self._predictor(place, chunk.tokens) as predictor:
            status = Status(
                _library().kv_predictive_encode(
                    ctypes.byref(chunk.struct), ctypes.byref(predictor), symbols.ctypes.data
                )
            )
        _check_memory(status)
        return symbols if status is Status.DONE else None

    def dequantise(self, symbols: Symbols, chunk: JointPlanes, place: Place) -> None:
        """Write what the symbols stand for into the planes."""
        with self._predictor(place, chunk.tokens) as predictor:
            _check_memory(
                Status(
                    _library().kv_predictive_decode(
                        ctypes.byref(chunk.struct), ctypes.byref(predictor), symbols.ctypes.data
                    )
                )
            )

    def code(self, symbols: Symbols, tokens: int, place: Place) -> Bytes:
        """The entropy-coded bytes of symbols."""
        # The kernel wants room for the worst layer of a token before it starts on it.
        room = self._packed.artefact.width + symbols.size
        out = np.empty(2 * _STATE_BYTES + room * _WORST_SYMBOL_BYTES, np.uint8)
        with self._predictor(place, 0) as predictor:
            size = _library().kv_rans_encode(
                ctypes.byref(predictor),
                ctypes.byref(self._tables),
                tokens,
                symbols.ctypes.data,
                out.ctypes.data,
                out.size,
            )
        assert size >= 0, "the worst case was too small"
        return out[out.size - size :]

    def uncode(self, coded: Bytes, tokens: int, place: Place) -> Symbols | None:
        """Undo `code`; None if the bytes are not what it makes."""
        symbols = np.empty(self.symbol_count(place, tokens), np.int16)
        with self._predictor(place, 0) as predictor:
            status = Status(
                _library().kv_rans_decode(
                    ctypes.byref(predictor),
                    ctypes.byref(self._tables),
                    tokens,
                    coded.ctypes.data,
                    coded.size,
                    symbols.ctypes.data,
                )
            )
        return symbols if status is Status.DONE else None

    def _predictor(self, place: Place, tokens: int) -> _Predictor:
        return _Predictor(self._packed, self._ranks, self._step, place, tokens)


class JointPlanes:
    """The key and value planes of every layer where they lie.

    Args:
        keys, values: `[tokens, heads, dim]` by layer, on the host, whole tokens contiguous.
        rows: which tokens, int64; None for all.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Tensor | None) -> None:
        self._kept = (keys, values, rows)
        self._key_addresses = np.array([plane.data_ptr() for plane in keys], np.int64)
        self._value_addresses = np.array([plane.data_ptr() for plane in values], np.int64)
        self._key_strides = np.array([plane.stride(0) for plane in keys], np.int64)
        self._value_strides = np.array([plane.stride(0) for plane in values], np.int64)
        self.tokens = int(keys[0].shape[0] if rows is None else rows.numel())
        self.struct = LayersStruct(
            key_addresses=self._key_addresses.ctypes.data,
            value_addresses=self._value_addresses.ctypes.data,
            key_strides=self._key_strides.ctypes.data,
            value_strides=self._value_strides.ctypes.data,
            index=None if rows is None else rows.data_ptr(),
            tokens=self.tokens,
            heads=keys[0].shape[1],
            key_dim=keys[0].shape[2],
            value_dim=values[0].shape[2],
            dtype=_DTYPES[KVDtype.of(keys[0].dtype)],
        )


class _Predictor:
    """A `kv_predictor` for one call, with the arrays that it points to."""

    def __init__(self, packed: PackedArtefact, ranks: Tensor, step: float, place: Place, tokens: int) -> None:
        artefact = packed.artefact
        self._kept = (packed, ranks, *angles(artefact.rotary, place.first_token, tokens))
        self._struct = PredictorStruct(
            layers=artefact.layers,
            width=artefact.width,
            max_rank=artefact.analysis.shape[-1],
            depth=artefact.depth,
            bottleneck=artefact.widen.shape[1],
            narrow=packed.narrow.data_ptr(),
            widen=packed.widen.data_ptr(),
            analysis=packed.analysis.data_ptr(),
            synthesis=packed.synthesis.data_ptr(),
            mean=packed.mean.data_ptr(),
            ranks=ranks.data_ptr(),
            rotary_dim=artefact.rotary.dim,
            cosines=self._kept[2].data_ptr(),
            sines=self._kept[3].data_ptr(),
            first_token=place.first_token,
            request_tokens=place.request_tokens,
            band_count=len(artefact.bands),
            bands=packed.bands.ctypes.data,
            refinements=packed.refinements.ctypes.data,
            step=step,
            dead_zone=artefact.dead_zone,
            shrink=artefact.shrink,
        )

    def __enter__(self) -> PredictorStruct:
        return self._struct

    def __exit__(self, *_: object) -> None:
        """Nothing: the block keeps the arrays alive."""


def _panels(weights: Tensor) -> Tensor:
    """`[..., depth, columns]` -> `[..., columns / 32, depth, 32]`, each run of 32 interleaved."""
    split = _interleaved(weights).view(*weights.shape[:-1], weights.shape[-1] // GRANULE, GRANULE)
    return split.transpose(-2, -3).contiguous()


def _interleaved(weights: Tensor) -> Tensor:
    """Columns 0 1 2 ... 31 of every run of 32 -> 0 16 1 17 ... 15 31."""
    halves = weights.reshape(*weights.shape[:-1], weights.shape[-1] // GRANULE, 2, GRANULE // 2)
    return halves.transpose(-1, -2).contiguous().view(weights.shape)


def _check_memory(status: Status) -> None:
    if status is Status.NO_MEMORY:
        raise MemoryError("no memory for a codec kernel's scratch")


def _library() -> ctypes.CDLL:
    library = load_predictive_library()
    assert library is not None
    return library
