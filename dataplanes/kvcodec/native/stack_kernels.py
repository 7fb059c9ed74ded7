"""Native kernels over one stack: number formats with the Hadamard transform fused, and the lossless byte split."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.layout import KVDtype, Plane
from dataplanes.kvcodec.native.library import (
    CodebookStruct,
    FloatFormatStruct,
    LevelsStruct,
    PlanesStruct,
    RotationStruct,
    Status,
    load_codebook_library,
    load_library,
)
from dataplanes.kvcodec.parameters import Axis, LevelsParameters
from dataplanes.numerics import absmax, fp8, hadamard, lloyd_max, nvfp4
from dataplanes.numerics.levels import LARGEST_OFFSET_STEPS, SMALLEST_STEP, inverse_cells
from dataplanes.numerics.nvfp4 import BlockRule

Bytes = NDArray[np.uint8]

_DTYPES = {KVDtype.BFLOAT16: 0, KVDtype.FLOAT16: 1, KVDtype.FLOAT32: 2}


def is_available(planes: Sequence[Tensor]) -> bool:
    """Whether the kernels can be loaded and all planes lie on the host with whole tokens contiguous."""
    is_loaded = load_library() is not None and load_codebook_library() is not None
    return is_loaded and all(plane.is_cpu and has_whole_tokens(plane) for plane in planes)


class StackKernel(ABC):
    """One number format over planes of one shape; safe in any number of threads.

    Args:
        plane: shape of the planes.
        seed: the Hadamard transform's seed; None for no transform.
        per_byte: symbols that share a byte.
    """

    def __init__(self, plane: Plane, seed: int | None, per_byte: int) -> None:
        self._per_byte = per_byte
        block = 1 if seed is None else hadamard.block_size(plane.head_dim)
        # Kept: the structure holds its address.
        self._signs = np.ones(block, np.float32)
        if seed is not None:
            self._signs = hadamard.signs(plane.head_dim, seed, torch.device("cpu")).numpy()
        self._rotation = RotationStruct(block=block, signs=self._signs.ctypes.data, norm=hadamard.norm(block))

    @abstractmethod
    def encode(
        self, planes: Sequence[Tensor], rows: Tensor | None, first_token: int, sizes: Sequence[int]
    ) -> list[Bytes] | None:
        """Quantise and pack tokens; None if a value cannot be expressed.

        Args:
            planes: `[tokens, heads, head_dim]` each, at least one token; see `is_available`.
            rows: which of the planes' tokens, int64 and inside; None for all.
            first_token: position of the first token in the request.
            sizes: bytes of every section: packed symbols, then side data as the reference quantiser orders them.
        """

    @abstractmethod
    def decode(
        self, sections: Sequence[Bytes], planes: Sequence[Tensor], rows: Tensor | None, first_token: int
    ) -> None:
        """Undo `encode` into `planes`. The caller has checked every section's size."""


class LevelsKernel(StackKernel):
    """Integer levels."""

    def __init__(self, plane: Plane, parameters: LevelsParameters, seed: int | None, per_byte: int) -> None:
        super().__init__(plane, seed, per_byte)
        is_channel = parameters.axis is Axis.CHANNEL
        self._spans_heads = parameters.axis is Axis.ALL_HEADS
        self._fields = {
            "group": parameters.group if is_channel else parameters.channels_per_group(plane),
            "channel_axis": int(is_channel),
            "levels": parameters.levels,
            "per_byte": per_byte,
            "inverse_cells": inverse_cells(parameters.levels),
            "smallest_step": SMALLEST_STEP,
            "inverse_largest_offset": 1.0 / LARGEST_OFFSET_STEPS,
        }

    def encode(
        self, planes: Sequence[Tensor], rows: Tensor | None, first_token: int, sizes: Sequence[int]
    ) -> list[Bytes] | None:
        """See the base class."""
        sections = [np.empty(size, np.uint8) for size in sizes]
        status = _call(_library().kv_levels_encode, self._viewed(planes), rows, self._struct(first_token), *sections)
        return sections if status is Status.DONE else None

    def decode(
        self, sections: Sequence[Bytes], planes: Sequence[Tensor], rows: Tensor | None, first_token: int
    ) -> None:
        """See the base class."""
        _call(_library().kv_levels_decode, self._viewed(planes), rows, self._struct(first_token), *sections)

    def _viewed(self, planes: Sequence[Tensor]) -> Sequence[Tensor]:
        """As the kernel wants them, whose groups lie within a head: where they span heads, those are one."""
        if not self._spans_heads:
            return planes
        channels = planes[0].shape[1] * planes[0].shape[2]
        return [
            plane.as_strided((plane.shape[0], 1, channels), (plane.stride(0), channels, 1), plane.storage_offset())
            for plane in planes
        ]

    def _struct(self, first_token: int) -> LevelsStruct:
        return LevelsStruct(rotation=self._rotation, first_token=first_token, **self._fields)


class FloatFormatKernel(StackKernel):
    """FP8 e4m3, or NVFP4 with a rule for its blocks."""

    def __init__(self, plane: Plane, seed: int | None, per_byte: int, *, nvfp4_rule: BlockRule | None) -> None:
        super().__init__(plane, seed, per_byte)
        self._is_nvfp4 = nvfp4_rule is not None
        largest = fp8.LARGEST if nvfp4_rule is None else nvfp4.LARGEST * nvfp4.largest_block_scale(nvfp4_rule)
        self._e4m3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
        self._e2m1 = nvfp4.code_values(torch.device("cpu")).numpy()
        self._struct = FloatFormatStruct(
            rotation=self._rotation,
            is_nvfp4=int(self._is_nvfp4),
            is_four_over_six=int(nvfp4_rule is BlockRule.FOUR_OVER_SIX),
            per_byte=per_byte,
            e4m3_values=self._e4m3.ctypes.data,
            e2m1_values=self._e2m1.ctypes.data,
            scale_per_peak=fp8.scale_per_peak(largest),
            smallest_scale=fp8.SMALLEST_SCALE,
        )

    def encode(
        self, planes: Sequence[Tensor], rows: Tensor | None, first_token: int, sizes: Sequence[int]
    ) -> list[Bytes] | None:
        """See the base class."""
        sections = [np.empty(size, np.uint8) for size in sizes]
        status = _call(_library().kv_float_encode, planes, rows, self._struct, *self._arguments(sections))
        return sections if status is Status.DONE else None

    def decode(
        self, sections: Sequence[Bytes], planes: Sequence[Tensor], rows: Tensor | None, first_token: int
    ) -> None:
        """See the base class."""
        _call(_library().kv_float_decode, planes, rows, self._struct, *self._arguments(sections))

    def _arguments(self, sections: Sequence[Bytes]) -> tuple[Bytes, ...]:
        """Codes, low and high bytes of scales, block scales: of which FP8 has none, and its kernel does not look."""
        return sections[0], sections[1], sections[2], sections[3 if self._is_nvfp4 else 0]


class CodebookKernel(StackKernel):
    """Symmetric levels of all heads of a token, or a Gaussian codebook per head vector."""

    def __init__(self, plane: Plane, levels: int, seed: int | None, per_byte: int, *, is_absmax: bool) -> None:
        super().__init__(plane, seed, per_byte)
        entries = np.zeros(1, np.float32) if is_absmax else np.array(lloyd_max.codebook(levels), np.float32)
        # Kept: the structure holds their addresses.
        self._entries, self._edges = entries, (entries[1:] + entries[:-1]) / np.float32(2)
        self._struct = CodebookStruct(
            rotation=self._rotation,
            is_absmax=int(is_absmax),
            alphabet=absmax.alphabet(levels) if is_absmax else levels,
            per_byte=per_byte,
            entries=self._entries.ctypes.data,
            edges=self._edges.ctypes.data,
            inverse_last=1.0 / absmax.largest_symbol(levels) if is_absmax else 0.0,
            inverse_dim=1.0 / plane.head_dim,
            smallest_scale=SMALLEST_STEP if is_absmax else lloyd_max.SMALLEST_SCALE,
            smallest_peak=lloyd_max.SMALLEST_PEAK,
        )

    def encode(
        self, planes: Sequence[Tensor], rows: Tensor | None, first_token: int, sizes: Sequence[int]
    ) -> list[Bytes] | None:
        """See the base class."""
        sections = [np.empty(size, np.uint8) for size in sizes]
        status = _call(_codebook_library().kv_codebook_encode, planes, rows, self._struct, *sections)
        return sections if status is Status.DONE else None

    def decode(
        self, sections: Sequence[Bytes], planes: Sequence[Tensor], rows: Tensor | None, first_token: int
    ) -> None:
        """See the base class."""
        _call(_codebook_library().kv_codebook_decode, planes, rows, self._struct, *sections)


def split_bfloat16(planes: Sequence[Tensor], rows: Tensor | None) -> tuple[Bytes, Bytes]:
    """Exponents, then signs and mantissas, of bfloat16 planes (or of some of their tokens); flat."""
    argument = _PlanesArgument(planes, rows)
    size = len(planes) * argument.struct.tokens * planes[0].shape[1] * planes[0].shape[2]
    exponents, rest = np.empty(size, np.uint8), np.empty(size, np.uint8)
    _library().kv_split_bfloat16(ctypes.byref(argument.struct), exponents.ctypes.data, rest.ctypes.data)
    return exponents, rest


def join_bfloat16(exponents: Bytes, rest: Bytes, planes: Sequence[Tensor], rows: Tensor | None) -> None:
    """Undo `split_bfloat16` into `planes`."""
    argument = _PlanesArgument(planes, rows)
    _library().kv_join_bfloat16(ctypes.byref(argument.struct), exponents.ctypes.data, rest.ctypes.data)


class _PlanesArgument:
    """A `kv_planes` with the arrays that it points to."""

    def __init__(self, planes: Sequence[Tensor], rows: Tensor | None) -> None:
        tokens, heads, head_dim = planes[0].shape
        self._rows = rows
        self._addresses = np.array([plane.data_ptr() for plane in planes], np.int64)
        self._strides = np.array([plane.stride(0) for plane in planes], np.int64)
        self.struct = PlanesStruct(
            addresses=self._addresses.ctypes.data,
            strides=self._strides.ctypes.data,
            index=None if rows is None else rows.data_ptr(),
            planes=len(planes),
            tokens=tokens if rows is None else rows.numel(),
            heads=heads,
            head_dim=head_dim,
            dtype=_DTYPES[KVDtype.of(planes[0].dtype)],
        )


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None
    return library


def _codebook_library() -> ctypes.CDLL:
    library = load_codebook_library()
    assert library is not None
    return library


def _call(
    function: Callable[..., int],
    planes: Sequence[Tensor],
    rows: Tensor | None,
    struct: ctypes.Structure,
    *arrays: Bytes,
) -> Status:
    argument = _PlanesArgument(planes, rows)
    addresses = (array.ctypes.data for array in arrays)
    status = Status(function(ctypes.byref(argument.struct), ctypes.byref(struct), *addresses))
    if status is Status.NO_MEMORY:
        raise MemoryError("no memory for a codec kernel's scratch")
    return status


def has_whole_tokens(plane: Tensor) -> bool:
    """Whether heads and head_dim are contiguous within a token."""
    _, heads, head_dim = plane.shape
    return (head_dim == 1 or plane.stride(2) == 1) and (heads == 1 or plane.stride(1) == head_dim)
