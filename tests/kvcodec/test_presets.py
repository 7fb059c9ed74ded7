"""Every preset against the definition in its paper, written here a second time and as simply as possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec import CodecError, HeadProfile, KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.kvcodec.bit_allocation import allocate_bits
from dataplanes.kvcodec.presets import PRESETS, nvfp4_preset
from dataplanes.numerics.nvfp4 import BlockRule

torch.set_num_threads(1)

LAYERS, HEADS, DIM, TOKENS, PAGE = 30, 3, 64, 320, 16
LAYOUT = KVLayout.keys_then_values(layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=KVDtype.BFLOAT16, page_tokens=PAGE)
GENERATOR = np.random.default_rng(0)
PROFILE = HeadProfile(
    key=GENERATOR.lognormal(0, 1.5, (LAYERS, HEADS)), value=GENERATOR.lognormal(0, 1.5, (LAYERS, HEADS))
)
ARTEFACTS = {PROFILE.profile_id: PROFILE}
ROUNDING = 2.0**-8
"""Of a decoded value to bfloat16."""


def make_kv() -> Tensor:
    """Channels of different means and widths, as keys have."""
    generator = torch.Generator().manual_seed(1)
    shape = (2 * LAYERS, 1, HEADS, DIM)
    width, mean = torch.randn(shape, generator=generator).exp(), torch.randn(shape, generator=generator)
    return (torch.randn(2 * LAYERS, TOKENS, HEADS, DIM, generator=generator) * width + mean).bfloat16()


KV = make_kv()


def decoded(name: str, layout: KVLayout = LAYOUT, planes: Tensor = KV) -> tuple[Tensor, int]:
    """Keys and values after the preset's frame, float32, and the frame's size."""
    configuration = PRESETS[name].configuration(layout, PROFILE.profile_id)
    codec = KVCodec(configuration, layout, artefacts=ARTEFACTS)
    frame = codec.encode(planes, first_token=0, request_tokens=planes.shape[1])
    assert len(frame) <= codec.max_frame_bytes(planes.shape[1], 0)
    result = decode_frame(frame, artefacts=ARTEFACTS)
    assert not result.header.is_raw
    return torch.as_tensor(result.planes).float(), len(frame)


def most_distinct(x: Tensor, dim: int) -> Tensor:
    """The largest number of different values in any slice along `dim`, of each plane and head."""
    ordered = x.sort(dim).values
    return (ordered.diff(dim=dim) != 0).sum(dim) + 1


def test_kivi_quantises_keys_by_channel_and_values_by_token_and_keeps_the_window() -> None:
    got, size = decoded("kivi")
    assert torch.equal(got[:, -128:], KV[:, -128:].float())
    kept = TOKENS - 128
    source, got = KV[:, :kept].float(), got[:, :kept]
    for planes, shape, dim in (
        (slice(0, LAYERS), (LAYERS, kept // 32, 32, HEADS, DIM), 2),
        (slice(LAYERS, None), (LAYERS, kept, HEADS, DIM // 32, 32), 4),
    ):
        group = source[planes].reshape(shape)
        error = (got[planes].reshape(shape) - group).abs()
        step = (group.amax(dim, keepdim=True) - group.amin(dim, keepdim=True)) / (4 - 1)
        assert (error <= step / 2 + group.abs() * ROUNDING).all()
        assert most_distinct(got[planes].reshape(shape), dim).max() <= 4
    # Two bits and a group's 32 bits of scale and offset for 32 elements; lossless the rest.
    expected = KV[:, :kept].numel() * 3 / 8 + KV[:, kept:].numel() * 2
    assert size == pytest.approx(expected, rel=0.01)


def test_cachegen_has_a_step_per_token_and_fewer_bins_in_later_layers() -> None:
    got, _ = decoded("cachegen")
    for plane in range(2 * LAYERS):
        is_fine = plane < 10 or LAYERS <= plane < LAYERS + 2
        last = (32 if is_fine else 16) // 2 - 1
        x = KV[plane].float().reshape(TOKENS, -1)
        largest = x.abs().amax(1, keepdim=True)
        reference = (x * last / largest).round() * largest / last
        error = (got[plane].reshape(TOKENS, -1) - x).abs()
        assert (error <= (largest / last / 2) * (1 + 2.0**-6) + x.abs() * ROUNDING).all()
        assert ((got[plane].reshape(TOKENS, -1) - reference).abs() <= largest / last * 1.02).all()
        counts = most_distinct(got[plane].reshape(TOKENS, -1), 1)
        assert last < counts.max() <= 2 * last + 1


@pytest.mark.parametrize(
    ("name", "low_percent", "levels"), [("kvserve", 80, (12, 6, 8, 4)), ("kvserve_top", 90, (6, 6, 6, 4))]
)
def test_kvserve_gives_fewer_levels_to_the_heads_that_score_lowest(
    name: str, low_percent: int, levels: tuple[int, int, int, int]
) -> None:
    planes = KV if name == "kvserve" else KV[:, :64]
    got, _ = decoded(name, planes=planes)
    for part, table, (high, low) in ((0, PROFILE.key, levels[:2]), (1, PROFILE.value, levels[2:])):
        threshold = np.sort(table, axis=None)[round(low_percent / 100 * table.size)]
        is_low = torch.from_numpy(table < threshold)
        assert int(is_low.sum()) == round(low_percent / 100 * table.size)
        wanted = torch.where(is_low, low, high)
        values = got[part * LAYERS : (part + 1) * LAYERS]
        if name == "kvserve":
            # Ranges: a channel over 256 tokens; a token's channels in one head, at most.
            counts = most_distinct(values[:, :256], 1).amax(-1) if part == 0 else most_distinct(values, 3).amax(1)
            assert (counts <= wanted).all()
            assert ((counts > low) | is_low).all()
        else:
            assert (values - planes[part * LAYERS : (part + 1) * LAYERS].float()).abs().mean() < 1


def test_kvserve_spans_the_heads_of_a_token_with_one_range() -> None:
    table = np.ones((LAYERS, HEADS))
    table[:, 0] = 2
    profile = HeadProfile(key=table, value=table)
    configuration = Configuration(
        {**PRESETS["kvserve"].configuration(LAYOUT, profile.profile_id), "value_low_percent": 67, "code": "none"}
    )
    artefacts = {profile.profile_id: profile}
    frame = KVCodec(configuration, LAYOUT, artefacts=artefacts).encode(KV, first_token=0)
    got = torch.as_tensor(decode_frame(frame, artefacts=artefacts).planes)[LAYERS:]
    low = got[:, :, 1:].flatten(2)
    assert most_distinct(low.float(), 2).max() <= 4


def test_splitzip_is_lossless_and_as_small_as_published() -> None:
    got, size = decoded("splitzip")
    assert torch.equal(got, KV.float())
    assert LAYOUT.raw_bytes(TOKENS) / size > 1.29


def test_ratequant_hands_out_the_bits_that_its_closed_form_says() -> None:
    got, _ = decoded("ratequant")
    kept = TOKENS - 128
    assert torch.equal(got[:, kept:], KV[:, kept:].float())
    for part, table in ((0, PROFILE.key), (1, PROFILE.value)):
        bits = allocate_bits(table, 2.5, 5)
        assert bits.mean() == 2.5
        values = got[part * LAYERS : (part + 1) * LAYERS, :kept]
        if part == 0:
            counts = most_distinct(values.reshape(LAYERS, -1, 32, HEADS, DIM), 2).amax((1, 3))
        else:
            counts = most_distinct(values.reshape(LAYERS, kept, HEADS, -1, 32), 4).amax((1, 3))
        assert (counts <= torch.from_numpy(2**bits)).all()
        assert (counts[torch.from_numpy(bits == bits.max())] > 2 ** int(bits.min())).all()


def test_turboquant_has_the_published_distortion_whatever_the_vectors_are() -> None:
    """0.009 of the squared norm at 4 bits (section 1 of the paper), on Gaussian vectors and on one-hot-like ones."""
    outliers = torch.randn(KV.shape, generator=torch.Generator().manual_seed(2))
    outliers[..., 5] *= 8
    for planes in (torch.randn(KV.shape, generator=torch.Generator().manual_seed(3)).bfloat16(), outliers.bfloat16()):
        got, _ = decoded("turboquant", planes=planes)
        distortion = (got - planes.float()).square().sum() / planes.float().square().sum()
        assert distortion == pytest.approx(0.0095, rel=0.15)


def test_fp8_keeps_three_mantissa_bits_and_nvfp4_one() -> None:
    got, size = decoded("fp8")
    largest = KV.float().abs().amax(-1, keepdim=True)
    assert ((got - KV.float()).abs() <= KV.float().abs() / 16 + largest * 2.0**-18 + KV.float().abs() * ROUNDING).all()
    assert size == pytest.approx(KV.numel() * (1 + 2 / DIM), rel=0.01)
    got, size = decoded("nvfp4")
    blocks, source = got.reshape(-1, 16), KV.float().reshape(-1, 16)
    assert ((blocks - source).abs() <= source.abs().amax(1, keepdim=True) / 6 * 1.15).all()
    assert size == pytest.approx(KV.numel() * (4 + 8 / 16 + 16 / (HEADS * DIM)) / 8, rel=0.01)


def test_nvfp4_by_the_rule_of_4over6_loses_less_in_as_many_bytes() -> None:
    sizes, errors = [], []
    for rule in BlockRule:
        configuration = Configuration(nvfp4_preset(LAYOUT, block_rule=rule))
        frame = KVCodec(configuration, LAYOUT).encode(KV, first_token=0)
        sizes.append(len(frame))
        errors.append(float((torch.as_tensor(decode_frame(frame).planes).float() - KV.float()).square().sum()))
    assert abs(sizes[1] - sizes[0]) < 64
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"block_rule": "5over6"}, "block_rule: '5over6' is none of"),
        ({"block_rule": 4}, "block_rule: 4 is none of"),
        ({"quantise": "fp8_e4m3", "code": "none", "block_rule": "4over6"}, "block_rule: unknown, or inactive here"),
    ],
)
def test_a_block_rule_is_one_of_two_and_of_nvfp4_alone(change: dict[str, Value], problem: str) -> None:
    plain = PRESETS["nvfp4"].configuration(LAYOUT)
    with pytest.raises(CodecError, match=problem):
        KVCodec(Configuration({**plain, **change}), LAYOUT)
    named = KVCodec(Configuration({**plain, "block_rule": "plain"}), LAYOUT).encode(KV, first_token=0)
    unnamed = KVCodec(plain, LAYOUT).encode(KV, first_token=0)
    first, second = (torch.as_tensor(decode_frame(frame).planes) for frame in (named, unnamed))
    assert torch.equal(first, second)


LAYOUTS = [
    KVLayout.keys_then_values(layers=12, heads=2, head_dim=128, dtype=KVDtype.BFLOAT16, page_tokens=64),
    KVLayout.keys_then_values(layers=2, heads=1, head_dim=100, dtype=KVDtype.FLOAT16, page_tokens=1),
    KVLayout.keys_then_values(layers=11, heads=3, head_dim=80, dtype=KVDtype.FLOAT32, page_tokens=48),
    KVLayout.latents(layers=3, latent_dim=576, dtype=KVDtype.BFLOAT16, page_tokens=64),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"head_dim {layout.planes[0].head_dim}")
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_and_tuning_fits_every_layout(name: str, layout: KVLayout) -> None:
    layers, heads = len(layout.planes) // len(layout.roles), layout.planes[0].heads
    table = np.random.default_rng(1).lognormal(0, 1, (layers, heads))
    profile = HeadProfile(key=table, value=table)
    artefacts = {profile.profile_id: profile}
    tokens = 70
    planes = torch.randn(len(layout.planes), tokens, heads, layout.planes[0].head_dim).to(layout.dtype.torch_dtype)
    tunings = PRESETS[name].tunings(layout, profile.profile_id)
    assert len(set(tunings)) == len(tunings) >= 3
    assert tunings[0] == PRESETS[name].configuration(layout, profile.profile_id)
    for configuration in tunings[:: max(len(tunings) // 3, 1)]:
        codec = KVCodec(configuration, layout, artefacts=artefacts)
        frame = codec.encode(planes, first_token=0, request_tokens=tokens)
        got = torch.as_tensor(decode_frame(frame, artefacts=artefacts).planes)
        bounds = codec.error_bound(planes, first_token=0, request_tokens=tokens)
        assert ((got.double() - planes.double()).abs() <= torch.stack(bounds).double()).all()


def test_a_preset_that_needs_a_profile_says_so() -> None:
    for name, preset in PRESETS.items():
        if preset.needs_head_profile:
            with pytest.raises(CodecError, match="head profile"):
                preset.configuration(LAYOUT)
        else:
            assert "head_profile" not in preset.configuration(LAYOUT), name


def test_ids_of_presets_stay_what_they_are() -> None:
    ids = {name: preset.configuration(LAYOUT, "0" * 16).config_id for name, preset in PRESETS.items()}
    assert ids["kivi"] == "c1b28ec429b0f6a0"
    assert ids["cachegen"] == "d82f9a72e16d3886"
