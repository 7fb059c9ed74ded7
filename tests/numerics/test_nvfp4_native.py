"""The kernels of NVFP4 tensors give the reference's bits; without a compiler the reference serves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dataplanes.numerics.native import nvfp4_kernels
from dataplanes.numerics.nvfp4 import BlockRule
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

torch.set_num_threads(1)

needs_kernels = pytest.mark.skipif(nvfp4_kernels.load_library() is None, reason="no C compiler on this machine")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def gaussian(rows: int = 33, columns: int = 80) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    scales = 2.0 ** torch.arange(-12, 4)[:, None]
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = torch.cat([(grid[1:] + grid[:-1]) / 2, torch.tensor([0.0, -0.0, 6.0, 5.9, -6.0, 7e-3, 0.26, -0.24, 3.6])])
    rare = torch.rand(33, 80, generator=generator) < 0.02
    return {
        "gaussian": gaussian(),
        "student-t": gaussian() / ((gaussian() ** 2 + gaussian() ** 2) / 2).sqrt(),
        "outliers": torch.where(rare, 1000 * gaussian(), gaussian()),
        "ties of every code": torch.cat([ties, -ties]).repeat(16, 1) * scales,
        "ties under an outer scale of 1": torch.cat([ties.repeat(16, 3) * scales, torch.full((1, 48), 2688.0)]),
        "ties of block scales": torch.full((16, 64), 6.0) * (1 + torch.arange(64) / 128) * scales,
        "block scales to zero": gaussian() * 2.0 ** -torch.arange(33.0)[:, None],
        "falling within a row": gaussian() * 2.0 ** -(torch.arange(80.0) / 3),
        "zeros": torch.zeros(3, 32),
        "negative zeros": torch.full((3, 32), -0.0),
        "1e-30": gaussian() * 1e-30,
        "1e-38": gaussian() * 1e-38,
        "subnormal": gaussian() * 1e-41,
        "one subnormal": torch.zeros(3, 32).index_fill_(1, torch.tensor([3]), 1e-45),
        "large": gaussian() * 2.0**90,
        "transposed": gaussian(80, 33)[:, :32].t(),
        "every second": gaussian(33, 160)[::2, ::2],
        "one row": gaussian(1, 16),
        "none": gaussian(0, 16),
    }


TENSORS = {name: x[:, : x.shape[1] // 16 * 16] for name, x in tensors().items()}


@needs_kernels
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", BlockRule, ids=lambda rule: rule.value)
@pytest.mark.parametrize("per_row", [False, True], ids=["tensor", "rows"])
def test_bits_are_the_references(name: str, dtype: torch.dtype, rule: BlockRule, per_row: bool) -> None:
    x = TENSORS[name].to(dtype)
    # Nothing has no peak.
    per_row = per_row or not x.numel()
    assert nvfp4_kernels.takes(x)
    kernel = NVFP4Tensor.quantise(x, rule, per_row=per_row)
    reference = NVFP4Tensor.quantise(x, rule, per_row=per_row, use_native=False)
    assert torch.equal(kernel.peak, reference.peak)
    assert torch.equal(kernel.block_scales, reference.block_scales)
    assert torch.equal(kernel.packed, reference.packed)
    for held in (kernel, reference):
        for out in (torch.float32, torch.bfloat16):
            assert torch.equal(bits(held.dequantise(out)), bits(held.dequantise(out, use_native=False)))
        assert torch.equal(bits(held.units()), bits(held.units(use_native=False)))


@pytest.mark.parametrize("use_native", [True, False], ids=["kernel", "torch"])
def test_a_peak_that_kernels_would_read_as_something_else_is_refused(use_native: bool) -> None:
    x = TENSORS["gaussian"]
    whole = x.abs().amax().view(1)
    for peak in (whole.double(), whole[0], whole.view(1, 1), whole.expand(33, 1), whole.repeat(33), whole.to("meta")):
        with pytest.raises(ValueError, match=r"^peak: .* not contiguous float32 \[1\] or \[33, 1\] on cpu"):
            NVFP4Tensor.quantise(x, peak=peak, use_native=use_native)
    assert NVFP4Tensor.quantise(x, peak=whole.repeat(33, 1), use_native=use_native).peak.shape == (33, 1)


def bits(x: Tensor) -> Tensor:
    """So that a negative zero is not a zero."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@needs_kernels
def test_every_byte_of_codes_and_scales_decodes_as_the_reference_does() -> None:
    packed = torch.arange(256).repeat(127, 1).to(torch.uint8)
    scales = torch.arange(127).to(torch.uint8)[:, None].expand(127, 32).contiguous()
    for peak in (torch.tensor([3.7]), torch.rand(127, 1)):
        held = NVFP4Tensor(packed=packed, block_scales=scales, peak=peak, largest_scale=448.0, shape=(127, 512))
        assert torch.equal(bits(held.dequantise()), bits(held.dequantise(use_native=False)))
        assert torch.equal(bits(held.units()), bits(held.units(use_native=False)))


@needs_kernels
def test_any_strides_and_what_kernels_do_not_take() -> None:
    x = torch.randn(32, 4, 48)
    expected = NVFP4Tensor.quantise(x[:, 1:3].contiguous(), use_native=False)
    assert torch.equal(NVFP4Tensor.quantise(x[:, 1:3]).packed, expected.packed)
    assert not nvfp4_kernels.takes(x.half())
    assert torch.equal(NVFP4Tensor.quantise(x.half().float()).packed, NVFP4Tensor.quantise(x.half()).packed)
    with pytest.raises(ValueError, match="x: rows of 20"):
        NVFP4Tensor.quantise(torch.zeros(2, 20))


def test_values_are_written_where_they_are_wanted_and_nowhere_else() -> None:
    x = torch.randn(6, 2, 48)
    held = NVFP4Tensor.quantise(x)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = torch.full((3, *x.shape), 7.0, dtype=dtype)
        held.dequantise_into(out[1])
        assert torch.equal(out[1], held.dequantise(use_native=False).to(dtype))
        assert bool((out[[0, 2]] == 7.0).all())


def test_an_output_that_does_not_fit_is_refused() -> None:
    held = NVFP4Tensor.quantise(torch.randn(6, 2, 48))
    for out in (torch.empty(6, 2, 32), torch.empty(2, 6, 48), torch.empty(6, 2, 96)[..., ::2]):
        with pytest.raises(ValueError, match="out: "):
            held.dequantise_into(out)


def test_without_a_compiler_the_reference_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    x = TENSORS["gaussian"]
    expected = NVFP4Tensor.quantise(x)
    monkeypatch.setattr(nvfp4_kernels, "load_library", lambda: None)
    found = NVFP4Tensor.quantise(x)
    assert not nvfp4_kernels.takes(x)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.dequantise(torch.bfloat16), expected.dequantise(torch.bfloat16))
