"""Linear layers that hold their weights in the precision that is in force, and nothing wider beside it.

The layers of the blocks switch; embeddings, patch, time and head stay at bf16, as in LongLive-2.0. A layer may keep
several variants resident, so that switching is a matter of a pointer; otherwise another precision of the weights needs
the checkpoint again.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as functional
from torch import Tensor, nn

from dataplanes.longlive.linear.emulated import EmulatedBackend, EmulatedWeight
from dataplanes.longlive.linear.precision import BF16, LinearPrecision
from dataplanes.numerics.nvfp4 import BlockRule

WeightVariant = tuple[str, BlockRule]
"""What of a precision is in the weights: format and block rule."""

BACKEND = EmulatedBackend()
"""Of every layer: the only one whose products are the same bits however rows are split among ranks."""


def variant_of(precision: LinearPrecision) -> WeightVariant:
    """The variant of the weights that a precision needs."""
    return precision.weights.value, precision.block_rule


class StoredLinear(nn.Module):
    """A linear layer with stored variants of its weights.

    Args:
        source: its weights in full; not kept.
        precisions: of which a variant is kept, the first in force.
    """

    def __init__(self, source: nn.Linear, precisions: tuple[LinearPrecision, ...]) -> None:
        super().__init__()
        self._bias = source.bias.detach().bfloat16()
        self._variants: dict[WeightVariant, Tensor | EmulatedWeight] = {}
        for precision in precisions:
            weight = source.weight.detach()
            stored = weight.bfloat16() if precision.is_full else BACKEND.quantise_weight(weight, precision)
            self._variants.setdefault(variant_of(precision), stored)
        self.precision = precisions[0]

    def set_precision(self, precision: LinearPrecision) -> None:
        """Switch; a variant for it is resident."""
        assert variant_of(precision) in self._variants, f"no variant for {precision}"
        self.precision = precision

    @property
    def nbytes(self) -> int:
        """Bytes of all variants and the bias."""
        return self._bias.nbytes + sum(variant.nbytes for variant in self._variants.values())

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, in the type of `x`."""
        variant = self._variants[variant_of(self.precision)]
        if isinstance(variant, Tensor):
            # Sums in float32: that is what matters of bf16 products, and CPUs without such units are slow at them.
            return functional.linear(x.bfloat16().to(x.dtype), variant.to(x.dtype), self._bias.to(x.dtype))
        return BACKEND.linear(x, replace(variant, precision=self.precision), self._bias)


def store_linears(model: nn.Module, precisions: tuple[LinearPrecision, ...]) -> None:
    """Replace every linear layer; those inside `blocks` get the precisions, the others stay at bf16."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            stored = StoredLinear(module, precisions if name.startswith("blocks.") else (BF16,))
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], stored)


def set_precision(model: nn.Module, precision: LinearPrecision) -> None:
    """Switch the layers of the blocks."""
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear) and name.startswith("blocks."):
            module.set_precision(precision)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything that a model holds."""
    plain = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return plain + sum(module.nbytes for module in model.modules() if isinstance(module, StoredLinear))
