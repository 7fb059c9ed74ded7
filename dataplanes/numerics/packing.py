"""Mixed-radix packing of small symbols into bytes.

`k` symbols of an alphabet of `levels` share one byte, `k` the largest with `levels ** k <= 256`: 6 levels take 2.67
bits instead of 3, and a byte-wise entropy coder sees `k` symbols at once. They are the same channel of `k` neighbouring
tokens, which are alike, so that the byte's entropy is below the sum of its symbols'.
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


def packed_tokens(tokens: int, levels: int) -> int:
    """Rows of bytes that `tokens` rows of symbols take."""
    return -(-tokens // symbols_per_byte(levels))


def pack(symbols: Tensor, levels: int) -> Tensor:
    """Pack neighbouring tokens.

    Args:
        symbols: uint8 `[planes, tokens, channels]`, each below `levels`.
        levels: size of the alphabet, 2..256.

    Returns:
        uint8 `[planes, packed_tokens(tokens, levels), channels]`; missing tokens of the last row count as zero.
    """
    count = symbols_per_byte(levels)
    missing = -symbols.shape[1] % count
    if missing:
        symbols = functional.pad(symbols, (0, 0, 0, missing))
    packed = symbols[:, count - 1 :: count].clone()
    for index in range(count - 2, -1, -1):
        packed.mul_(levels).add_(symbols[:, index::count])
    return packed


def unpack(packed: Tensor, levels: int, tokens: int) -> Tensor:
    """Undo `pack`: uint8 `[planes, tokens, channels]`.

    Bytes that no packing makes give symbols of `levels` or more in a row's last token, never an error.
    """
    count = symbols_per_byte(levels)
    if count == 1:
        return packed
    planes, rows, channels = packed.shape
    symbols = torch.empty(planes, rows, count, channels, dtype=torch.uint8, device=packed.device)
    rest = packed
    for index in range(count - 1):
        quotient = torch.div(rest, levels, rounding_mode="floor")
        symbols[:, :, index] = rest - quotient * levels
        rest = quotient
    symbols[:, :, count - 1] = rest
    return symbols.view(planes, rows * count, channels)[:, :tokens]
