"""The transform of 16 keeps products, and its published signs are those of the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from dataplanes.numerics import hadamard16

torch.set_num_threads(1)

CPU = torch.device("cpu")
SIGNS = [
    pytest.param(hadamard16.published_signs(CPU), id="published"),
    pytest.param(hadamard16.seeded_signs(7, CPU), id="seeded"),
]


@pytest.mark.parametrize("signs", SIGNS)
def test_products_are_kept_and_the_inverse_undoes(signs: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 64, generator=generator), torch.randn(7, 64, generator=generator)
    rotated = hadamard16.forward(x, signs)
    assert torch.allclose(rotated @ hadamard16.forward(w, signs).t(), x @ w.t(), atol=1e-4)
    assert torch.allclose(hadamard16.inverse(rotated, signs), x, atol=1e-5)
    matrix = hadamard16.forward(torch.eye(16), signs)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert torch.equal(matrix[:, 0], signs / 4)


def test_an_outlier_is_spread_over_its_block_alone() -> None:
    x = torch.zeros(1, 48)
    x[0, 20] = 100.0
    rotated = hadamard16.forward(x, hadamard16.published_signs(CPU)).abs()
    assert rotated[0].tolist() == [0.0] * 16 + [25.0] * 16 + [0.0] * 16


def test_signs_are_published_or_seeded() -> None:
    assert not torch.equal(hadamard16.seeded_signs(1, CPU), hadamard16.seeded_signs(2, CPU))
    assert torch.equal(hadamard16.seeded_signs(1, CPU), hadamard16.seeded_signs(1, CPU))
    with pytest.raises(ValueError, match="x: rows of 40"):
        hadamard16.forward(torch.zeros(2, 40), hadamard16.published_signs(CPU))


def test_the_matrix_is_that_of_transformer_engine(transformer_engine: ModuleType) -> None:
    quantiser = transformer_engine.NVFP4QuantizerRef(
        dtype=transformer_engine.reference_utils.Fp4Formats.E2M1,
        columnwise=False,
        with_rht=True,
        with_random_sign_mask=True,
    )
    x = torch.eye(16)
    assert torch.equal(quantiser._apply_rht(x), hadamard16.forward(x, hadamard16.published_signs(CPU)))
