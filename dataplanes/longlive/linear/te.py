"""`te`: NVFP4 on tensor cores by Transformer Engine's `Linear` under its recipe NVFP4BlockScaling.

For inference: no Hadamard transform, no stochastic rounding, blocks of 1x16, as LongLive-2.0 sets it up. Inputs have
one peak for the whole batch, or one a row where the version knows `row_scaled_activation`.

Written against the signatures of 2.20.2 and of versions before `quantized_model_init` and `autocast` had these names.
Not run on a GPU: here it is tested that it says why it cannot.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.longlive.linear.backend import LIBRARY_ERROR_BOUND, QuantisedWeight, check_weight
from dataplanes.longlive.linear.library_import import below_capability, imported
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.numerics.nvfp4 import BlockRule

_ROW_MULTIPLE = 32
"""Its kernels take so many rows at a time."""
_FOUR_OVER_SIX_FIELD = "nvfp4_4over6"


@dataclass(frozen=True, slots=True, kw_only=True)
class TEWeight:
    """A `te.Linear` without a bias, its weight quantised, and the recipe that it runs under."""

    module: Any
    recipe: Any
    precision: LinearPrecision

    @property
    def nbytes(self) -> int:
        """Codes, scales and peaks that the weight holds, transposed copies included."""
        metadata = self.module.weight.get_metadata()
        return sum(part.nbytes for part in metadata.values() if isinstance(part, Tensor))


class TransformerEngineBackend:
    """W4A4 on Blackwell."""

    name = "te"
    precisions = frozenset(
        LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4, block_rule=rule) for rule in BlockRule
    )
    is_emulated = False
    error_bound = LIBRARY_ERROR_BOUND

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Missing library, device, or 4over6 in an older version."""
        if precision not in self.precisions:
            return f"{precision} is not carried"
        missing = below_capability(device, 10, 0)
        if missing is not None:
            return missing
        library, recipes = imported("transformer_engine.pytorch"), imported("transformer_engine.common.recipe")
        if isinstance(library, str):
            return library
        if isinstance(recipes, str):
            return recipes
        if not hasattr(recipes, "NVFP4BlockScaling"):
            return "this version of Transformer Engine has no recipe NVFP4BlockScaling"
        if precision.block_rule is BlockRule.FOUR_OVER_SIX and _FOUR_OVER_SIX_FIELD not in _recipe_fields(recipes):
            return "this version of Transformer Engine has no 4over6"
        available = getattr(library, "is_nvfp4_available", None)
        if available is None:
            return None
        is_available, reason = available(return_reason=True)
        return None if is_available else str(reason)

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> TEWeight:
        """A `te.Linear` whose weight was quantised at its creation.

        Raises:
            FieldError: see `check_weight`.
        """
        check_weight(self, weight, precision)
        library = _module("transformer_engine.pytorch")
        recipe = recipe_for(_module("transformer_engine.common.recipe"), precision.block_rule)
        outputs, length = weight.shape
        with quantised_init(library, recipe), torch.no_grad():
            module = library.Linear(length, outputs, bias=False, params_dtype=torch.bfloat16, device=weight.device)
            module.weight.copy_(weight.bfloat16())
            # The transposed copy serves gradients only.
            module.weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        return TEWeight(module=module.eval(), recipe=recipe, precision=precision)

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """Rows are completed with zeros to a multiple of 32, which changes no peak."""
        assert isinstance(weight, TEWeight)
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _ROW_MULTIPLE))
        with torch.no_grad(), quantised_run(_module("transformer_engine.pytorch"), weight.recipe):
            result: Tensor = weight.module(padded)[: len(rows)]
        if bias is not None:
            result = result + bias.to(result.dtype)
        return result.to(x.dtype).view(*x.shape[:-1], -1)


def recipe_for(recipes: ModuleType, rule: BlockRule) -> Any:
    """NVFP4BlockScaling for inference, with what this version knows of it."""
    wanted: dict[str, object] = {
        "disable_rht": True,
        "disable_stochastic_rounding": True,
        "disable_2d_quantization": True,
        "row_scaled_activation": True,
    }
    if rule is BlockRule.FOUR_OVER_SIX:
        wanted |= {_FOUR_OVER_SIX_FIELD: "all", "nvfp4_4over6_err_mode": "MSE"}
    known = _recipe_fields(recipes)
    return recipes.NVFP4BlockScaling(**{name: value for name, value in wanted.items() if name in known})


def quantised_init(library: ModuleType, recipe: Any) -> AbstractContextManager[None]:
    """In it parameters are created quantised; the newer name where there is one."""
    if hasattr(library, "quantized_model_init"):
        context: AbstractContextManager[None] = library.quantized_model_init(enabled=True, recipe=recipe)
    else:
        context = library.fp8_model_init(enabled=True, recipe=recipe)
    return context


def quantised_run(library: ModuleType, recipe: Any) -> AbstractContextManager[None]:
    """In it products run in the recipe's formats; the newer name where there is one."""
    if hasattr(library, "autocast"):
        context: AbstractContextManager[None] = library.autocast(enabled=True, recipe=recipe)
    else:
        context = library.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return context


def _recipe_fields(recipes: ModuleType) -> frozenset[str]:
    return frozenset(item.name for item in fields(recipes.NVFP4BlockScaling))


def _module(name: str) -> ModuleType:
    module = imported(name)
    if isinstance(module, str):
        raise RuntimeError(module)
    return module
