"""Per-head budgets: what is kept, what a frame of it carries, and attention over it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.ragged import RaggedKV, decode_ragged, encode_ragged
from dataplanes.kvcodec.retention import Retention, head_budgets, kept_tokens, key_difference

LOSSLESS = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})
FP8 = Configuration({"transform": "none", "quantise": "fp8_e4m3", "code": "none"})


def request(
    layers: int = 3, tokens: int = 90, heads: int = 4, dim: int = 16, value_dim: int = 16, share: float = 0.4
) -> tuple[Tensor, Tensor, RaggedKV]:
    generator = torch.Generator().manual_seed(tokens)
    keys = torch.randn(layers, tokens, heads, dim, generator=generator)
    values = torch.randn(layers, tokens, heads, value_dim, generator=generator)
    importance = torch.rand(layers, heads, generator=generator).double().numpy() ** 3 + 0.01
    retention = Retention(share=share, sink_tokens=2, recent_tokens=5)
    kept = kept_tokens(keys, head_budgets(importance, tokens, retention), retention)
    return keys, values, RaggedKV.retain(keys, values, kept)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 300), st.floats(0.01, 1), st.integers(0, 8),
    st.integers(0, 40), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_budgets_are_whole_bounded_and_the_same_in_every_layer(
    layers: int, heads: int, tokens: int, share: float, sinks: int, recent: int, seed: int
) -> None:
    importance = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, (layers, heads))
    retention = Retention(share=share, sink_tokens=sinks, recent_tokens=recent)
    budgets = head_budgets(importance, tokens, retention)
    least = min(tokens, sinks + recent)
    assert ((budgets >= least) & (budgets <= tokens)).all()
    assert set(budgets.sum(1).tolist()) == {max(round(share * tokens * heads), least * heads)}


def test_a_head_that_matters_more_keeps_more() -> None:
    importance = np.array([[1.0, 2.0, 4.0, 1000.0]])
    budgets = head_budgets(importance, 1000, Retention(share=0.4, sink_tokens=4, recent_tokens=16))
    assert budgets.tolist() == [[86, 171, 343, 1000]]


def test_first_last_and_unlike_tokens_are_kept() -> None:
    keys = torch.randn(8).repeat(1, 60, 2, 1)
    odd = [10, 25, 40]
    keys[:, odd] *= -1
    retention = Retention(share=0.2, sink_tokens=3, recent_tokens=6)
    kept = kept_tokens(keys, np.array([[12, 12]]), retention)
    assert kept[0, 0].nonzero().flatten().tolist() == [0, 1, 2, *odd, *range(54, 60)]
    assert torch.allclose(key_difference(keys[0])[odd], torch.tensor(1.0))


@pytest.mark.parametrize("queries_per_head", [1, 3])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_ragged_attention_is_masked_dense_attention(queries_per_head: int, value_dim: int) -> None:
    keys, values, ragged = request(value_dim=value_dim)
    layers, _, heads, dim = keys.shape
    queries = torch.randn(heads * queries_per_head, dim)
    for layer in range(layers):
        scores = torch.einsum("hgd,thd->hgt", queries.view(heads, queries_per_head, dim), keys[layer]) / math.sqrt(dim)
        scores = scores.masked_fill(~ragged.kept[layer][:, None, :], -torch.inf)
        dense = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[layer]).flatten(0, 1)
        assert (ragged.attend(layer, queries) - dense).abs().max() < 1e-5
    assert ragged.keys.numel() + ragged.values.numel() < 0.41 * (keys.numel() + values.numel())


def test_a_lossless_frame_gives_back_every_bit_and_zeros_elsewhere() -> None:
    keys, values, ragged = request(value_dim=24)
    back = decode_ragged(encode_ragged(ragged, LOSSLESS))
    assert torch.equal(back.kept, ragged.kept)
    assert torch.equal(back.keys, ragged.keys)
    dense_keys, dense_values = back.dense()
    mask = ragged.kept.transpose(1, 2)[..., None]
    assert torch.equal(dense_keys, torch.where(mask, keys, 0.0))
    assert torch.equal(dense_values, torch.where(mask, values, 0.0))


def test_budgets_and_number_formats_multiply() -> None:
    keys, values, ragged = request(tokens=400, share=0.25)
    frame = encode_ragged(RaggedKV(ragged.kept, ragged.keys.bfloat16(), ragged.values.bfloat16()), FP8)
    raw_bytes = 2 * (keys.numel() + values.numel())
    assert raw_bytes / len(frame) > 6
    back = decode_ragged(frame)
    assert (back.keys.float() - ragged.keys).abs().max() < 0.07 * ragged.keys.abs().max()


def test_damage_is_refused() -> None:
    frame = encode_ragged(request()[2], LOSSLESS)
    with pytest.raises(FrameError) as caught:
        decode_ragged(frame[:20])
    assert caught.value.reason is FrameErrorReason.TRUNCATED
    for position in [*range(28), *range(28, len(frame), 97)]:
        damaged = bytearray(frame)
        damaged[position] ^= 0x10
        with pytest.raises(FrameError):
            decode_ragged(bytes(damaged))
    with pytest.raises(FrameError):
        decode_ragged(frame[:-1])


def test_what_does_not_fit_together_is_refused() -> None:
    keys, values, ragged = request()
    uneven = ragged.kept.clone()
    uneven[0, 0] = True
    with pytest.raises(CodecError, match="every layer"):
        RaggedKV.retain(keys, values, uneven)
    with pytest.raises(CodecError, match="vectors"):
        RaggedKV(uneven, ragged.keys, ragged.values)
    with pytest.raises(CodecError, match="queries"):
        ragged.attend(0, torch.randn(5, 16))
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"share": 0.5, "sink_tokens": -1}):
        with pytest.raises(CodecError):
            Retention(**wrong)
    with pytest.raises(CodecError, match="importance"):
        head_budgets(np.array([[0.0, 1.0]]), 10, Retention(share=0.5))
