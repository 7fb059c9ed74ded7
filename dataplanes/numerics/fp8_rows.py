"""FP8 e4m3 with a float32 scale a row (activations by token, weights by output channel), or one for all.

The KV codec's own form (`fp8`) has bfloat16 scales, which a frame carries in two bytes. On a CPU with a C compiler
`native` does the work, elsewhere torch does; the bits are the same.

Source: the row-wise scaling of torchao's `Float8Tensor` (`PerRow`): scale = largest magnitude / 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.numerics.fp8 import LARGEST
from dataplanes.numerics.native import fp8_kernels
from dataplanes.numerics.output import require_output
from dataplanes.numerics.row_scale import require_row_scale

_SMALLEST_PEAK = 1e-12
"""Rows below it have its scale, so that none is divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Rows:
    """Rows of e4m3 numbers.

    Args:
        codes: float8_e4m3fn `[rows, n]`.
        scale: float32 `[rows, 1]`, or `[1]`: of all rows.
        shape: of what was quantised; rows are all but its last dimension.
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, ...]

    @classmethod
    def quantise(cls, x: Tensor, *, scale: Tensor | None = None, use_native: bool = True) -> FP8Rows:
        """Quantise a tensor.

        Args:
            x: `[..., n]`, a floating-point type, finite; what exceeds 448 times its scale becomes that.
            scale: float32 `[1]` or `[rows, 1]`, contiguous and positive, where it is known already: of a tensor whose
                parts do not see each other. None: each row has its own.
            use_native: whether kernels may do it.

        Raises:
            ValueError: `scale` has another shape, type or device, or is not contiguous.
        """
        # Codes keep the strides of what they are made of, and whatever made them, kernels may read them.
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        if scale is not None:
            require_row_scale("scale", scale, rows)
        else:
            scale = rows.abs().amax(1, keepdim=True).clamp_min(_SMALLEST_PEAK) / LARGEST
        if use_native and fp8_kernels.serve(rows.device):
            codes = fp8_kernels.encode(rows.detach(), scale)
        else:
            codes = (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return cls(codes=codes, scale=scale, shape=tuple(x.shape))

    def dequantise(self, dtype: torch.dtype = torch.float32, *, use_native: bool = True) -> Tensor:
        """The values, of the input's shape; rounded once from float32 to `dtype`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        return self.dequantise_into(out, use_native=use_native)

    def dequantise_into(self, out: Tensor, *, use_native: bool = True) -> Tensor:
        """Write the values into `out` and return it, see `dequantise`.

        Raises:
            ValueError: `out` is not contiguous, or not of the input's shape and the codes' device.
        """
        require_output(out, self.shape, self.codes.device)
        if use_native and out.dtype is torch.float32 and fp8_kernels.serve(out.device):
            fp8_kernels.decode(self.codes, self.scale, out)
            return out
        return out.copy_((self.codes.float() * self.scale).view(self.shape))

    def units(self, *, use_native: bool = True) -> Tensor:
        """The codes as float32 `[rows, n]`: whole multiples of 2**-9 up to 448. Times `unit` they are the values."""
        if use_native and fp8_kernels.serve(self.codes.device):
            values = torch.empty(self.codes.shape, dtype=torch.float32)
            fp8_kernels.decode(self.codes, None, values)
            return values
        return self.codes.float()

    @property
    def unit(self) -> Tensor:
        """float64, shaped as `scale`: what one of `units` stands for."""
        return self.scale.double()

    @property
    def nbytes(self) -> int:
        """Bytes held: one an element, and four a scale."""
        return self.codes.nbytes + self.scale.nbytes
