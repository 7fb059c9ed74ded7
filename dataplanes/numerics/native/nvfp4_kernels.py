"""NVFP4 of CPU tensors by the kernels of `nvfp4.c`: one pass over memory, without the interpreter lock."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from dataplanes.native_build import SAME_AS_REFERENCE, load_compiled
from dataplanes.numerics.nvfp4 import BLOCK, BlockRule

_DTYPES: Final = {torch.bfloat16: 0, torch.float32: 1}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None (logged once, with the reason) where they cannot be built."""
    library = load_compiled(Path(__file__).with_name("nvfp4.c"), SAME_AS_REFERENCE)
    if library is None:
        return None
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures = {
        "nvfp4_peaks": (pointer, integer, integer, integer, pointer),
        "nvfp4_encode": (pointer, integer, integer, integer, pointer, integer, integer, real, pointer, pointer),
        "nvfp4_decode": (pointer, pointer, integer, integer, pointer, integer, real, integer, pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def takes(x: Tensor) -> bool:
    """Whether the kernels quantise such a tensor; blocks must be whole."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and x.shape[-1] % BLOCK == 0 and load_library() is not None


def gives(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels dequantise to such a tensor."""
    return device.type == "cpu" and dtype in _DTYPES and load_library() is not None


def peaks(rows: Tensor, *, per_row: bool) -> Tensor:
    """Largest magnitude, float32 `[rows, 1]` or `[1]`; NaN where an element is.

    Args:
        rows: contiguous `[rows, n]` that `takes` accepts.
        per_row: one for each row.
    """
    count, length = rows.shape if per_row else (1, rows.numel())
    found = torch.empty((count, 1) if per_row else 1, dtype=torch.float32)
    _library().nvfp4_peaks(rows.data_ptr(), _DTYPES[rows.dtype], count, length, found.data_ptr())
    return found


def encode(rows: Tensor, peak: Tensor, rule: BlockRule, largest_scale: float) -> tuple[Tensor, Tensor]:
    """The bits of `nvfp4.quantise_by_peak`, packed: uint8 `[rows, n / 2]` and `[rows, n / 16]`.

    Args:
        rows: contiguous `[rows, n]` that `takes` accepts.
        peak: contiguous float32 `[1]` or `[rows, 1]`.
        rule: where a block's peak lands.
        largest_scale: what a block scale reaches.
    """
    count, length = rows.shape
    packed = torch.empty(count, length // 2, dtype=torch.uint8)
    block_scales = torch.empty(count, length // BLOCK, dtype=torch.uint8)
    _library().nvfp4_encode(
        rows.data_ptr(),
        _DTYPES[rows.dtype],
        count,
        length,
        peak.data_ptr(),
        _stride(peak),
        rule is BlockRule.FOUR_OVER_SIX,
        largest_scale,
        packed.data_ptr(),
        block_scales.data_ptr(),
    )
    return packed, block_scales


def decode(packed: Tensor, block_scales: Tensor, peak: Tensor | None, largest_scale: float, out: Tensor) -> None:
    """Write the bits of `nvfp4.dequantise_by_peak`, rounded to the type of `out`.

    Args:
        packed: contiguous uint8 `[rows, n / 2]`.
        block_scales: contiguous uint8 `[rows, n / 16]`.
        peak: contiguous float32 `[1]` or `[rows, 1]`; None: codes' values times block scales alone.
        largest_scale: as for `encode`.
        out: contiguous float32 or bfloat16, rows * n elements.
    """
    count, length = packed.shape[0], 2 * packed.shape[1]
    _library().nvfp4_decode(
        packed.data_ptr(),
        block_scales.data_ptr(),
        count,
        length,
        None if peak is None else peak.data_ptr(),
        0 if peak is None else _stride(peak),
        largest_scale,
        _DTYPES[out.dtype],
        out.data_ptr(),
    )


def _stride(peak: Tensor) -> int:
    return 1 if peak.dim() == 2 else 0


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None, "no kernels: see `takes`"
    return library
