"""A tensor in NVFP4: packed codes, block scales and one peak, or a peak a row.

On a CPU with a C compiler `native` does the work, elsewhere the reference in `nvfp4` does; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.numerics import nvfp4
from dataplanes.numerics.code_layout import pack_codes, unpack_codes
from dataplanes.numerics.fp8 import LARGEST as LARGEST_BLOCK_SCALE
from dataplanes.numerics.native import nvfp4_kernels
from dataplanes.numerics.nvfp4 import BlockRule, Tile
from dataplanes.numerics.output import require_output
from dataplanes.numerics.row_scale import require_row_scale

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
        cls,
        x: Tensor,
        rule: BlockRule = BlockRule.PLAIN,
        *,
        per_row: bool = False,
        peak: Tensor | None = None,
        tile: Tile = Tile.ROW,
        use_native: bool = True,
    ) -> NVFP4Tensor:
        """Quantise a tensor.

        Args:
            x: `[..., n]`, a floating-point type, finite; n is a multiple of 16.
            rule: where a block's peak lands.
            per_row: each row has its own peak and depends on no other.
            peak: float32 `[1]` or `[rows, 1]`, contiguous, where it is known already: of a tensor whose parts do not
                see each other. None: x's own.
            tile: what shares a block scale.
            use_native: whether kernels may do it.

        Raises:
            ValueError: `peak` has another shape, type or device, or is not contiguous; or see
                `nvfp4.quantise_by_peak`.
        """
        # Block scales keep the strides of what they are made of, and whatever made them, kernels may read them.
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if peak is not None:
            require_row_scale("peak", peak, rows)
        largest = LARGEST_BLOCK_SCALE if rule is BlockRule.PLAIN else LARGEST_SCALE_4OVER6
        if use_native and tile is Tile.ROW and nvfp4_kernels.takes(rows):
            rows = rows.detach()
            peak = nvfp4_kernels.peaks(rows, per_row=per_row) if peak is None else peak
            packed, block_scales = nvfp4_kernels.encode(rows, peak, rule, largest)
        else:
            rows = rows.float()
            if peak is None:
                peak = rows.abs().amax(1, keepdim=True) if per_row else rows.abs().amax().view(1)
            codes, block_scales = nvfp4.quantise_by_peak(rows, peak, rule, largest_scale=largest, tile=tile)
            packed = pack_codes(codes)
        return cls(packed=packed, block_scales=block_scales, peak=peak, largest_scale=largest, shape=tuple(x.shape))

    def dequantise(self, dtype: torch.dtype = torch.float32, *, use_native: bool = True) -> Tensor:
        """The values, of the input's shape; rounded once from float32 to `dtype`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        return self.dequantise_into(out, use_native=use_native)

    def dequantise_into(self, out: Tensor, *, use_native: bool = True) -> Tensor:
        """Write the values into `out` and return it, see `dequantise`.

        Raises:
            ValueError: `out` is not contiguous, or not of the input's shape and the codes' device.
        """
        require_output(out, self.shape, self.packed.device)
        if use_native and nvfp4_kernels.gives(out.device, out.dtype):
            nvfp4_kernels.decode(self.packed, self.block_scales, self.peak, self.largest_scale, out)
            return out
        codes = unpack_codes(self.packed)
        values = nvfp4.dequantise_by_peak(codes, self.block_scales, self.peak, largest_scale=self.largest_scale)
        return out.copy_(values.view(self.shape))

    def units(self, *, use_native: bool = True) -> Tensor:
        """Codes' values times their block scales, exact in float32, `[rows, n]`: whole multiples of 2**-10 up to 2688.

        Times `unit` they are the values.
        """
        if use_native and nvfp4_kernels.gives(self.packed.device, torch.float32):
            values = torch.empty(self.packed.shape[0], 2 * self.packed.shape[1])
            nvfp4_kernels.decode(self.packed, self.block_scales, None, self.largest_scale, values)
            return values
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
