"""Switchable layers: bf16 stays what it was, variants come when first used, a refused switch changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from controld.contract.errors import FieldError
from dataplanes.longlive.linear.backend import LinearBackend
from dataplanes.longlive.linear.emulated import EmulatedBackend
from dataplanes.longlive.linear.precision import BF16, LinearPrecision, Precision
from dataplanes.longlive.linear.switchable import SwitchableLinear, convert_linears, make_linear, set_precision

torch.set_num_threads(1)

W4A4 = LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4)
FP8 = LinearPrecision(weights=Precision.FP8, activations=Precision.FP8)
BACKEND = EmulatedBackend()


def emulated(precision: LinearPrecision) -> LinearBackend:
    return BACKEND


def make_model() -> nn.Module:
    torch.manual_seed(0)
    block = nn.ModuleDict(
        {"qkv": nn.Linear(32, 96), "norm1": nn.Linear(32, 32), "ffn": nn.Sequential(nn.Linear(32, 64))}
    )
    parts = {name: nn.Linear(32, 32) for name in ("text_embedding", "patch_embedding", "time_projection", "head")}
    return nn.ModuleDict({**parts, "blocks": nn.ModuleList([block]), "headwise": nn.Linear(32, 32)})


def test_embeddings_head_and_norms_stay_and_names_too() -> None:
    model = make_model()
    names = set(model.state_dict())
    layers = convert_linears(model, emulated)
    assert set(layers) == {"blocks.0.qkv", "blocks.0.ffn.0", "headwise"}
    assert set(model.state_dict()) == names
    assert type(model.get_submodule("head")) is nn.Linear
    assert model.get_submodule("blocks.0.qkv") is layers["blocks.0.qkv"]


def test_bf16_is_the_layer_that_it_was_and_a_variant_is_the_back_ends() -> None:
    linear, x = nn.Linear(32, 24).bfloat16(), torch.randn(5, 32).bfloat16()
    expected = linear(x)
    layer = make_linear(linear, BF16, emulated)
    assert torch.equal(layer(x), expected)
    assert layer.backend_name == "bf16"
    layer.set_precision(W4A4)
    assert layer.backend_name == "torch_emulated"
    weight = BACKEND.quantise_weight(linear.weight.detach(), W4A4)
    assert torch.equal(layer(x), BACKEND.linear(x, weight, linear.bias))
    layer.set_precision(BF16)
    assert torch.equal(layer(x), expected)


def test_variants_are_built_once_and_released() -> None:
    built: list[LinearPrecision] = []

    def counted(precision: LinearPrecision) -> LinearBackend:
        built.append(precision)
        return BACKEND

    layer = make_linear(nn.Linear(64, 64).bfloat16(), BF16, counted)
    assert layer.held_bytes() == layer.weight_bytes() == 64 * 64 * 2
    for precision in (W4A4, FP8, BF16, W4A4):
        layer.set_precision(precision)
    assert built == [W4A4, FP8]
    fp8_bytes, fp4_bytes = 64 * 64 + 64 * 4, 64 * 64 * 9 // 16 + 4
    assert layer.weight_bytes() == fp4_bytes
    assert layer.held_bytes() == 64 * 64 * 2 + fp8_bytes + fp4_bytes
    layer.release_unused()
    assert layer.held_bytes() == 64 * 64 * 2 + fp4_bytes
    layer.set_precision(FP8)
    assert built == [W4A4, FP8, FP8]


def test_new_weights_are_what_is_computed_with() -> None:
    layer = make_linear(nn.Linear(32, 24), W4A4, emulated)
    other = nn.Linear(32, 24)
    layer.load_state_dict(other.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), make_linear(other, W4A4, emulated)(x))
    assert layer.precision == W4A4
    layer.bfloat16()
    assert torch.equal(layer(x.bfloat16()), make_linear(other.bfloat16(), W4A4, emulated)(x.bfloat16()))


def test_a_model_switches_whole_or_not_at_all() -> None:
    fits, does_not_fit = nn.Linear(32, 32), nn.Linear(40, 32)
    layers = [SwitchableLinear(linear, emulated) for linear in (fits, does_not_fit)]
    set_precision(layers, FP8)
    with pytest.raises(FieldError, match="multiple of 16"):
        set_precision(layers, W4A4)
    assert [layer.precision for layer in layers] == [FP8, FP8]
    x = torch.randn(2, 32)
    assert torch.equal(layers[0](x), make_linear(fits, FP8, emulated)(x))
