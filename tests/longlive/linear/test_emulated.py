"""Emulated linear layers: exact products of the quantised values, so that how rows are split changes no bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from controld.contract.errors import FieldError
from dataplanes.longlive.linear.emulated import (
    EmulatedBackend,
    _bfloat16_product,
    _exact_product,
    _quantised_inputs,
    by_definition,
)
from dataplanes.longlive.linear.precision import BF16, LinearPrecision, Precision
from dataplanes.numerics.nvfp4 import BlockRule

torch.set_num_threads(1)

BACKEND = EmulatedBackend()
precisions = pytest.mark.parametrize("precision", sorted(BACKEND.precisions, key=str), ids=str)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@precisions
@pytest.mark.parametrize("length", [32, 1040, 2048])
def test_the_result_is_that_of_the_quantised_values(precision: LinearPrecision, length: int) -> None:
    weight, x, bias = gaussian(40, length), gaussian(2, 7, length, seed=1).bfloat16().float(), gaussian(40, seed=2)
    result = BACKEND.linear(x, BACKEND.quantise_weight(weight, precision), bias)
    expected = by_definition(x.view(14, length), weight, bias, precision).view(2, 7, 40)
    assert result.dtype == x.dtype
    # Steps of two formats are rounded to float32 in one and not in the other.
    assert torch.allclose(result.double(), expected, rtol=1e-6, atol=float(expected.std()) * 2e-6)


@precisions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_split_of_the_rows_changes_a_bit(precision: LinearPrecision, dtype: torch.dtype) -> None:
    """Nor does the order of the terms."""
    x = (gaussian(30, 1040) * 10.0 ** gaussian(30, 1, seed=1)).to(dtype)
    x[3, 5], x[7] = 1e4, 0.0
    weight, bias = gaussian(16, 1040, seed=2), gaussian(16, seed=3)
    quantised = BACKEND.quantise_weight(weight, precision)
    whole = BACKEND.linear(x, quantised, bias)
    for size in (1, 7, 16):
        parts = [BACKEND.linear(part, quantised, bias) for part in x.split(size)]
        assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, BACKEND.linear(x.view(5, 6, -1), quantised, bias).view(30, 16))


@precisions
def test_products_of_other_devices_differ_by_bf16s_rounding(precision: LinearPrecision) -> None:
    """Run on the CPU."""
    x, weight = gaussian(40, 512).bfloat16(), BACKEND.quantise_weight(gaussian(64, 512, seed=1), precision)
    inputs = _quantised_inputs(x, precision)
    exact, rounded = (product(inputs, weight.rows) for product in (_exact_product, _bfloat16_product))
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.003


def test_sums_are_exact_at_their_largest() -> None:
    """All terms at the limit of their range, then one that a rounded sum would lose."""
    precision = LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4)
    x, weight = torch.full((1, 1024), 2688.0), torch.full((1, 1024), 2688.0)
    x[0, :16] = weight[0, :16] = 6.0 * 2**-9
    result = BACKEND.linear(x.double(), BACKEND.quantise_weight(weight, precision), None)
    assert float(result) == 16 * (6.0 * 2**-9) ** 2 + 1008 * 2688.0**2


@precisions
def test_bytes_are_those_of_the_format(precision: LinearPrecision) -> None:
    held = BACKEND.quantise_weight(gaussian(64, 256), precision).nbytes
    assert held == (64 * 256 + 4 * 64 if precision.weights is Precision.FP8 else 64 * 256 * 9 // 16 + 4)


def test_zero_stays_zero_and_what_is_not_finite_stays_so() -> None:
    for precision in BACKEND.precisions:
        quantised = BACKEND.quantise_weight(gaussian(8, 32), precision)
        assert torch.equal(BACKEND.linear(torch.zeros(3, 32), quantised, None), torch.zeros(3, 8))
        x = torch.ones(2, 32)
        x[1, 4] = torch.nan
        result = BACKEND.linear(x, quantised, None)
        assert result[0].isfinite().all() and not result[1].isfinite().any()


def test_four_over_six_is_nearer_and_nvfp4_coarser_than_fp8() -> None:
    x, weight = gaussian(64, 512), gaussian(64, 512, seed=1)
    exact = functional.linear(x, weight)

    def error(*formats: Precision, rule: BlockRule = BlockRule.PLAIN) -> float:
        precision = LinearPrecision(weights=formats[0], activations=formats[1], block_rule=rule)
        off = BACKEND.linear(x, BACKEND.quantise_weight(weight, precision), None) - exact
        return float(off.norm() / exact.norm())

    fp8, nvfp4 = error(Precision.FP8, Precision.FP8), error(Precision.NVFP4, Precision.NVFP4)
    assert error(Precision.NVFP4, Precision.NVFP4, rule=BlockRule.FOUR_OVER_SIX) < nvfp4 * 0.97
    assert fp8 < error(Precision.NVFP4, Precision.BF16) < nvfp4 < 0.15


def test_pairs_that_no_back_end_runs_are_refused() -> None:
    pairs = set(product(Precision, Precision))
    allowed = {(p.weights, p.activations) for p in BACKEND.precisions} | {(BF16.weights, BF16.activations)}
    for weights, activations in pairs - allowed:
        with pytest.raises(FieldError, match="activations"):
            LinearPrecision(weights=weights, activations=activations)
    with pytest.raises(FieldError, match="block_rule"):
        LinearPrecision(block_rule=BlockRule.FOUR_OVER_SIX)
    with pytest.raises(FieldError, match="weights: 'int4' is not offered"):
        LinearPrecision.of_setting({"weights": "int4"})
    setting = {"weights": "nvfp4", "activations": "bf16", "block_rule": "4over6", "steps": 4}
    assert str(LinearPrecision.of_setting(setting)) == "nvfp4/bf16 4over6"


def test_shapes_and_precisions_that_are_not_carried_are_refused() -> None:
    with pytest.raises(FieldError, match="precision"):
        BACKEND.quantise_weight(gaussian(8, 32), BF16)
    with pytest.raises(FieldError, match=r"weight: .*multiple of 16"):
        BACKEND.quantise_weight(gaussian(8, 40), LinearPrecision(weights=Precision.NVFP4))
