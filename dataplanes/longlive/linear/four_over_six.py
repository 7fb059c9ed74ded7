"""`fouroversix`: NVFP4 by the library of that name, `quantize_to_fp4` and `fp4_matmul`.

On Blackwell the library computes on tensor cores; elsewhere, a CPU included, it emulates. Inputs have one peak for the
whole batch. Written against 1.0.5, whose emulation the tests run where it is installed; its kernels were not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataplanes.longlive.linear.backend import LIBRARY_ERROR_BOUND, QuantisedWeight, check_weight
from dataplanes.longlive.linear.library_import import imported
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.numerics.nvfp4 import BlockRule

_SCALE_RULES = {BlockRule.PLAIN: "static_6", BlockRule.FOUR_OVER_SIX: "mse"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FourOverSixWeight:
    """The library's quantised tensor."""

    tensor: Any
    precision: LinearPrecision

    @property
    def nbytes(self) -> int:
        """Codes, scales and peak, with the rows and columns that complete its tiles."""
        tensor = self.tensor
        return int(tensor.values.nbytes + tensor.scale_factors.nbytes + tensor.amax.nbytes)


class FourOverSixBackend:
    """W4A4."""

    name = "fouroversix"
    precisions = frozenset(
        LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4, block_rule=rule) for rule in BlockRule
    )
    is_emulated = False
    error_bound = LIBRARY_ERROR_BOUND

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Missing library; what it cannot do on a device only running it shows."""
        if precision not in self.precisions:
            return f"{precision} is not carried"
        library = imported("fouroversix")
        return library if isinstance(library, str) else None

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> FourOverSixWeight:
        """Quantise by the library.

        Raises:
            FieldError: see `check_weight`.
        """
        check_weight(self, weight, precision)
        return FourOverSixWeight(tensor=_quantised(weight, precision), precision=precision)

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """The library's product, in bf16, and the bias."""
        assert isinstance(weight, FourOverSixWeight)
        library: Any = imported("fouroversix")
        inputs = _quantised(x.reshape(-1, x.shape[-1]), weight.precision)
        result: Tensor = library.fp4_matmul(inputs, weight.tensor, out_dtype=library.DataType.bfloat16)
        if bias is not None:
            result = result + bias.to(result.dtype)
        return result.to(x.dtype).view(*x.shape[:-1], -1)


def _quantised(rows: Tensor, precision: LinearPrecision) -> Any:
    library: Any = imported("fouroversix")
    config = library.QuantizationConfig(scale_rule=_SCALE_RULES[precision.block_rule])
    return library.quantize_to_fp4(rows.bfloat16().contiguous(), config)
