"""FP8 of CPU tensors by the kernels of `fp8.c`: one pass over memory, without the interpreter lock."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dataplanes.native_build import SAME_AS_REFERENCE, load_compiled


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None (logged once, with the reason) where they cannot be built."""
    library = load_compiled(Path(__file__).with_name("fp8.c"), SAME_AS_REFERENCE)
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for function in (library.fp8_encode, library.fp8_decode):
        function.argtypes, function.restype = (pointer, integer, integer, pointer, integer, pointer), None
    return library


def serve(device: torch.device) -> bool:
    """Whether the kernels work on tensors there."""
    return device.type == "cpu" and load_library() is not None


def encode(rows: Tensor, scale: Tensor) -> Tensor:
    """`rows / scale`, rounded to nearest and saturating: float8_e4m3fn `[rows, n]`.

    Args:
        rows: contiguous float32 `[rows, n]`.
        scale: contiguous float32 `[1]` or `[rows, 1]`.
    """
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn)
    _library().fp8_encode(rows.data_ptr(), *rows.shape, scale.data_ptr(), _stride(scale), codes.data_ptr())
    return codes


def decode(codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """Write codes times scale.

    Args:
        codes: contiguous float8_e4m3fn `[rows, n]`.
        scale: contiguous float32 `[1]` or `[rows, 1]`; None: 1.
        out: contiguous float32, as many as there are codes.
    """
    stride = 0 if scale is None else _stride(scale)
    pointer = None if scale is None else scale.data_ptr()
    _library().fp8_decode(codes.data_ptr(), *codes.shape, pointer, stride, out.data_ptr())


def _stride(scale: Tensor) -> int:
    return 1 if scale.dim() == 2 else 0


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None, "no kernels: see `serve`"
    return library
