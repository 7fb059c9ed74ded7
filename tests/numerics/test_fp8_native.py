"""The kernels of FP8 rows give the bits of torch's own conversions; without a compiler torch serves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dataplanes.numerics.fp8_rows import FP8Rows
from dataplanes.numerics.native import fp8_kernels

torch.set_num_threads(1)

needs_kernels = pytest.mark.skipif(fp8_kernels.load_library() is None, reason="no C compiler on this machine")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = every[every.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = torch.cat([torch.nextafter(ties, values[1:]), torch.nextafter(ties, values[:-1])])
    return {
        "gaussian": gaussian(33, 80),
        "rows of a prime": gaussian(5, 37),
        "keys": gaussian(48, 4, 32),
        "outliers": torch.where(gaussian(33, 80) > 2, 1000 * gaussian(33, 80), gaussian(33, 80)),
        "every number": values.view(1, -1),
        "ties of every number": torch.cat([ties, torch.tensor([448.0])]).view(1, -1),
        "beside ties": torch.cat([beside, torch.tensor([448.0])]).view(1, -1),
        "negative zeros": torch.full((3, 32), -0.0),
        "falling to zero": gaussian(33, 80) * 2.0 ** -torch.arange(80.0),
        "1e-30": gaussian(33, 80) * 1e-30,
        "subnormal": gaussian(33, 80) * 1e-41,
        "large": gaussian(33, 80) * 2.0**90,
        "not finite": torch.tensor([[1.0, float("nan"), float("inf"), -float("inf"), -float("nan"), 448.0]]),
        "transposed": gaussian(6, 4).t(),
        "every second": gaussian(33, 160)[::2, ::2],
        "one": gaussian(1, 1),
        "none": gaussian(0, 16),
    }


TENSORS = tensors()


@needs_kernels
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 2.0**-100 / 448], ids=str)
def test_bits_are_torchs(name: str, dtype: torch.dtype, scale: float | None) -> None:
    x = TENSORS[name].to(dtype)
    known = None if scale is None else torch.tensor([scale])
    kernel = FP8Rows.quantise(x, scale=known)
    reference = FP8Rows.quantise(x, scale=known, use_native=False)
    assert bits_equal(kernel.scale, reference.scale)
    assert torch.equal(kernel.codes.view(torch.uint8), reference.codes.view(torch.uint8))
    for held in (kernel, reference):
        for out in (torch.float32, torch.bfloat16):
            assert bits_equal(held.dequantise(out), held.dequantise(out, use_native=False))
        assert bits_equal(held.units(), held.units(use_native=False))
    assert kernel.dequantise().shape == x.shape


@pytest.mark.parametrize("use_native", [True, False], ids=["kernel", "torch"])
def test_a_scale_that_kernels_would_read_as_something_else_is_refused(use_native: bool) -> None:
    x = TENSORS["gaussian"]
    whole = torch.tensor([0.37])
    for scale in (whole.double(), whole[0], whole.view(1, 1), whole.expand(33, 1), whole.repeat(33), whole.to("meta")):
        with pytest.raises(ValueError, match=r"^scale: .* not contiguous float32 \[1\] or \[33, 1\] on cpu"):
            FP8Rows.quantise(x, scale=scale, use_native=use_native)
    assert FP8Rows.quantise(x, scale=whole.repeat(33, 1), use_native=use_native).scale.shape == (33, 1)


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """So that a negative zero is not a zero; a NaN is as good as another."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    same = (one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())
    return one.shape == other.shape and bool(same.all())


@needs_kernels
def test_every_byte_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(3, 1)
    for scale in (torch.tensor([3.7]), torch.tensor([[3.7], [1e-40], [1e38]])):
        held = FP8Rows(codes=codes, scale=scale, shape=(3, 256))
        assert bits_equal(held.dequantise(), held.dequantise(use_native=False))
        assert bits_equal(held.units(), held.units(use_native=False))


def test_values_are_written_where_they_are_wanted_and_nowhere_else() -> None:
    x = TENSORS["keys"]
    held = FP8Rows.quantise(x)
    out = torch.full((3, *x.shape), 7.0)
    assert held.dequantise_into(out[1]) is not None
    assert torch.equal(out[1], held.dequantise(use_native=False))
    assert bool((out[[0, 2]] == 7.0).all())


def test_an_output_that_does_not_fit_is_refused() -> None:
    held = FP8Rows.quantise(TENSORS["keys"])
    for out in (torch.empty(48, 4, 31), torch.empty(4, 48, 32), torch.empty(48, 4, 64)[..., ::2]):
        with pytest.raises(ValueError, match="out: "):
            held.dequantise_into(out)


def test_without_a_compiler_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    x = TENSORS["gaussian"]
    expected = FP8Rows.quantise(x)
    monkeypatch.setattr(fp8_kernels, "load_library", lambda: None)
    found = FP8Rows.quantise(x)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.dequantise(), expected.dequantise())
