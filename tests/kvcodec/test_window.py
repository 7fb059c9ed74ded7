"""A request's last tokens are kept bit for bit, wherever its chunks are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import CodecError, FrameError, FrameErrorReason, KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.kvcodec.presets import PRESETS

torch.set_num_threads(1)

LAYOUT = KVLayout.keys_then_values(layers=2, heads=2, head_dim=32, dtype=KVDtype.BFLOAT16, page_tokens=4)
KIVI = Configuration({**PRESETS["kivi"].configuration(LAYOUT), "window_tokens": 20, "sink_tokens": 3})


def make_planes(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, tokens, 2, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=6, max_size=6, unique=True), tail=st.integers(1, 32), seed=st.integers(0)
)
def test_one_chunk_and_seven_chunks_decode_to_equal_bytes(cuts: list[int], tail: int, seed: int) -> None:
    codec = KVCodec(KIVI, LAYOUT)
    step = codec.chunk_alignment_tokens
    edges = [0, *sorted(cut * step for cut in cuts), 9 * step + tail]
    total = edges[-1]
    planes = make_planes(total, seed % 2**31)
    whole = torch.as_tensor(decode_frame(codec.encode(planes, first_token=0, request_tokens=total)).planes)
    parts = []
    for low, high in itertools.pairwise(edges):
        frame = codec.encode(planes[:, low:high], first_token=low, request_tokens=total)
        assert len(frame) <= codec.max_frame_bytes(high - low, low)
        assert len(frame) <= codec.max_frame_bytes(high - low)
        parts.append(torch.as_tensor(decode_frame(frame).planes))
    assert len(parts) == 7
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(whole[:, -20:], planes[:, -20:])
    assert torch.equal(whole[:, :3], planes[:, :3])
    assert not torch.equal(whole[:, -21], planes[:, -21])


@pytest.mark.parametrize("total", [1, 3, 19, 20, 21, 23, 24])
def test_short_requests_are_all_sinks_and_window(total: int) -> None:
    planes = make_planes(total)
    decoded = torch.as_tensor(
        decode_frame(KVCodec(KIVI, LAYOUT).encode(planes, first_token=0, request_tokens=total)).planes
    )
    assert torch.equal(decoded, planes) is (total <= 23)


def test_without_a_length_there_is_no_window() -> None:
    codec, planes = KVCodec(KIVI, LAYOUT), make_planes(40)
    for total in (0, 39):
        with pytest.raises(CodecError) as caught:
            codec.encode(planes, first_token=0, request_tokens=total)
        assert caught.value.code == "codec.request_tokens"
    plain = Configuration({name: value for name, value in KIVI.items() if name != "window_tokens"})
    unknown = decode_frame(KVCodec(plain, LAYOUT).encode(planes, first_token=0))
    known = decode_frame(KVCodec(plain, LAYOUT).encode(planes, first_token=0, request_tokens=40))
    assert torch.equal(torch.as_tensor(unknown.planes), torch.as_tensor(known.planes))
    assert (unknown.header.request_tokens, known.header.request_tokens) == (0, 40)


def test_a_frame_says_how_long_its_request_is() -> None:
    codec = KVCodec(KIVI, LAYOUT)
    frame = codec.encode(make_planes(40), first_token=8, request_tokens=70)
    assert decode_frame(frame).header.request_tokens == 70
    bounds = codec.error_bound(make_planes(40), first_token=32, request_tokens=72)
    assert all(not bound[20:].any() and bound[:20].all() for bound in bounds)


def test_a_window_without_a_length_is_refused_by_the_receiver() -> None:
    planes = make_planes(40)
    codec = KVCodec(KIVI, LAYOUT)
    # A sender that loses the length: its own frame of the same configuration is not decoded with a guess.
    codec._check_request = lambda request_tokens, end: None  # type: ignore[method-assign]
    frame = codec.encode(planes, first_token=0)
    with pytest.raises(FrameError) as caught:
        decode_frame(frame)
    assert caught.value.reason is FrameErrorReason.METADATA
