"""Number formats: bounds, hostile groups, and that no byte or scale is ever a NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataplanes.numerics import bounds, fp8, levels, nvfp4, packing

torch.set_num_threads(1)

HOSTILE = {
    "zero": torch.zeros(4, 32),
    "negative zero": torch.full((4, 32), -0.0),
    "constant": torch.full((4, 32), 5.3),
    "negative constant": torch.full((4, 32), -6.5e4),
    "subnormal": torch.linspace(-1, 1, 128).view(4, 32) * 1e-39,
    "one subnormal": torch.zeros(4, 32).index_fill_(1, torch.tensor([3]), 1e-45),
    "five to six": 5 + torch.linspace(0, 1, 128).view(4, 32),
    "outlier": torch.ones(4, 32).index_fill_(1, torch.tensor([9]), 1000.0),
    "half's largest": torch.linspace(-65504, 65504, 128).view(4, 32),
    "bfloat16 and large": torch.linspace(-1e25, 1e25, 128).view(4, 32),
}
hostile = pytest.mark.parametrize("x", HOSTILE.values(), ids=list(HOSTILE))


def assert_within(decoded: Tensor, x: Tensor, bound: Tensor) -> None:
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - x.double()).abs() <= bound.double()).all()


@hostile
@pytest.mark.parametrize("count", [2, 3, 12, 255, 256])
@pytest.mark.parametrize("dim", [0, 1])
def test_levels_stay_within_half_a_step(x: Tensor, count: int, dim: int) -> None:
    symbols, step, offset = levels.quantise(x, count, dim)
    assert torch.isfinite(step.float()).all()
    assert (step > 0).all()
    assert int(symbols.max()) < count
    assert_within(levels.dequantise(symbols, step, offset), x, bounds.levels_bound(x, count, dim))


def test_all_zero_stays_zero_and_a_constant_stays_almost_constant() -> None:
    for count in (2, 7, 16):
        assert not levels.dequantise(*levels.quantise(torch.zeros(4, 8), count, 0)).any()
        decoded = levels.dequantise(*levels.quantise(torch.full((4, 8), 5.3), count, 0))
        assert (decoded - 5.3).abs().max() < 5.3 / 2000


def test_more_levels_mean_less_error() -> None:
    x = torch.randn(64, 256)
    errors = [
        float((levels.dequantise(*levels.quantise(x, count, 0)) - x).square().mean()) for count in (4, 6, 8, 12, 16, 64)
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_group_does_not_stretch_to_zero() -> None:
    """Values in [5, 6] use the whole alphabet."""
    x = HOSTILE["five to six"]
    symbols, _, _ = levels.quantise(x, 16, 1)
    assert int(symbols.min()) == 0
    assert int(symbols.max()) == 15


@settings(deadline=None, max_examples=200)
@given(value=st.floats(2.0**-100, 2.0**100, width=32))
def test_rounding_up_is_tight(value: float) -> None:
    rounded = float(levels.round_up_to_bfloat16(torch.tensor([value], dtype=torch.float32)))
    assert value <= rounded <= value * (1 + 2.0**-7)
    assert torch.tensor(rounded).bfloat16().item() == rounded


@hostile
def test_fp8_stays_within_its_bound_and_makes_no_nan(x: Tensor) -> None:
    codes, scale = fp8.quantise(x)
    assert not ((codes & 0x7F) == 0x7F).any()
    assert_within(fp8.dequantise(codes, scale), x, bounds.fp8_bound(x))


@hostile
@pytest.mark.parametrize("rule", nvfp4.BlockRule)
def test_nvfp4_stays_within_its_bound_and_makes_no_nan(x: Tensor, rule: nvfp4.BlockRule) -> None:
    tokens = x.view(2, 2, 32)
    codes, block_scale, outer = nvfp4.quantise(tokens, rule)
    assert not ((block_scale & 0x7F) == 0x7F).any()
    assert int(codes.max()) < 16
    blocks = nvfp4.as_blocks(tokens)
    token_peak = tokens.abs().amax((-2, -1))[..., None, None, None]
    bound = bounds.nvfp4_bound(blocks, token_peak, rule).expand(blocks.shape)
    assert_within(nvfp4.dequantise(codes, block_scale, outer), tokens, bound.flatten(-2)[..., :32])


def test_e2m1_rounds_to_nearest_and_ties_to_even() -> None:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat([torch.linspace(-7, 7, 2801), (grid[1:] + grid[:-1]) / 2])
    codes = nvfp4._encode_e2m1(x)
    size = x.abs().clamp(max=6)
    distance = (size[:, None] - grid).abs()
    nearest = distance.amin(1, keepdim=True)
    candidates = distance <= nearest + 1e-6
    ties = (distance == nearest).sum(1) == 2
    assert ties.sum() >= 7
    assert candidates.gather(1, (codes & 7).long()[:, None]).all()
    assert ((codes & 1)[ties] == 0).all()
    assert torch.equal(codes >= 8, torch.signbit(x))


@pytest.mark.parametrize("head_dim", [1, 16, 17, 100])
def test_nvfp4_blocks_may_be_incomplete(head_dim: int) -> None:
    x = torch.randn(3, 2, head_dim)
    codes, block_scale, outer = nvfp4.quantise(x)
    assert block_scale.shape == (3, 2, math.ceil(head_dim / 16))
    assert (nvfp4.dequantise(codes, block_scale, outer) - x).abs().max() < 1


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(2, 256),
    planes=st.integers(1, 3),
    tokens=st.integers(0, 20),
    channels=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_packing_round_trip(count: int, planes: int, tokens: int, channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(0, count, (planes, tokens, channels), generator=generator).to(torch.uint8)
    packed = packing.pack(symbols, count)
    assert packed.shape == (planes, packing.packed_tokens(tokens, count), channels)
    assert torch.equal(packing.unpack(packed, count, tokens), symbols)


@pytest.mark.parametrize(("count", "per_byte"), [(2, 8), (3, 5), (4, 4), (6, 3), (7, 2), (16, 2), (17, 1), (256, 1)])
def test_as_many_symbols_share_a_byte_as_fit(count: int, per_byte: int) -> None:
    assert packing.symbols_per_byte(count) == per_byte


@pytest.mark.parametrize("count", [0, 1, 257])
def test_alphabets_have_2_to_256_symbols(count: int) -> None:
    with pytest.raises(ValueError, match=r"2\.\.256"):
        packing.symbols_per_byte(count)
