"""Mixed-radix packing of small symbols into bytes.

`k` symbols of an alphabet of `levels` share one byte, `k` the largest with `levels ** k <= 256`: 6 levels take 2.67
bits instead of 3, and a byte-wise entropy coder sees `k` symbols at once. Symbol `i` of byte `j` is symbol
`i * bytes + j` of its row, so that packing and unpacking run over contiguous memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def symbols_per_byte(levels: int) -> int:
    """How many symbols of an alphabet of `levels` (2..256) fit one byte."""
    if not 2 <= levels <= 256:
        raise ValueError(f"{levels} levels: not in 2..256")
    count = 1
    while levels ** (count + 1) <= 256:
        count += 1
    return count


def packed_length(length: int, levels: int) -> int:
    """Bytes of one packed row of `length` symbols."""
    return -(-length // symbols_per_byte(levels))


def pack(symbols: Tensor, levels: int) -> Tensor:
    """Pack rows of symbols.

    Args:
        symbols: uint8 `[rows, length]`, each below `levels`.
        levels: size of the alphabet, 2..256.

    Returns:
        uint8 `[rows, packed_length(length, levels)]`; missing symbols of the last byte count as zero.
    """
    count = symbols_per_byte(levels)
    if count == 1:
        return symbols
    rows, length = symbols.shape
    width = packed_length(length, levels)
    missing = width * count - length
    if missing:
        symbols = functional.pad(symbols, (0, missing))
    runs = symbols.view(rows, count, width)
    packed = runs[:, count - 1].clone()
    for index in range(count - 2, -1, -1):
        packed.mul_(levels).add_(runs[:, index])
    return packed


def unpack(packed: Tensor, levels: int, length: int) -> Tensor:
    """Undo `pack`: uint8 `[rows, length]`. Bytes that no packing makes give symbols that may reach `levels` or more."""
    count = symbols_per_byte(levels)
    if count == 1:
        return packed
    rows, width = packed.shape
    symbols = torch.empty(rows, count, width, dtype=torch.uint8, device=packed.device)
    rest = packed
    for index in range(count - 1):
        quotient = _divide(rest, levels)
        torch.sub(rest, quotient * levels, out=symbols[:, index])
        rest = quotient
    symbols[:, count - 1] = rest
    return symbols.view(rows, count * width)[:, :length]


def _divide(x: Tensor, divisor: int) -> Tensor:
    if divisor & (divisor - 1) == 0:
        return x >> (divisor.bit_length() - 1)
    return torch.div(x, divisor, rounding_mode="floor")
