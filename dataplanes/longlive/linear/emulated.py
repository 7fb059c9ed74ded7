"""`torch_emulated`: quantise, then compute with the quantised values in a wider type. Runs wherever torch does.

On a CPU sums of products are exact. NVFP4's values are whole multiples of 2**-10 of one unit and at most 2688, so that
a product has 43 bits, and 1024 of them 53, which is float64's; FP8's are smaller. Inputs at bf16 are first rounded to
2**-21 of their row's peak, far below what bf16 keeps of a sum. So no order of adding, number of threads or split of
the rows changes a bit: a rank that has some of the tokens gets the bits of one that has them all.

On other devices the product runs in bfloat16, in which quantised values without their outer scale are exact, and sums
in the device's own order.

Inputs have a scale per row (token). Libraries that give a whole batch one differ from it by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dataplanes.longlive.linear.backend import QuantisedWeight, check_weight
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.numerics.fp8_rows import FP8Rows
from dataplanes.numerics.nvfp4 import BlockRule
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

_EXACT_PRODUCTS = 1024
"""So many products of whole numbers below 2**21.4 add up to less than 2**53."""
_INPUT_BITS = 21
_WEIGHT_ELEMENTS_AT_ONCE = 1 << 22
"""Of a weight matrix that are float64 at a time: 32 MiB."""


class _Rows(Protocol):
    """Quantised rows: exact `units` times `unit`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def unit(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def units(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedWeight:
    """A quantised weight matrix.

    Args:
        rows: one for each output.
        precision: for which it was made.
    """

    rows: _Rows
    precision: LinearPrecision

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.rows.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundedInputs:
    """bf16 inputs as whole multiples of 2**-21 of their row's peak, the peak raised to a power of two."""

    values: Tensor
    unit: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> _RoundedInputs:
        rows = x.reshape(-1, x.shape[-1]).double()
        peak = rows.abs().amax(1, keepdim=True)
        _, exponent = torch.frexp(peak)
        unit = torch.ldexp(torch.ones_like(peak), exponent - _INPUT_BITS)
        return cls(values=(rows / unit).round(), unit=unit, shape=tuple(x.shape))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.unit.nbytes

    def units(self) -> Tensor:
        return self.values


class EmulatedBackend:
    """Every precision, on every device; offered for memory and quality."""

    name = "torch_emulated"
    precisions = frozenset(
        {
            LinearPrecision(weights=Precision.FP8, activations=activations)
            for activations in (Precision.BF16, Precision.FP8)
        }
        | {
            LinearPrecision(weights=Precision.NVFP4, activations=activations, block_rule=rule)
            for activations in (Precision.BF16, Precision.NVFP4)
            for rule in BlockRule
        }
    )
    is_emulated = True
    # Exact sums on a CPU, bf16's rounding elsewhere (0.0017).
    error_bound = 0.005

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """None but for a precision that nothing emulates."""
        return None if precision in self.precisions else f"{precision} is not emulated"

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> EmulatedWeight:
        """Quantise: FP8 with a scale per output, NVFP4 with one peak for the matrix.

        Raises:
            FieldError: a precision or shape that is not carried.
        """
        check_weight(self, weight, precision)
        rows: _Rows
        if precision.weights is Precision.FP8:
            rows = FP8Rows.quantise(weight)
        else:
            rows = NVFP4Tensor.quantise(weight, precision.block_rule)
        return EmulatedWeight(rows=rows, precision=precision)

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of the quantised values."""
        assert isinstance(weight, EmulatedWeight)
        inputs = _quantised_inputs(x, weight.precision)
        rows = weight.rows
        product = _exact_product(inputs, rows) if x.device.type == "cpu" else _bfloat16_product(inputs, rows)
        if bias is not None:
            product = product + bias.to(product.dtype)
        return product.to(x.dtype).view(*x.shape[:-1], rows.shape[0])


def by_definition(x: Tensor, weight: Tensor, bias: Tensor, precision: LinearPrecision) -> Tensor:
    """What every back end's result is held against: float64 of dequantised inputs and weights, without any kernel.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        precision: not bf16 weights.
    """
    values = (
        _dequantised(x, precision.activations, precision.block_rule, per_row=True),
        _dequantised(weight, precision.weights, precision.block_rule, per_row=False),
    )
    return values[0] @ values[1].t() + bias.double()


def _dequantised(x: Tensor, stored: Precision, rule: BlockRule, *, per_row: bool) -> Tensor:
    if stored is Precision.FP8:
        return FP8Rows.quantise(x, use_native=False).dequantise(use_native=False).double()
    if stored is Precision.NVFP4:
        held = NVFP4Tensor.quantise(x, rule, per_row=per_row, use_native=False)
        return held.dequantise(use_native=False).double()
    return x.double()


def _quantised_inputs(x: Tensor, precision: LinearPrecision) -> _Rows:
    if precision.activations is Precision.FP8:
        return FP8Rows.quantise(x)
    if precision.activations is Precision.NVFP4:
        return NVFP4Tensor.quantise(x, precision.block_rule, per_row=True)
    return _RoundedInputs.of(x)


def _exact_product(inputs: _Rows, weight: _Rows) -> Tensor:
    """float64 `[rows, out]`."""
    left, right = inputs.units(), weight.units()
    outputs, length = weight.shape
    result = torch.zeros(left.shape[0], outputs, dtype=torch.float64)
    at_once = max(_WEIGHT_ELEMENTS_AT_ONCE // length, 1)
    for begin in range(0, length, _EXACT_PRODUCTS):
        columns = slice(begin, begin + _EXACT_PRODUCTS)
        part = left[:, columns].double()
        for first in range(0, outputs, at_once):
            some = slice(first, first + at_once)
            result[:, some] += part @ right[some, columns].double().t()
    return result * inputs.unit * weight.unit.view(1, -1)


def _bfloat16_product(inputs: _Rows, weight: _Rows) -> Tensor:
    """float32 `[rows, out]`; inputs at bf16 keep their bits, for the unit is a power of two."""
    product = inputs.units().bfloat16() @ weight.units().bfloat16().t()
    return product.float() * inputs.unit.float() * weight.unit.float().view(1, -1)
