"""NVFP4 beside torchao and modelopt, where they are installed.

They divide in another order than Transformer Engine and clamp block scales from below, so that exact ties and tiny
blocks come out differently: scales are equal on normal data, codes but for a few neighbours, values within a code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dataplanes.numerics.code_layout import unpack_codes
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

torch.set_num_threads(1)

# On import both warn about CUDA libraries and torch's own changes.
pytestmark = pytest.mark.filterwarnings("default")

Quantised = tuple[Tensor, Tensor, Tensor]
"""Packed codes, block scales as bytes, values."""


def by_torchao(x: Tensor) -> Quantised:
    module: Any = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    found = module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=module.per_tensor_amax_to_scale(x.abs().amax()))
    return found.qdata, found.scale.view(torch.uint8), found.dequantize(torch.float32)


def by_modelopt(x: Tensor) -> Quantised:
    module: Any = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor", exc_type=ImportError)
    found, scale, double_scale = module.NVFP4QTensor.quantize(x, 16)
    values = found.dequantize(dtype=torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16})
    return found._quantized_data, scale.view(torch.uint8), values


@pytest.mark.parametrize("library", [by_torchao, by_modelopt])
@pytest.mark.parametrize("tailed", [False, True], ids=["gaussian", "student-t"])
def test_libraries_differ_in_ties_only(library: Callable[[Tensor], Quantised], tailed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, *tail = (torch.randn(512, 512, generator=generator) for _ in range(4))
    if tailed:
        x = x / (sum(part.square() for part in tail) / 3).sqrt()
    packed, scales, values = library(x)
    ours = NVFP4Tensor.quantise(x)
    assert torch.equal(scales, ours.block_scales)
    codes, our_codes = unpack_codes(packed), unpack_codes(ours.packed)
    # A negative zero is a zero.
    differing = (codes != our_codes) & ~((codes & 7 == 0) & (our_codes & 7 == 0))
    assert int(differing.sum()) < 200
    assert (((codes & 7).int() - (our_codes & 7).int()).abs()[differing] == 1).all()
    off = (ours.dequantise() - values).abs()[~differing]
    assert float(off.max()) <= 1e-5 * float(x.abs().max())
