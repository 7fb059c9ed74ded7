"""Native kernels of the layer-predictive transform codec over the planes of a chunk."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.layout import KVDtype
from dataplanes.kvcodec.native.library import (
    LayersStruct,
    PredictorStruct,
    Status,
    load_predictive_library,
)
from dataplanes.kvcodec.native.rans_kernels import RansCoder, RansTables
from dataplanes.kvcodec.predictive.artefact import GRANULE, PredictiveArtefact
from dataplanes.kvcodec.predictive.place import Place, position_classes
from dataplanes.kvcodec.predictive.predictor import column_units, largest_factor
from dataplanes.kvcodec.predictive.rotary import angles

Bytes = NDArray[np.uint8]
Symbols = NDArray[np.int16]

_DTYPES = {KVDtype.BFLOAT16: 0, KVDtype.FLOAT16: 1, KVDtype.FLOAT32: 2}
_PAIR = 2


class PackedArtefact:
    """An artefact's weights and tables as the kernels read them; shared by all steps.

    Args:
        artefact: kept alive with it.
    """

    def __init__(self, artefact: PredictiveArtefact) -> None:
        self.artefact = artefact
        self.gain = artefact.gain.contiguous()
        self.narrow = _integer_panels(artefact.narrow)
        self.narrow_scale = artefact.narrow_scale.contiguous()
        self.widen = _integer_panels(artefact.widen)
        self.widen_scale = artefact.widen_scale.contiguous()
        analysis = artefact.analysis.float()
        self.largest_input = largest_factor(artefact.width)
        # Weighted like this, all elements' rounding errors weigh alike.
        self.weight = analysis.norm(dim=2).contiguous()
        weighted = analysis / torch.where(self.weight > 0, self.weight, 1)[..., None]
        scale = column_units(weighted, self.largest_input)
        self.analysis = _integer_panels((weighted / scale).round().to(torch.int16))
        self.analysis_scale = scale.squeeze(1).contiguous()
        self.synthesis = _interleaved(artefact.synthesis)
        self.mean = artefact.mean.contiguous()
        self.bands = np.array(artefact.bands, np.int64)
        self.refinements = np.array(artefact.refinements, np.float32)
        self.tables = RansTables(artefact.frequencies.numpy())


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
        self._ranks = artefact.ranks[index].contiguous()
        self._coder = RansCoder(
            packed.tables, self._ranks.flatten().numpy(), artefact.classes[index].flatten(0, 1).numpy()
        )

    def quantise(self, chunk: JointPlanes, place: Place) -> Symbols | None:
        """Symbols `[layer][token][rank of both]`, flat; None if a value cannot be expressed."""
        symbols = np.empty(self._coder.symbol_count(self._kinds(place, chunk.tokens)), np.int16)
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
        return self._coder.encode(symbols, self._kinds(place, tokens))

    def uncode(self, coded: Bytes, tokens: int, place: Place) -> Symbols | None:
        """Undo `code`; None if the bytes are not what it makes."""
        return self._coder.decode(coded, self._kinds(place, tokens))

    def _kinds(self, place: Place, tokens: int) -> NDArray[np.int32]:
        """Of each row of symbols, `[layer * tokens]`: its position class and layer."""
        artefact = self._packed.artefact
        classes = np.asarray(position_classes(place, tokens, artefact.bands), np.int32)
        layers = np.arange(artefact.layers, dtype=np.int32)
        return np.ascontiguousarray((classes[None, :] * artefact.layers + layers[:, None]).ravel())

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
            largest=artefact.largest,
            gain=packed.gain.data_ptr(),
            narrow=packed.narrow.data_ptr(),
            narrow_scale=packed.narrow_scale.data_ptr(),
            widen=packed.widen.data_ptr(),
            widen_scale=packed.widen_scale.data_ptr(),
            largest_input=packed.largest_input,
            weight=packed.weight.data_ptr(),
            analysis=packed.analysis.data_ptr(),
            analysis_scale=packed.analysis_scale.data_ptr(),
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


def _integer_panels(weights: Tensor) -> Tensor:
    """`[..., depth, columns]` -> `[..., columns / 32, depth / 2, 32, 2]`."""
    *lead, depth, columns = weights.shape
    split = weights.view(*lead, depth // _PAIR, _PAIR, columns // GRANULE, GRANULE)
    return split.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).contiguous()


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
