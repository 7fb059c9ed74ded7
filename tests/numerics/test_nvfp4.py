"""NVFP4 beside its definition, beside Transformer Engine's reference where that is here, and 4over6 beside plain."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataplanes.numerics import nvfp4
from dataplanes.numerics.nvfp4 import BlockRule

torch.set_num_threads(1)

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MIDDLES = (GRID[1:] + GRID[:-1]) / 2
E4M3 = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""All finite sizes, in the order of their bytes."""

FORMS = [
    pytest.param(BlockRule.PLAIN, 448.0, id="plain"),
    pytest.param(BlockRule.FOUR_OVER_SIX, 448.0, id="4over6 to 448"),
    pytest.param(BlockRule.FOUR_OVER_SIX, 256.0, id="4over6 to 256"),
]


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def gaussian(rows: int, columns: int = 64) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    scales = 2.0 ** torch.arange(-12, 4)
    ties = torch.tensor([*MIDDLES, 0.0, -0.0, 6.0, 5.9, -6.0, 7e-3, 0.26, -0.24, 3.6], dtype=torch.float32).repeat(2)
    ties = torch.cat([ties, -ties])
    lone_peak = gaussian(16) * 1e-3
    lone_peak[3, 17] = 2688.0
    falling = gaussian(32) * 2.0 ** -torch.arange(32.0)[:, None]
    rare = torch.rand(32, 64, generator=generator) < 0.02
    return {
        "gaussian": gaussian(64),
        "bfloat16": gaussian(64).bfloat16().float(),
        "float16": gaussian(64).half().float(),
        "half steps": (gaussian(64) * 4).round() / 4,
        "zeros": torch.zeros(4, 32),
        "negative zeros": torch.full((4, 32), -0.0),
        "1e-30": gaussian(8) * 1e-30,
        "1e-38": gaussian(8) * 1e-38,
        "subnormal": gaussian(8) * 1e-41,
        "one subnormal": torch.zeros(4, 32).index_fill_(1, torch.tensor([3]), 1e-45),
        "large": gaussian(8) * 2.0**90,
        "ties of every code": (ties * scales[:, None]).contiguous(),
        "ties under an outer scale of 1": torch.cat([ties * scales[:, None], torch.full((1, 64), 2688.0)]),
        "ties of block scales": torch.full((16, 64), 6.0) * (1 + torch.arange(64) / 128) * scales[:, None],
        "peak in one block": lone_peak,
        "448 times 6": torch.full((2, 32), 2688.0),
        "just under 448 times 6": torch.full((2, 32), 2687.9998).index_fill_(1, torch.tensor([0]), 2688.0),
        "block scales to zero": falling,
        "outliers": torch.where(rare, 1000 * gaussian(32), gaussian(32)),
    }


TENSORS = _tensors()
tensors = pytest.mark.parametrize("x", TENSORS.values(), ids=list(TENSORS))
forms = pytest.mark.parametrize(("rule", "largest_scale"), FORMS)
per_row = pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])


def peak_of(x: Tensor, per_row: bool) -> Tensor:
    return x.abs().amax(1, keepdim=True) if per_row else x.abs().amax().view(1)


def to_e4m3(x: float) -> int:
    """Byte of the nearest e4m3 number, ties to the even byte; up to 448."""
    above = int(np.searchsorted(E4M3, np.float32(min(x, 448.0))))
    if above == 0:
        return 0
    below = above - 1
    low, high = float(x) - float(E4M3[below]), float(E4M3[above]) - float(x)
    return below if low < high or (low == high and below % 2 == 0) else above


def to_e2m1(x: np.float32) -> int:
    """Code of the nearest e2m1 number; a tie goes to the even code, negative zero to zero."""
    size = abs(x)
    code = int(np.searchsorted(MIDDLES, size))
    if code < 7 and size == MIDDLES[code] and code % 2:
        code += 1
    return code + (8 if x < 0 else 0)


def by_definition(block: np.ndarray[Any, Any], peak: np.float32, raised: float | None, largest: float) -> Any:
    """Byte of the scale and codes of one block: one float32 operation after the other. `raised` is None for plain."""
    f = np.float32
    with np.errstate(divide="ignore", over="ignore"):
        encode = min(f(largest * 6) / peak, np.finfo(f).max)
        block_peak = np.abs(block).max()
        wanted = block_peak * (encode * (f(1) / f(6))) if raised is None else block_peak / f(6) * encode * f(raised)
        byte = to_e4m3(float(wanted))
        reciprocal = min(f(1) / (E4M3[byte] * (f(1) / encode)), np.finfo(f).max)
    return byte, [to_e2m1(x * reciprocal) for x in block]


def squared_error(block: np.ndarray[Any, Any], byte: int, codes: list[int], peak: np.float32, largest: float) -> Any:
    total = np.float32(0)
    with np.errstate(over="ignore"):
        for x, code in zip(block, codes, strict=True):
            value = GRID[code & 7] * (-1 if code > 7 else 1)
            off = value * E4M3[byte] * peak / np.float32(largest * 6) - x
            total = total + off * off
    return total


@tensors
@forms
@per_row
def test_codes_and_scales_are_those_of_the_definition(
    x: Tensor, rule: BlockRule, largest_scale: float, per_row: bool
) -> None:
    x = x[: max(len(x) // 4, 2)]
    peak = peak_of(x, per_row)
    codes, scales = nvfp4.quantise_by_peak(x, peak, rule, largest_scale=largest_scale)
    peaks = peak.expand(len(x), 1).numpy()[:, 0]
    for row, row_peak, row_codes, row_scales in zip(x.numpy(), peaks, codes, scales, strict=True):
        for index, byte in enumerate(row_scales.tolist()):
            block = row[16 * index : 16 * index + 16]
            if rule is BlockRule.PLAIN:
                expected = by_definition(block, row_peak, None, largest_scale)
            else:
                six, four = (by_definition(block, row_peak, raised, largest_scale) for raised in (1.0, 1.5))
                errors = [squared_error(block, *found, row_peak, largest_scale) for found in (six, four)]
                expected = four if errors[1] < errors[0] else six
            assert (byte, row_codes[16 * index : 16 * index + 16].tolist()) == expected


@forms
def test_values_come_back_within_a_block_step(rule: BlockRule, largest_scale: float) -> None:
    x = TENSORS["gaussian"]
    peak = peak_of(x, False)
    codes, scales = nvfp4.quantise_by_peak(x, peak, rule, largest_scale=largest_scale)
    values = nvfp4.dequantise_by_peak(codes, scales, peak, largest_scale=largest_scale)
    unit = torch.from_numpy(E4M3)[scales.int()].repeat_interleave(16, 1) * peak / (largest_scale * 6)
    sizes = torch.from_numpy(GRID)[(codes & 7).int()] * torch.where(codes > 7, -1, 1)
    assert torch.allclose(values, sizes * unit, rtol=3e-7, atol=0)
    assert ((values - x).abs() <= unit * 1.001).all()


def test_a_peak_decides_the_scale_of_tensors_that_do_not_have_it() -> None:
    """So a tensor may be quantised in pieces that do not know each other."""
    x = TENSORS["outliers"]
    peak = peak_of(x, False)
    whole = nvfp4.quantise_by_peak(x, peak)
    pieces = [nvfp4.quantise_by_peak(piece, peak) for piece in x.split(5)]
    for index in (0, 1):
        assert torch.equal(whole[index], torch.cat([piece[index] for piece in pieces]))


def test_what_has_no_definition_is_refused() -> None:
    with pytest.raises(ValueError, match="x: rows of 20"):
        nvfp4.quantise_by_peak(torch.zeros(2, 20), torch.ones(1))
    with pytest.raises(ValueError, match="largest_scale"):
        nvfp4.quantise_by_peak(torch.zeros(2, 32), torch.ones(1), largest_scale=256.0)


@tensors
@forms
@per_row
def test_codes_and_scales_are_those_of_transformer_engine(
    x: Tensor, rule: BlockRule, largest_scale: float, per_row: bool, transformer_engine: ModuleType
) -> None:
    """Its pure torch reference; `CONTROLD_TE_REFERENCE` may name the file `reference_nvfp4.py`."""
    quantiser = transformer_engine.NVFP4QuantizerRef(
        dtype=transformer_engine.reference_utils.Fp4Formats.E2M1,
        columnwise=False,
        row_scaled_nvfp4=per_row,
        nvfp4_use_4over6=rule is BlockRule.FOUR_OVER_SIX,
        nvfp4_e4m3_max=int(largest_scale),
        nvfp4_4over6_err_mode="MSE",
    )
    expected = quantiser.quantize(x)
    peak = expected.global_amax_row.view(-1, 1) if per_row else expected.global_amax_row
    assert torch.equal(peak, peak_of(x, per_row))
    codes, scales = nvfp4.quantise_by_peak(x, peak, rule, largest_scale=largest_scale)
    assert torch.equal(codes[:, ::2] + 16 * codes[:, 1::2], expected.data)
    assert torch.equal(scales, expected.scale.view(torch.uint8))
    values = transformer_engine.cast_from_fp4x2(expected.data, torch.float32)
    step = expected.scale.float() * peak * torch.tensor(1.0 / (6 * largest_scale))
    decoded = nvfp4.dequantise_by_peak(codes, scales, peak, largest_scale=largest_scale)
    assert torch.equal(decoded, values * step.repeat_interleave(16, 1))


def block_errors(x: Tensor, rule: BlockRule) -> Tensor:
    decoded = nvfp4.dequantise(*nvfp4.quantise(x, rule))
    return nvfp4.as_blocks(decoded.double() - x.double()).square().sum(-1)


def test_4over6_has_the_published_gain_on_gaussian_data() -> None:
    """0.0953 to 0.0872 of the root mean square; and no block's squared error is larger than with plain NVFP4."""
    x = torch.randn(1024, 3, 64, generator=torch.Generator().manual_seed(1))
    plain, better = block_errors(x, BlockRule.PLAIN), block_errors(x, BlockRule.FOUR_OVER_SIX)
    power = float(x.double().square().sum())
    assert float(plain.sum() / power) ** 0.5 == pytest.approx(0.0953, rel=0.01)
    assert float(better.sum() / power) ** 0.5 == pytest.approx(0.0872, rel=0.01)
    assert (better <= plain * (1 + 1e-5)).all()
    assert 0.3 < float((better < plain * (1 - 1e-5)).double().mean()) < 0.7


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 2.0**90])
@pytest.mark.parametrize("head_dim", [1, 16, 40, 100])
def test_4over6_never_makes_a_block_worse(size: float, head_dim: int) -> None:
    """Down to blocks of a ten-thousandth of their token's peak and to the smallest outer scale."""
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(200, 2, head_dim, generator=generator) * torch.rand(200, 2, 1, generator=generator).pow(6)
    x[:, :, 0] = x[:, :, 0].sign() * x.abs().amax((1, 2), keepdim=True)[..., 0] / 50
    plain, better = block_errors(x * size, BlockRule.PLAIN), block_errors(x * size, BlockRule.FOUR_OVER_SIX)
    peaks, token_peaks = nvfp4.as_blocks(x).abs().amax(-1), x.abs().amax((1, 2))[:, None, None]
    scaled = (peaks * 1e4 > token_peaks) & (token_peaks * size > 2.0**-110)
    rounding = (peaks.double() * size * 1e-5).square()
    assert (better <= plain * (1 + 1e-4) + rounding)[scaled].all()
    assert scaled.float().mean() > 0.5


def test_4over6_takes_four_where_the_second_largest_is_five_sixths() -> None:
    """At 6 five is a tie between two codes; at 4 the same value is 3.33."""
    block = torch.zeros(1, 1, 16)
    block[..., :8], block[..., 8:] = 6.0, 5.0
    codes, _, _ = nvfp4.quantise(block, BlockRule.FOUR_OVER_SIX)
    assert codes[0, 0, :8].tolist() == [6] * 8
    assert codes[0, 0, 8:].tolist() == [5] * 8
    codes, _, _ = nvfp4.quantise(block)
    assert codes[0, 0].tolist() == [7] * 8 + [6] * 8
