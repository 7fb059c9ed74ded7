"""Native kernels over one stack: integer levels with the Hadamard transform fused, and the lossless byte split."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.layout import KVDtype, Plane
from dataplanes.kvcodec.native.library import LevelsStruct, PlanesStruct, Status, load_library
from dataplanes.kvcodec.parameters import Axis, LevelsParameters
from dataplanes.numerics import hadamard, packing
from dataplanes.numerics.levels import LARGEST_OFFSET_STEPS, SMALLEST_STEP, inverse_cells

Bytes = NDArray[np.uint8]

_DTYPES = {KVDtype.BFLOAT16: 0, KVDtype.FLOAT16: 1, KVDtype.FLOAT32: 2}


@dataclass(frozen=True, slots=True)
class CodedLevels:
    """Packed symbols `[planes, rows, channels]` and side data as the kernels lay them out, all flat."""

    packed: Bytes
    steps: NDArray[np.uint16]
    offsets: NDArray[np.int16]


def is_available(planes: Sequence[Tensor]) -> bool:
    """Whether the kernels can be loaded and all planes lie on the host with whole tokens contiguous."""
    return load_library() is not None and all(plane.is_cpu and _has_whole_tokens(plane) for plane in planes)


class LevelsKernel:
    """Integer levels of one kind of plane.

    Args:
        plane: shape of the stack's planes.
        parameters: their levels.
        seed: the Hadamard transform's seed; None for no transform.
    """

    def __init__(self, plane: Plane, parameters: LevelsParameters, seed: int | None) -> None:
        block = 1 if seed is None else hadamard.block_size(plane.head_dim)
        # Kept: the structure holds its address.
        self._signs = np.ones(block, np.float32)
        if seed is not None:
            self._signs = hadamard.signs(plane.head_dim, seed, torch.device("cpu")).numpy()
        is_channel = parameters.axis is Axis.CHANNEL
        self._group = parameters.group if is_channel else parameters.channels_per_group(plane.head_dim)
        self._fields = {
            "group": self._group,
            "channel_axis": int(is_channel),
            "levels": parameters.levels,
            "block": block,
            "signs": self._signs.ctypes.data,
            "norm": hadamard.norm(block),
            "inverse_cells": inverse_cells(parameters.levels),
            "smallest_step": SMALLEST_STEP,
            "inverse_largest_offset": 1.0 / LARGEST_OFFSET_STEPS,
        }
        self._levels = parameters.levels

    def encode(self, planes: Sequence[Tensor], first_token: int, packs: bool, side_elements: int) -> CodedLevels | None:
        """Quantise and pack planes `[tokens, heads, head_dim]`; None if a value cannot be expressed.

        Args:
            planes: at least one token each; see `is_available`.
            first_token: position of the first token in the request.
            packs: several symbols to a byte, or one.
            side_elements: how many steps the stack has.
        """
        per_byte = packing.symbols_per_byte(self._levels) if packs else 1
        tokens, heads, head_dim = planes[0].shape
        coded = CodedLevels(
            np.empty(len(planes) * -(-tokens // per_byte) * heads * head_dim, np.uint8),
            np.empty(side_elements, np.uint16),
            np.empty(side_elements, np.int16),
        )
        status = _checked(
            _library().kv_levels_encode(
                ctypes.byref(_PlanesArgument(planes).struct),
                ctypes.byref(self._struct(first_token, per_byte)),
                coded.packed.ctypes.data,
                coded.steps.ctypes.data,
                coded.offsets.ctypes.data,
            )
        )
        return coded if status is Status.DONE else None

    def decode(self, coded: CodedLevels, planes: Sequence[Tensor], first_token: int, packs: bool) -> None:
        """Undo `encode` into `planes`. The caller has checked every array's size."""
        per_byte = packing.symbols_per_byte(self._levels) if packs else 1
        _checked(
            _library().kv_levels_decode(
                ctypes.byref(_PlanesArgument(planes).struct),
                ctypes.byref(self._struct(first_token, per_byte)),
                coded.packed.ctypes.data,
                coded.steps.ctypes.data,
                coded.offsets.ctypes.data,
            )
        )

    def _struct(self, first_token: int, per_byte: int) -> LevelsStruct:
        return LevelsStruct(first_token=first_token, per_byte=per_byte, **self._fields)


def split_bfloat16(planes: Sequence[Tensor]) -> tuple[Bytes, Bytes]:
    """Exponents, then signs and mantissas, of bfloat16 planes; flat."""
    size = len(planes) * planes[0].numel()
    exponents, rest = np.empty(size, np.uint8), np.empty(size, np.uint8)
    argument = _PlanesArgument(planes)
    _library().kv_split_bfloat16(ctypes.byref(argument.struct), exponents.ctypes.data, rest.ctypes.data)
    return exponents, rest


def join_bfloat16(exponents: Bytes, rest: Bytes, planes: Sequence[Tensor]) -> None:
    """Undo `split_bfloat16` into `planes`."""
    argument = _PlanesArgument(planes)
    _library().kv_join_bfloat16(ctypes.byref(argument.struct), exponents.ctypes.data, rest.ctypes.data)


class _PlanesArgument:
    """A `kv_planes` with the arrays that it points to."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        tokens, heads, head_dim = planes[0].shape
        self._addresses = np.array([plane.data_ptr() for plane in planes], np.int64)
        self._strides = np.array([plane.stride(0) for plane in planes], np.int64)
        self.struct = PlanesStruct(
            addresses=self._addresses.ctypes.data,
            strides=self._strides.ctypes.data,
            index=None,
            planes=len(planes),
            tokens=tokens,
            heads=heads,
            head_dim=head_dim,
            dtype=_DTYPES[KVDtype.of(planes[0].dtype)],
        )


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None
    return library


def _checked(status: int) -> Status:
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory for a codec kernel's scratch")
    return Status(status)


def _has_whole_tokens(plane: Tensor) -> bool:
    _, heads, head_dim = plane.shape
    return (head_dim == 1 or plane.stride(2) == 1) and (heads == 1 or plane.stride(1) == head_dim)
