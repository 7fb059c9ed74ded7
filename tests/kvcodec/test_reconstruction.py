from __future__ import annotations

import math

import pytest
import torch

from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from dataplanes.kvcodec.layout import ChunkPlanes, KVDtype, KVLayout, Plane, PlaneRole
from dataplanes.kvcodec.reconstruction import chunk_error, reconstruction_error


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_relative_rms_error_of_the_worse_table() -> None:
    keys, values = 10 * noise(4, 16, 2, 8), noise(4, 16, 2, 8, seed=1)
    near, far = keys + 0.5 * noise(4, 16, 2, 8, seed=2), values + 0.1 * noise(4, 16, 2, 8, seed=3)
    of_keys = math.sqrt(float((near - keys).double().square().sum() / keys.double().square().sum()))
    of_values = math.sqrt(float((far - values).double().square().sum() / values.double().square().sum()))
    assert of_values > of_keys
    assert reconstruction_error([[(keys, near)], [(values, far)]]) == pytest.approx(of_values, rel=1e-6)
    one_by_one = [(keys[index], near[index]) for index in range(4)]
    assert reconstruction_error([one_by_one]) == pytest.approx(of_keys, rel=1e-6)


def test_it_is_exactly_zero_only_where_every_value_came_back() -> None:
    plane = noise(16, 2, 8).to(torch.bfloat16)
    assert reconstruction_error([[(plane, plane.clone())]]) == 0.0
    other = plane.clone()
    other[3, 1, 2] *= 1.01
    assert 0 < reconstruction_error([[(plane, other)]]) < 0.01
    assert reconstruction_error([]) == 0.0


def test_infinities_and_nans_that_came_back_are_no_error_and_lost_ones_are_the_largest() -> None:
    plane = noise(16, 2, 8)
    plane[0, 0, 0], plane[1, 0, 0] = math.inf, math.nan
    assert reconstruction_error([[(plane, plane.clone())]]) == 0.0
    lost = plane.clone()
    lost[0, 0, 0] = 1.0
    assert reconstruction_error([[(plane, lost)]]) == MAX_RECONSTRUCTION_ERROR
    spoilt = noise(16, 2, 8)
    spoilt[2, 0, 0] = math.nan
    assert reconstruction_error([[(noise(16, 2, 8), spoilt)]]) == MAX_RECONSTRUCTION_ERROR
    assert reconstruction_error([[(torch.zeros(4, 1, 1), torch.ones(4, 1, 1))]]) == MAX_RECONSTRUCTION_ERROR


def test_exact_planes_of_a_table_count_among_its_squares() -> None:
    first, second = noise(16, 2, 8), noise(16, 2, 4, seed=1)
    off = second + 0.1
    alone = reconstruction_error([[(second, off)]])
    assert reconstruction_error([[(first, first), (second, off)]]) < 0.8 * alone


def test_a_chunk_of_a_pool_is_compared_where_it_lies() -> None:
    layout = KVLayout(
        planes=(Plane(PlaneRole.KEY, 2, 8), Plane(PlaneRole.KEY, 2, 4), Plane(PlaneRole.VALUE, 2, 8)),
        dtype=KVDtype.FLOAT32,
        page_tokens=1,
    )
    pool = [noise(32, plane.heads, plane.head_dim, seed=index) for index, plane in enumerate(layout.planes)]
    rows = torch.tensor([7, 3, 30])
    decoded = [plane[rows].clone() for plane in pool]
    source = layout.chunk(pool, rows)
    assert chunk_error(layout, source, ChunkPlanes(decoded, None)) == 0.0
    decoded[2] *= 1.5
    assert chunk_error(layout, source, ChunkPlanes(decoded, None)) == pytest.approx(0.5, rel=1e-6)
    decoded[1] *= -1
    assert 0.5 < chunk_error(layout, source, ChunkPlanes(decoded, None)) < 2.0
