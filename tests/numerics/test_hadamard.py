"""The transform is orthonormal, its own kind for every head size, and blind to how many rows come together."""

from __future__ import annotations

import pytest
import torch

from dataplanes.numerics import hadamard

torch.set_num_threads(1)

HEAD_DIMS = [1, 4, 64, 80, 96, 100, 128, 576]


@pytest.mark.parametrize(("head_dim", "block"), [(1, 1), (64, 64), (80, 16), (96, 32), (100, 4), (128, 128), (576, 64)])
def test_blocks_are_the_largest_power_of_two_that_fits(head_dim: int, block: int) -> None:
    assert hadamard.block_size(head_dim) == block


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_inverse_undoes_forward_and_norms_are_kept(head_dim: int) -> None:
    x = torch.randn(5, 3, head_dim)
    y = hadamard.forward(x)
    assert torch.allclose(hadamard.inverse(y), x, atol=1e-5)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


def test_it_is_the_matrix_that_it_claims_to_be() -> None:
    matrix = hadamard.forward(torch.eye(64), seed=5)
    assert torch.allclose(matrix.abs(), torch.full((64, 64), 0.125))
    assert torch.equal(matrix @ matrix.t(), torch.eye(64))


def test_an_outlier_is_spread_evenly() -> None:
    x = torch.zeros(1, 64)
    x[0, 7] = 1000.0
    assert torch.equal(hadamard.forward(x).abs(), torch.full((1, 64), 125.0))


def test_seeds_differ_and_stay() -> None:
    device = torch.device("cpu")
    default = hadamard.signs(128, hadamard.DEFAULT_SEED, device)
    assert not torch.equal(default, hadamard.signs(128, 1, device))
    assert set(default.tolist()) == {-1.0, 1.0}
    # Frames on disk depend on these.
    assert "".join("+" if sign > 0 else "-" for sign in default[:24].tolist()) == "++++++--------+--+++--+-"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_alone_and_among_many_gives_the_same_bits(head_dim: int) -> None:
    x = torch.randn(301, head_dim)
    together = hadamard.forward(x)
    for row in (0, 1, 150, 300):
        assert torch.equal(hadamard.forward(x[row : row + 1]), together[row : row + 1])
