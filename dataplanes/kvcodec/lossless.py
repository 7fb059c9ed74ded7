"""Bit-exact coding of a stack: exponents apart from signs and mantissas.

A KV element's exponent byte takes a handful of values while its mantissa is close to noise; sorted into separate rows,
a byte coder finds the first and leaves the second alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataplanes.kvcodec.layout import KVDtype, flat_bytes


def split_fields(x: Tensor, dtype: KVDtype) -> tuple[Tensor, ...]:
    """Rows of bytes of a stack, the exponent's row first.

    Args:
        x: `[planes, ...]` of `dtype`.
        dtype: element type.

    Returns:
        uint8 `[planes, elements per plane]` for each of the element's bytes.
    """
    planes = x.shape[0]
    match dtype:
        case KVDtype.BFLOAT16:
            bits = flat_bytes(x).view(torch.int16).view(planes, -1)
            return _low_byte(bits >> 7), _low_byte((bits & 0x7F) | ((bits >> 8) & 0x80))
        case KVDtype.FLOAT16:
            bits = flat_bytes(x).view(torch.int16).view(planes, -1)
            return _low_byte(bits >> 8), _low_byte(bits)
        case KVDtype.FLOAT32:
            wide = flat_bytes(x).view(torch.int32).view(planes, -1)
            sign_and_mantissa = ((wide >> 16) & 0x7F) | ((wide >> 24) & 0x80)
            return _low_byte(wide >> 23), _low_byte(sign_and_mantissa), _low_byte(wide >> 8), _low_byte(wide)


def join_fields(rows: tuple[Tensor, ...], dtype: KVDtype) -> Tensor:
    """Undo `split_fields`: `[planes, elements per plane]` of `dtype`."""
    match dtype:
        case KVDtype.BFLOAT16:
            exponent, rest = (row.to(torch.int16) for row in rows)
            bits = (exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)
        case KVDtype.FLOAT16:
            high, low = (row.to(torch.int16) for row in rows)
            bits = (high << 8) | low
        case KVDtype.FLOAT32:
            exponent, rest, middle, low = (row.to(torch.int32) for row in rows)
            bits = (exponent << 23) | ((rest & 0x7F) << 16) | ((rest & 0x80) << 24) | (middle << 8) | low
    return bits.view(dtype.torch_dtype)


def _low_byte(bits: Tensor) -> Tensor:
    return (bits & 0xFF).to(torch.uint8)
