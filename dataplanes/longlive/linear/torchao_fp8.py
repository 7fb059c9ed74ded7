"""`torchao_fp8`: e4m3 with a scale a row, by torchao.

Inputs in FP8 need compute capability 8.9, on which it was not run; FP8 weights alone run everywhere, and slower than
bf16. Written against 0.18.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataplanes.longlive.linear.backend import LIBRARY_ERROR_BOUND, QuantisedWeight, check_weight
from dataplanes.longlive.linear.library_import import below_capability, imported
from dataplanes.longlive.linear.precision import LinearPrecision, Precision

_LIBRARY = "torchao.quantization"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoWeight:
    """A linear layer without a bias whose weight is torchao's tensor."""

    module: nn.Linear
    precision: LinearPrecision

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        tensor: Any = self.module.weight
        return int(tensor.qdata.nbytes + tensor.scale.nbytes)


class TorchaoFP8Backend:
    """FP8 weights, with inputs at FP8 or bf16."""

    name = "torchao_fp8"
    precisions = frozenset(
        LinearPrecision(weights=Precision.FP8, activations=activations)
        for activations in (Precision.FP8, Precision.BF16)
    )
    is_emulated = False
    error_bound = LIBRARY_ERROR_BOUND

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Missing library, or a device without FP8 products."""
        if precision not in self.precisions:
            return f"{precision} is not carried"
        if precision.activations is Precision.FP8:
            missing = below_capability(device, 8, 9)
            if missing is not None:
                return missing
        library = imported(_LIBRARY)
        return library if isinstance(library, str) else None

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> TorchaoWeight:
        """Quantise by the library.

        Raises:
            FieldError: see `check_weight`.
        """
        check_weight(self, weight, precision)
        library: Any = imported(_LIBRARY)
        if precision.activations is Precision.FP8:
            config = library.Float8DynamicActivationFloat8WeightConfig(granularity=library.PerRow())
        else:
            config = library.Float8WeightOnlyConfig()
        outputs, length = weight.shape
        module = nn.Linear(length, outputs, bias=False, device=weight.device, dtype=torch.bfloat16)
        module.requires_grad_(False).weight.copy_(weight)
        library.quantize_(module, config)
        return TorchaoWeight(module=module, precision=precision)

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """The library's product of bf16 inputs, and the bias."""
        assert isinstance(weight, TorchaoWeight)
        with torch.no_grad():
            result: Tensor = weight.module(x.bfloat16())
        if bias is not None:
            result = result + bias.to(result.dtype)
        return result.to(x.dtype)
