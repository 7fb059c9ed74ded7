"""Symmetric levels and the Gaussian codebook."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.numerics import absmax, lloyd_max
from dataplanes.numerics.bounds import absmax_bound, lloyd_max_bound

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("levels", "distortion"), [(2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497), (32, 0.002505)]
)
def test_the_codebook_has_the_least_possible_error(levels: int, distortion: float) -> None:
    """Of a unit Gaussian (Max 1960, table I), by integration over a fine grid."""
    entries = torch.tensor(lloyd_max.codebook(levels), dtype=torch.float64)
    assert torch.equal(entries, -entries.flip(0))
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    edges = (entries[1:] + entries[:-1]) / 2
    error = (x - entries[torch.bucketize(x, edges)]).square() * density
    assert torch.trapezoid(error, x) == pytest.approx(distortion, rel=1e-3)


@pytest.mark.parametrize("levels", [2, 3, 11, 64, pytest.param(255, marks=pytest.mark.slow), 256])
def test_entries_are_in_order_and_on_a_coarse_grid(levels: int) -> None:
    entries = lloyd_max.codebook(levels)
    assert len(entries) == levels
    assert all(left < right for left, right in pairwise(entries))
    assert all((entry * 4096).is_integer() for entry in entries)


@settings(deadline=None, max_examples=150)
@given(
    levels=st.integers(2, 64),
    dim=st.sampled_from([1, 3, 64, 96, 100, 576]),
    scale=st.sampled_from([0.0, 1e-40, 1e-6, 1.0, 1e4, 2.0**95]),
    outlier=st.sampled_from([1.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_every_element_lies_within_its_bound(levels: int, dim: int, scale: float, outlier: float, seed: int) -> None:
    x = (torch.randn(2, 3, 2, dim, generator=torch.Generator().manual_seed(seed)) * scale).clamp(-(2.0**95), 2.0**95)
    x[..., 0] = (x[..., 0].double() * outlier).clamp(-(2.0**95), 2.0**95).float()
    indices, step = lloyd_max.quantise(x, levels)
    error = (lloyd_max.dequantise(indices, step, levels).double() - x.double()).abs()
    assert (error <= lloyd_max_bound(x, levels).double()).all()
    if levels >= absmax.SMALLEST_BINS:
        flat = x.flatten(2)
        symbols, step = absmax.quantise(flat, levels, dim=2)
        assert symbols.max() < absmax.alphabet(levels)
        error = (absmax.dequantise(symbols, step, levels).double() - flat.double()).abs()
        assert (error <= absmax_bound(flat, levels, dim=2).double()).all()


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 300), dim=st.sampled_from([1, 5, 64, 100, 128]), seed=st.integers(0, 2**31))
def test_a_vector_has_the_same_scale_alone_and_among_others(rows: int, dim: int, seed: int) -> None:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    together = lloyd_max.scale_of(x)
    assert all(torch.equal(lloyd_max.scale_of(x[row : row + 1]), together[row : row + 1]) for row in range(rows))
    assert torch.equal(lloyd_max.scale_of(x.t().contiguous().t()), together)


def test_zero_stays_zero_under_symmetric_levels_and_unknown_indices_stay_in_the_codebook() -> None:
    symbols, step = absmax.quantise(torch.zeros(2, 8), 16, dim=1)
    assert not absmax.dequantise(symbols, step, 16).any()
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    got = lloyd_max.dequantise(torch.tensor([[255]], dtype=torch.uint8), one, 6)
    assert got.item() == lloyd_max.codebook(6)[-1]
