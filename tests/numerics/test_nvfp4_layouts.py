"""Squares that commute with transposing, packed codes, swizzled scales and rows that stand alone."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from dataplanes.numerics import nvfp4
from dataplanes.numerics.code_layout import pack_codes, swizzle_scales, unpack_codes, unswizzle_scales
from dataplanes.numerics.fp8_rows import FP8Rows
from dataplanes.numerics.nvfp4 import BlockRule, Tile
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

torch.set_num_threads(1)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stress() -> dict[str, Tensor]:
    outliers = gaussian(64, 96)
    outliers[5, 7] = outliers[40, 80] = 1000.0
    falling = gaussian(64, 96) * 2.0 ** -torch.arange(64.0)[:, None]
    return {
        "gaussian": gaussian(64, 96),
        # Two degrees of freedom.
        "student-t": gaussian(64, 96) / ((gaussian(64, 96, seed=1) ** 2 + gaussian(64, 96, seed=2) ** 2) / 2).sqrt(),
        "outliers": outliers,
        "ties": (gaussian(64, 96) * 4).round() / 4,
        "zeros": torch.zeros(32, 32),
        "block scales to zero": falling,
        "one square of zeros": gaussian(32, 32).index_fill_(0, torch.arange(16), 0.0),
    }


STRESS = stress()
stressed = pytest.mark.parametrize("x", STRESS.values(), ids=list(STRESS))


@stressed
def test_quantising_squares_commutes_with_transposing(x: Tensor) -> None:
    """Exactly; with blocks of one row it does not."""
    for rule in (BlockRule.PLAIN, BlockRule.FOUR_OVER_SIX):
        there = NVFP4Tensor.quantise(x, rule, tile=Tile.SQUARE)
        back = NVFP4Tensor.quantise(x.t().contiguous(), rule, tile=Tile.SQUARE)
        assert torch.equal(there.dequantise().t(), back.dequantise())
        assert torch.equal(unpack_codes(there.packed).t(), unpack_codes(back.packed))
    x = gaussian(32, 32)
    there, back = NVFP4Tensor.quantise(x), NVFP4Tensor.quantise(x.t().contiguous())
    assert not torch.equal(there.dequantise().t(), back.dequantise())


def test_squares_have_one_scale_and_the_published_error() -> None:
    x = gaussian(256, 256)
    square = NVFP4Tensor.quantise(x, tile=Tile.SQUARE)
    scales = square.block_scales.view(16, 16, 16)
    assert torch.equal(scales, scales[:, :1].expand_as(scales))
    for found, expected in ((NVFP4Tensor.quantise(x), 0.0953), (square, 0.1113)):
        error = float((found.dequantise() - x).norm() / x.norm())
        assert error == pytest.approx(expected, rel=0.03)


@stressed
@pytest.mark.parametrize("rule", BlockRule, ids=lambda rule: rule.value)
def test_squares_are_those_of_transformer_engine(x: Tensor, rule: BlockRule, transformer_engine: ModuleType) -> None:
    quantiser = transformer_engine.NVFP4QuantizerRef(
        dtype=transformer_engine.reference_utils.Fp4Formats.E2M1,
        columnwise=False,
        quant_tile_shape=(16, 16),
        nvfp4_use_4over6=rule is BlockRule.FOUR_OVER_SIX,
        nvfp4_e4m3_max=256 if rule is BlockRule.FOUR_OVER_SIX else 448,
        nvfp4_4over6_err_mode="MSE",
    )
    expected = quantiser.quantize(x)
    found = NVFP4Tensor.quantise(x, rule, tile=Tile.SQUARE)
    assert torch.equal(found.packed, expected.data)
    assert torch.equal(found.block_scales, expected.scale.view(torch.uint8))


def test_squares_need_whole_rows_and_one_peak() -> None:
    with pytest.raises(ValueError, match="x: 20 rows"):
        nvfp4.quantise_by_peak(torch.zeros(20, 32), torch.ones(1), tile=Tile.SQUARE)
    with pytest.raises(ValueError, match="16 peaks"):
        nvfp4.quantise_by_peak(torch.zeros(16, 32), torch.ones(16, 1), tile=Tile.SQUARE)


def test_the_first_code_is_in_the_low_half_of_its_byte() -> None:
    codes = torch.tensor([[1, 15, 0, 8], [7, 2, 9, 9]], dtype=torch.uint8)
    assert pack_codes(codes).tolist() == [[0xF1, 0x80], [0x27, 0x99]]
    for shape in ((3, 2, 32), (1, 2), (0, 16)):
        some = torch.randint(16, shape, dtype=torch.uint8)
        assert torch.equal(unpack_codes(pack_codes(some)), some)
    with pytest.raises(ValueError, match="codes: 3"):
        pack_codes(torch.zeros(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 12), (1, 1), (130, 5)])
def test_scales_lie_where_cublas_documents_them(rows: int, blocks: int) -> None:
    scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8)
    swizzled = swizzle_scales(scales)
    row_tiles, block_tiles = -(-rows // 128), -(-blocks // 4)
    assert swizzled.shape == (row_tiles * block_tiles * 512,)
    expected = torch.zeros_like(swizzled)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * block_tiles + block // 4
            expected[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] = scales[row, block]
    assert torch.equal(swizzled, expected)
    assert torch.equal(unswizzle_scales(swizzled, rows, blocks), scales)
    with pytest.raises(ValueError, match="swizzled: "):
        unswizzle_scales(swizzled[:-1], rows, blocks)


def test_swizzling_is_what_transformer_engine_undoes(transformer_engine: ModuleType) -> None:
    scales = torch.randint(1, 255, (200, 24), dtype=torch.uint8)
    undone = transformer_engine.NVFP4QuantizerRef._recover_swizzled_scales(
        True, swizzle_scales(scales), 200, 24 * 16, 16
    )
    assert torch.equal(undone, scales)


@pytest.mark.parametrize("rule", BlockRule, ids=lambda rule: rule.value)
def test_a_row_with_its_own_peak_depends_on_no_other(rule: BlockRule) -> None:
    x = gaussian(20, 64) * 10.0 ** gaussian(20, 1, seed=1)
    whole = NVFP4Tensor.quantise(x, rule, per_row=True).dequantise()
    for row in range(20):
        assert torch.equal(
            NVFP4Tensor.quantise(x[row : row + 1], rule, per_row=True).dequantise(), whole[row : row + 1]
        )


@pytest.mark.parametrize("rule", BlockRule, ids=lambda rule: rule.value)
@pytest.mark.parametrize("per_row", [False, True])
def test_a_tensor_keeps_its_shape_and_its_bytes(rule: BlockRule, per_row: bool) -> None:
    x = gaussian(3, 10, 4, 128).bfloat16()
    held = NVFP4Tensor.quantise(x, rule, per_row=per_row)
    values = held.dequantise(torch.bfloat16)
    assert values.shape == x.shape and values.dtype == torch.bfloat16
    assert held.nbytes == x.numel() * 9 // 16 + 4 * (120 if per_row else 1)
    if not per_row:
        assert round(x.nbytes / held.nbytes, 2) in (3.55, 3.56)
    assert torch.allclose(held.units().double() * held.unit, held.dequantise().double().view(120, 128), rtol=1e-6)
    assert torch.equal(held.units() * 1024, (held.units() * 1024).round())


@pytest.mark.parametrize("use_native", [False, True])
def test_parts_that_agree_on_a_peak_are_the_whole(use_native: bool) -> None:
    x = gaussian(40, 64)
    whole = NVFP4Tensor.quantise(x, use_native=use_native)
    parts = [NVFP4Tensor.quantise(part, peak=whole.peak, use_native=use_native) for part in x.split(16)]
    assert torch.equal(torch.cat([part.packed for part in parts]), whole.packed)
    assert torch.equal(torch.cat([part.dequantise() for part in parts]), whole.dequantise())


def test_fp8_rows_have_the_published_error_and_stand_alone() -> None:
    x = gaussian(128, 256)
    held = FP8Rows.quantise(x)
    assert float((held.dequantise() - x).norm() / x.norm()) == pytest.approx(0.0264, rel=0.03)
    assert held.nbytes == 128 * 256 + 4 * 128
    assert torch.equal(FP8Rows.quantise(x[3:5]).dequantise(), held.dequantise()[3:5])
    assert float(held.codes.float().abs().amax(1).min()) == 448.0
    assert torch.equal(FP8Rows.quantise(torch.zeros(2, 16)).dequantise(), torch.zeros(2, 16))
