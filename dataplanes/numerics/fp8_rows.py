"""FP8 e4m3 with one float32 scale per row: activations by token, weights by output channel.

The KV codec's own form (`fp8`) has bfloat16 scales, which a frame carries in two bytes.

Source: the row-wise scaling of torchao's `Float8Tensor` (`PerRow`): scale = largest magnitude / 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.numerics.fp8 import LARGEST

_SMALLEST_PEAK = 1e-12
"""Rows below it have its scale, so that none is divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Rows:
    """Rows of e4m3 numbers.

    Args:
        codes: float8_e4m3fn `[rows, n]`.
        scale: float32 `[rows, 1]`.
        shape: of what was quantised; rows are all but its last dimension.
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, ...]

    @classmethod
    def quantise(cls, x: Tensor) -> FP8Rows:
        """Quantise each row of `x` (`[..., n]`, a floating-point type, finite) for itself."""
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = rows.abs().amax(1, keepdim=True).clamp_min(_SMALLEST_PEAK) / LARGEST
        codes = (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return cls(codes=codes, scale=scale, shape=tuple(x.shape))

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, of the input's shape; rounded once from float32 to `dtype`."""
        return (self.codes.float() * self.scale).to(dtype).view(self.shape)

    def units(self) -> Tensor:
        """The codes as float32 `[rows, n]`: whole multiples of 2**-9 up to 448. Times `unit` they are the values."""
        return self.codes.float()

    @property
    def unit(self) -> Tensor:
        """float64 `[rows, 1]`: what one of `units` stands for."""
        return self.scale.double()

    @property
    def nbytes(self) -> int:
        """Bytes held: one an element, and four a row."""
        return self.codes.nbytes + self.scale.nbytes
