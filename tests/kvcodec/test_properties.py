"""Properties over shapes, strides, dtypes and hostile values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import (
    CodecError,
    DecodedFrame,
    FrameError,
    FrameErrorReason,
    HeadProfile,
    KVCodec,
    KVDtype,
    KVLayout,
    Plane,
    PlaneRole,
    decode_frame,
    peek_header,
)
from dataplanes.kvcodec.codec import Buffer, Planes
from dataplanes.kvcodec.layout import flat_bytes
from dataplanes.kvcodec.parameters import (
    COUNTED_FORMATS,
    GROUPED_FORMATS,
    PROFILED_FORMATS,
    SPLIT_FORMATS,
    Quantise,
)

torch.set_num_threads(1)

HEAD_DIMS = (1, 64, 80, 96, 100, 128, 576)
HOSTILE = ("normal", "zero", "constant", "subnormal", "negative_zero", "large", "outlier", "five_to_six")


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    dtype = draw(st.sampled_from(KVDtype))
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    kind = draw(st.sampled_from(["mha", "mqa", "mla", "mixed", "interleaved"]))
    if kind == "mla":
        return KVLayout.latents(layers=2, latent_dim=576, dtype=dtype, page_tokens=page_tokens)
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    heads = 1 if kind == "mqa" else draw(st.integers(1, 3))
    if kind == "interleaved":
        planes = (Plane(PlaneRole.KEY, heads, head_dim), Plane(PlaneRole.VALUE, heads, head_dim)) * 2
        return KVLayout(planes=planes, dtype=dtype, page_tokens=page_tokens)
    if kind == "mixed":
        other = draw(st.sampled_from(HEAD_DIMS))
        planes = tuple(
            Plane(role, heads, size) for size in (head_dim, other) for role in (PlaneRole.KEY, PlaneRole.VALUE)
        )
        return KVLayout(planes=planes, dtype=dtype, page_tokens=page_tokens)
    return KVLayout.keys_then_values(layers=2, heads=heads, head_dim=head_dim, dtype=dtype, page_tokens=page_tokens)


@st.composite
def configurations(draw: st.DrawFn, layout: KVLayout, *, lossy: bool) -> Configuration:
    if not lossy:
        code = draw(st.sampled_from(["none", "zstd", "entropy", "splitzip"]))
        return Configuration({"transform": "none", "quantise": "none", "code": code})
    quantise = draw(st.sampled_from([member for member in Quantise if member not in (Quantise.NONE, Quantise.UNIFORM)]))
    coders = ["none", "entropy", "zstd", "splitzip" if quantise is Quantise.FP8_E4M3 else "bitpack"]
    values: dict[str, str | int | float] = {
        "transform": "hadamard" if quantise is Quantise.LLOYD_MAX else draw(st.sampled_from(["none", "hadamard"])),
        "quantise": quantise.value,
        "code": draw(st.sampled_from(coders)),
    }
    if draw(st.booleans()):
        values["sink_tokens"] = draw(st.sampled_from([0, 1, 4, 30]))
    if quantise is Quantise.NVFP4 and draw(st.booleans()):
        values["block_rule"] = "4over6"
    if quantise in PROFILED_FORMATS:
        values["head_profile"] = profile_of(layout).profile_id
    if quantise is Quantise.ALLOCATED_LEVELS:
        values["bit_decay"] = draw(st.sampled_from([2, 4.9]))
    for part in ("key", "value") if PlaneRole.VALUE in layout.roles else ("key",):
        if quantise in COUNTED_FORMATS:
            values[f"{part}_levels"] = levels = draw(st.integers(5, 256))
        if quantise in SPLIT_FORMATS:
            values[f"{part}_low_levels"] = draw(st.integers(4, levels - 1))
            values[f"{part}_low_percent"] = draw(st.sampled_from([1, 33, 50, 80]))
        if quantise is Quantise.ALLOCATED_LEVELS:
            values[f"{part}_bits"] = draw(st.sampled_from([2, 2.5, 4, 8]))
        if quantise in GROUPED_FORMATS:
            values[f"{part}_axis"] = axis = draw(st.sampled_from(["channel", "token", "all_heads"]))
            multiple = draw(st.sampled_from([1, 2]))
            if axis != "all_heads":
                values[f"{part}_group"] = layout.page_tokens * multiple if axis == "channel" else 4096
    return Configuration(values)


@lru_cache(maxsize=256)
def profile_of(layout: KVLayout) -> HeadProfile:
    """Some importance of the layout's heads: not alike, and not quite unlike."""
    generator = np.random.default_rng(0)
    shape = (len(layout.planes_by_table()[PlaneRole.KEY]), layout.planes[0].heads)
    return HeadProfile(key=generator.lognormal(0, 3, shape), value=generator.lognormal(0, 3, shape))


def make_codec(configuration: Configuration, layout: KVLayout, *, use_native: bool = True) -> KVCodec:
    profile = profile_of(layout)
    return KVCodec(configuration, layout, artefacts={profile.profile_id: profile}, use_native=use_native)


def decode(
    frame: Buffer, out: Planes | None = None, *, rows: Tensor | None = None, use_native: bool = True
) -> DecodedFrame:
    profile = profile_of(peek_header(frame).layout)
    return decode_frame(frame, out, rows=rows, artefacts={profile.profile_id: profile}, use_native=use_native)


def make_planes(layout: KVLayout, tokens: int, kind: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    planes = []
    for plane in layout.planes:
        shape = (tokens, plane.heads, plane.head_dim)
        x = torch.randn(shape, generator=generator)
        match kind:
            case "zero":
                x = torch.zeros(shape)
            case "constant":
                x = torch.full(shape, -3.7)
            case "subnormal":
                x = x * torch.finfo(layout.dtype.torch_dtype).tiny * 0.25
            case "negative_zero":
                x = torch.where(x > 0, x, torch.tensor(-0.0))
            case "large":
                x = x.clamp(-1, 1) * 6.5e4
            case "outlier":
                x[..., ::13] *= 1000
            case "five_to_six":
                x = 5 + torch.rand(shape, generator=generator)
        planes.append(x.to(layout.dtype.torch_dtype))
    return planes


def bits(planes: Planes) -> list[Tensor]:
    return [flat_bytes(plane) for plane in planes]


def assert_same_bits(left: Planes, right: Planes) -> None:
    for first, second in zip(bits(left), bits(right), strict=True):
        assert torch.equal(first, second)


def assert_within(decoded: Planes, sent: Sequence[Tensor], bounds: Sequence[Tensor]) -> None:
    for got, want, bound in zip(decoded, sent, bounds, strict=True):
        assert torch.isfinite(got).all()
        excess = (got.double() - want.double()).abs() - bound.double()
        assert excess.max() <= 0 if excess.numel() else True, f"exceeds its bound by {excess.max()}"


@settings(deadline=None, max_examples=120)
@given(data=st.data(), tokens=st.integers(0, 40), kind=st.sampled_from(HOSTILE), seed=st.integers(0, 2**31))
def test_lossy_values_stay_within_the_stated_bound(data: st.DataObject, tokens: int, kind: str, seed: int) -> None:
    layout = data.draw(layouts())
    codec = make_codec(data.draw(configurations(layout, lossy=True)), layout)
    first_token = data.draw(st.integers(0, 40))
    planes = make_planes(layout, tokens, kind, seed)
    frame = codec.encode(planes, first_token=first_token)
    assert len(frame) <= codec.max_frame_bytes(tokens, first_token)
    decoded = decode(frame)
    if decoded.header.is_raw:
        assert kind in ("large", "outlier")
        assert_same_bits(decoded.planes, planes)
    else:
        assert_within(decoded.planes, planes, codec.error_bound(planes, first_token=first_token))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tokens=st.integers(0, 40), kind=st.sampled_from(HOSTILE), seed=st.integers(0, 2**31))
def test_lossless_frames_keep_every_bit(data: st.DataObject, tokens: int, kind: str, seed: int) -> None:
    layout = data.draw(layouts())
    codec = make_codec(data.draw(configurations(layout, lossy=False)), layout)
    planes = make_planes(layout, tokens, kind, seed)
    if tokens and data.draw(st.booleans()):
        planes[0].view(-1)[0] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    frame = codec.encode(planes, first_token=7)
    assert len(frame) <= codec.max_frame_bytes(tokens, 7)
    assert_same_bits(decode(frame).planes, planes)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    cuts=st.lists(st.integers(1, 9), min_size=6, max_size=6, unique=True),
    tail=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
def test_one_chunk_and_seven_chunks_decode_to_equal_bytes(
    data: st.DataObject, cuts: list[int], tail: int, seed: int
) -> None:
    layout = data.draw(layouts())
    codec = make_codec(data.draw(configurations(layout, lossy=True)), layout)
    step = codec.chunk_alignment_tokens
    edges = [0, *sorted(cut * step for cut in cuts), 9 * step + min(tail, step)]
    start = data.draw(st.integers(0, 3)) * step
    planes = make_planes(layout, edges[-1], "normal", seed)
    whole = decode(codec.encode(planes, first_token=start)).planes
    parts = [
        decode(codec.encode([plane[low:high] for plane in planes], first_token=start + low)).planes
        for low, high in itertools.pairwise(edges)
    ]
    assert len(parts) == 7
    for index, plane in enumerate(whole):
        assert torch.equal(torch.cat([part[index] for part in parts]), plane)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), tokens=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_strides_of_the_input_do_not_matter(data: st.DataObject, tokens: int, seed: int) -> None:
    layout = data.draw(layouts())
    codec = make_codec(data.draw(configurations(layout, lossy=data.draw(st.booleans()))), layout)
    planes = make_planes(layout, tokens, "normal", seed)
    # A pool that is wider than its planes in every dimension, with rubbish (NaN) in between.
    views = []
    for plane in planes:
        pool = torch.full((plane.shape[2] + 1, plane.shape[0] * 2 + 1, plane.shape[1] + 2), float("nan"))
        view = pool.to(plane.dtype).permute(1, 2, 0)[1::2, 1:-1, 1:]
        view.copy_(plane)
        views.append(view)
    frame = codec.encode(planes, first_token=0)
    assert codec.encode(views, first_token=0) == frame
    if layout.is_dense:
        assert codec.encode(torch.stack(planes), first_token=0) == frame


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tokens=st.integers(0, 20), use_native=st.booleans(), seed=st.integers(0, 2**31))
def test_a_pool_is_read_and_written_in_place(data: st.DataObject, tokens: int, use_native: bool, seed: int) -> None:
    layout = data.draw(layouts())
    codec = make_codec(data.draw(configurations(layout, lossy=data.draw(st.booleans()))), layout, use_native=use_native)
    pool = make_planes(layout, 40, "normal", seed)
    if data.draw(st.booleans()):
        pool[0][:] = float("inf")
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:tokens]
    gathered = [plane[rows] for plane in pool]
    buffer = torch.zeros(codec.max_frame_bytes(tokens), dtype=torch.uint8)
    used = codec.encode_into(pool, buffer, first_token=5, rows=rows)
    assert buffer[:used].numpy().tobytes() == codec.encode(gathered, first_token=5)

    expected = decode(buffer).planes
    target = [torch.full_like(plane, 7.0) for plane in pool]
    places = torch.randperm(40, generator=torch.Generator().manual_seed(seed + 1))[:tokens]
    decode(buffer, target, rows=places, use_native=use_native)
    assert_same_bits([plane[places] for plane in target], expected)
    others = torch.ones(40, dtype=torch.bool)
    others[places] = False
    assert all(bool((plane[others] == 7.0).all()) for plane in target)


@pytest.mark.parametrize("rows", [[-1, 0], [0, 4]])
def test_rows_outside_a_pool_are_refused(rows: list[int]) -> None:
    layout = KVLayout.keys_then_values(layers=1, heads=1, head_dim=8, dtype=KVDtype.BFLOAT16, page_tokens=1)
    codec = make_codec(Configuration({"transform": "none", "quantise": "none", "code": "none"}), layout)
    pool, where = torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16), torch.tensor(rows)
    with pytest.raises(CodecError):
        codec.encode_into(pool, bytearray(10_000), first_token=0, rows=where)
    with pytest.raises(FrameError) as caught:
        decode(codec.encode(pool[:, :2], first_token=0), pool, rows=where)
    assert caught.value.reason is FrameErrorReason.SHAPE


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tokens=st.integers(1, 12), first_token=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_a_requests_first_tokens_are_kept_and_stretch_no_group(
    data: st.DataObject, tokens: int, first_token: int, seed: int
) -> None:
    layout = data.draw(layouts())
    values = {**data.draw(configurations(layout, lossy=True)), "sink_tokens": 4}
    codec = make_codec(Configuration(values), layout)
    kept = min(max(4 - first_token, 0), tokens)
    planes = make_planes(layout, tokens, "normal", seed)
    calm = decode(codec.encode(planes, first_token=first_token)).planes
    for plane in planes:
        plane[:kept] *= 1000
    frame = codec.encode(planes, first_token=first_token)
    decoded = decode(frame).planes
    assert not peek_header(frame).is_raw
    assert_same_bits([plane[:kept] for plane in decoded], [plane[:kept] for plane in planes])
    assert_same_bits([plane[kept:] for plane in decoded], [plane[kept:] for plane in calm])


@pytest.mark.parametrize("transform", ["none", "hadamard"])
@pytest.mark.parametrize("quantise", ["fp8_e4m3", "nvfp4"])
def test_one_huge_value_is_no_reason_for_nan_bytes(transform: str, quantise: str) -> None:
    layout = KVLayout.keys_then_values(layers=1, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
    codec = make_codec(Configuration({"transform": transform, "quantise": quantise, "code": "entropy"}), layout)
    planes = torch.zeros(2, 3, 2, 64, dtype=torch.bfloat16)
    planes[0, 1, 0, 5] = 6.5e4
    planes[1, 2, 1, 9] = torch.finfo(torch.bfloat16).smallest_normal
    decoded = decode(codec.encode(planes, first_token=0))
    assert not decoded.header.is_raw
    assert_within(decoded.planes, list(planes), codec.error_bound(planes, first_token=0))
