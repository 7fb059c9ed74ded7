"""A tensor in NVFP4: packed codes, block scales and one peak, or a peak a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.numerics import nvfp4
from dataplanes.numerics.code_layout import pack_codes, unpack_codes
from dataplanes.numerics.fp8 import LARGEST as LARGEST_BLOCK_SCALE
from dataplanes.numerics.nvfp4 import BlockRule, Tile

LARGEST_SCALE_4OVER6 = 256.0
"""What block scales reach with 4over6: one and a half times as much still fits e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4Tensor:
    """Rows of NVFP4 blocks, as `nvfp4.quantise_by_peak` makes them.

    Args:
        packed: two codes to a byte, uint8 `[rows, n / 2]`.
        block_scales: e4m3 as uint8 `[rows, n / 16]`.
        peak: float32 `[1]`, or `[rows, 1]`: rows that do not depend on each other.
        largest_scale: what a block scale reaches at the peak.
        shape: of what was quantised; rows are all but its last dimension.
    """

    packed: Tensor
    block_scales: Tensor
    peak: Tensor
    largest_scale: float
    shape: tuple[int, ...]

    @classmethod
    def quantise(
        cls, x: Tensor, rule: BlockRule = BlockRule.PLAIN, *, per_row: bool = False, tile: Tile = Tile.ROW
    ) -> NVFP4Tensor:
        """Quantise a tensor.

        Args:
            x: `[..., n]`, a floating-point type, finite; n is a multiple of 16.
            rule: where a block's peak lands.
            per_row: each row has its own peak and depends on no other.
            tile: what shares a block scale.

        Raises:
            ValueError: see `nvfp4.quantise_by_peak`.
        """
        rows = x.reshape(-1, x.shape[-1]).float()
        size = rows.abs()
        peak = size.amax(1, keepdim=True) if per_row else size.amax().view(1)
        largest = LARGEST_BLOCK_SCALE if rule is BlockRule.PLAIN else LARGEST_SCALE_4OVER6
        codes, block_scales = nvfp4.quantise_by_peak(rows, peak, rule, largest_scale=largest, tile=tile)
        return cls(
            packed=pack_codes(codes),
            block_scales=block_scales,
            peak=peak,
            largest_scale=largest,
            shape=tuple(x.shape),
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, of the input's shape; rounded once from float32 to `dtype`."""
        values = nvfp4.dequantise_by_peak(
            unpack_codes(self.packed), self.block_scales, self.peak, largest_scale=self.largest_scale
        )
        return values.to(dtype).view(self.shape)

    def units(self) -> Tensor:
        """Codes' values times their block scales, exact in float32, `[rows, n]`: whole multiples of 2**-10 up to 2688.

        Times `unit` they are the values.
        """
        sizes = nvfp4.code_values(self.packed.device)[unpack_codes(self.packed).int()]
        scales = self.block_scales.view(torch.float8_e4m3fn).float()
        return (nvfp4.as_blocks(sizes) * scales[..., None]).flatten(-2)

    @property
    def unit(self) -> Tensor:
        """float64, shaped as `peak`: what one of `units` stands for."""
        return self.peak.double() / (self.largest_scale * nvfp4.LARGEST)

    @property
    def nbytes(self) -> int:
        """Bytes held: 0.5625 an element, and the peaks."""
        return self.packed.nbytes + self.block_scales.nbytes + self.peak.nbytes
