"""Stochastic rounding is right on average, by three standard errors, and drawn from the generator that it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dataplanes.numerics import nvfp4, stochastic

torch.set_num_threads(1)

DRAWS = 1000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(codes: Tensor) -> Tensor:
    return nvfp4.code_values(codes.device)[codes.int()].double()


def test_every_value_is_met_on_average() -> None:
    """All values at once: the mean of their errors in standard errors; and each within five."""
    values = torch.linspace(-6, 6, 193)
    draws = decoded(stochastic.encode(values.expand(DRAWS, -1), generator()))
    off = draws.mean(0) - values.double()
    standard_error = draws.std(0) / DRAWS**0.5
    on_grid = standard_error == 0
    assert torch.equal(off[on_grid], torch.zeros_like(off[on_grid])) and 0 < int(on_grid.sum()) < 20
    assert (off[~on_grid].abs() <= 5 * standard_error[~on_grid]).all()
    together = off[~on_grid] * values[~on_grid].sign()
    assert abs(float(together.sum())) <= 3 * float(standard_error.square().sum().sqrt())


def test_a_value_goes_to_its_two_neighbours_only() -> None:
    codes = stochastic.encode(torch.tensor([2.25, -4.5, 0.25, 6.0, 7.0]).expand(DRAWS, -1), generator())
    assert [codes[:, index].unique().tolist() for index in range(5)] == [[4, 5], [14, 15], [0, 1], [7], [7]]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_tensors_are_unbiased_peaks_of_blocks_included(per_row: bool, spread: float) -> None:
    x = torch.randn(4, 64, generator=generator(1)) * 10.0 ** (-spread * torch.rand(4, 64, generator=generator(2)))
    many = x.repeat(DRAWS, 1)
    peak = many.abs().amax(1, keepdim=True) if per_row else many.abs().amax().view(1)
    codes, scales = stochastic.quantise_by_peak(many, peak, generator())
    draws = nvfp4.dequantise_by_peak(codes, scales, peak).view(DRAWS, *x.shape).double()
    off = draws.mean(0) - x.double()
    gap = neighbours_apart(x, scales[:4], peak[:4])
    share = (x.double().abs() / gap).frac()
    standard_error = gap * (share * (1 - share) / DRAWS).sqrt() + 1e-6 * x.abs().double()
    # What is met once or twice in all draws is not yet Gaussian.
    assert (off.abs() <= 5 * standard_error + 5 * gap / DRAWS).all()
    assert abs(float((off * x.sign()).sum() / standard_error.square().sum().sqrt())) <= 3
    nearest = nvfp4.dequantise_by_peak(*nvfp4.quantise_by_peak(x, peak[:4]), peak[:4]).double() - x.double()
    assert not (nearest.abs() <= 5 * standard_error + 5 * gap / DRAWS).all()


def neighbours_apart(x: Tensor, scales: Tensor, peak: Tensor) -> Tensor:
    """Distance of the two codes between which each value lies; a whole multiple of it is a code."""
    step = (scales.view(torch.float8_e4m3fn).double() * peak.double() / 2688).repeat_interleave(16, 1)
    size = x.double().abs() / step
    return step * torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))


def test_the_generator_decides() -> None:
    x = torch.randn(4, 32, generator=generator(3))
    peak = x.abs().amax().view(1)
    first, again, other = (stochastic.quantise_by_peak(x, peak, generator(seed))[0] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("x", [torch.zeros(2, 32), torch.full((2, 32), 1e-41), torch.full((2, 32), 2688.0)])
def test_extremes_stay_finite_and_in_place(x: Tensor) -> None:
    peak = x.abs().amax().view(1)
    values = nvfp4.dequantise_by_peak(*stochastic.quantise_by_peak(x, peak, generator()), peak)
    assert torch.allclose(values, x, rtol=1e-5, atol=1e-40)
    with pytest.raises(ValueError, match="x: rows of 20"):
        stochastic.quantise_by_peak(torch.zeros(2, 20), peak, generator())
