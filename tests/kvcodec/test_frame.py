"""No damaged, cut, foreign or lying frame is ever taken for KV."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import (
    CodecError,
    FrameError,
    FrameErrorReason,
    KVCodec,
    KVDtype,
    KVLayout,
    decode_frame,
    peek_header,
)
from dataplanes.kvcodec.frame import FIXED_BYTES

torch.set_num_threads(1)

LAYOUT = KVLayout.keys_then_values(layers=2, heads=1, head_dim=8, dtype=KVDtype.BFLOAT16, page_tokens=4)
CONFIGURATIONS = {
    "levels entropy": {
        "transform": "hadamard", "quantise": "levels", "code": "entropy",
        "key_levels": 12, "key_axis": "channel", "key_group": 4,
        "value_levels": 6, "value_axis": "token", "value_group": 8,
    },
    "nvfp4 bitpack": {"transform": "none", "quantise": "nvfp4", "code": "bitpack"},
    "layers of few levels": {
        "transform": "none", "quantise": "layer_levels", "code": "zstd",
        "key_levels": 9, "key_low_levels": 3, "key_low_percent": 50, "key_axis": "all_heads",
        "value_levels": 9, "value_low_levels": 3, "value_low_percent": 50, "value_axis": "all_heads",
    },
    "absmax bitpack": {
        "transform": "none", "quantise": "absmax_levels", "code": "bitpack",
        "key_levels": 16, "key_low_levels": 8, "key_low_percent": 50,
        "value_levels": 16, "value_low_levels": 8, "value_low_percent": 50,
    },
    "codebook bitpack": {
        "transform": "hadamard", "quantise": "lloyd_max", "code": "bitpack", "key_levels": 6, "value_levels": 5,
    },
    "lossless splitzip": {"transform": "none", "quantise": "none", "code": "splitzip"},
    "lossless zstd": {"transform": "none", "quantise": "none", "code": "zstd"},
    "identity": {"transform": "none", "quantise": "none", "code": "none"},
}  # fmt: skip


def make_frame(name: str, tokens: int = 9) -> bytes:
    planes = torch.randn(4, tokens, 1, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    return KVCodec(Configuration(CONFIGURATIONS[name]), LAYOUT).encode(planes, first_token=4)


def resealed(frame: bytes, change: Callable[[bytearray], None]) -> bytes:
    """A frame with a change and a checksum that covers it: what a faulty sender might send."""
    forged = bytearray(frame)
    change(forged)
    state = xxhash.xxh3_64(bytes(forged[:56]))
    state.update(bytes(forged[FIXED_BYTES:]))
    forged[56:64] = struct.pack("<Q", state.intdigest())
    return bytes(forged)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_single_damaged_byte_is_noticed(name: str) -> None:
    frame = bytearray(make_frame(name))
    for position in range(len(frame)):
        kept = frame[position]
        for flip in (0x01, 0x80, 0xFF):
            frame[position] = kept ^ flip
            with pytest.raises(FrameError):
                decode_frame(frame)
        frame[position] = kept
    decode_frame(frame)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_cut_is_noticed_and_trailing_bytes_are_not_read(name: str) -> None:
    frame = make_frame(name)
    for size in range(len(frame)):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame[:size])
        assert caught.value.reason is FrameErrorReason.TRUNCATED
    whole = torch.as_tensor(decode_frame(frame).planes)
    assert torch.equal(torch.as_tensor(decode_frame(frame + b"rubbish").planes), whole)


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(CONFIGURATIONS)), position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_lying_sender_gets_a_frame_error_or_finite_shapes(name: str, position: int, value: int) -> None:
    """With a valid checksum, damaged content either fails a check or decodes to the announced shapes; never a crash."""
    frame = make_frame(name)
    position = position % len(frame)

    def change(forged: bytearray) -> None:
        forged[position] = value

    try:
        decoded = decode_frame(resealed(frame, change), max_raw_bytes=1 << 20)
    except FrameError:
        return
    assert len(decoded.planes) == len(decoded.header.layout.planes)


def _patch(offset: int, layout: str, value: int) -> Callable[[bytearray], None]:
    def change(forged: bytearray) -> None:
        struct.pack_into(layout, forged, offset, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_patch(0, "<I", 0), FrameErrorReason.MAGIC),
        (_patch(4, "<H", 2), FrameErrorReason.VERSION),
        (_patch(6, "<H", 2), FrameErrorReason.METADATA),
        (_patch(8, "<Q", 1 << 40), FrameErrorReason.TRUNCATED),
        (_patch(16, "<Q", 17), FrameErrorReason.SHAPE),
        (_patch(32, "<I", 10), FrameErrorReason.SHAPE),
        (_patch(44, "<I", 1 << 30), FrameErrorReason.TRUNCATED),
        (_patch(44, "<I", 8), FrameErrorReason.METADATA),
        (_patch(48, "<Q", 1), FrameErrorReason.SHAPE),
    ],
)
def test_reasons_are_told_apart(change: Callable[[bytearray], None], reason: FrameErrorReason) -> None:
    with pytest.raises(FrameError) as caught:
        decode_frame(resealed(make_frame("levels entropy"), change))
    assert caught.value.reason is reason
    assert caught.value.code == f"frame.{reason.value}"


def _with_metadata(change: Callable[[dict[str, Any]], None]) -> bytes:
    frame = make_frame("levels entropy")
    (size,) = struct.unpack_from("<I", frame, 44)
    fields = json.loads(frame[FIXED_BYTES : FIXED_BYTES + size])
    change(fields)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rest = frame[FIXED_BYTES + size :]
    forged = bytearray(frame[:FIXED_BYTES] + text + rest)
    struct.pack_into("<I", forged, 44, len(text))
    struct.pack_into("<Q", forged, 8, len(forged))
    return resealed(bytes(forged), lambda _: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fields: fields.update(extra=1), FrameErrorReason.METADATA),
        (lambda fields: fields.pop("dtype"), FrameErrorReason.METADATA),
        (lambda fields: fields.update(page_tokens=True), FrameErrorReason.METADATA),
        (lambda fields: fields.update(page_tokens=0), FrameErrorReason.METADATA),
        (lambda fields: fields.update(planes=[["key", 1, 8, 1 << 30]]), FrameErrorReason.METADATA),
        (lambda fields: fields.update(planes=[["key", 1, 1 << 17, 4]]), FrameErrorReason.METADATA),
        (lambda fields: fields.update(planes=[["query", 1, 8, 4]]), FrameErrorReason.METADATA),
        (lambda fields: fields.update(planes=[["key", 1, 8, 4]]), FrameErrorReason.CONFIGURATION),
        (lambda fields: fields.update(planes=[["key", 2, 8, 2], ["value", 1, 8, 2]]), FrameErrorReason.SHAPE),
        (lambda fields: fields.update(configuration_id="0" * 16), FrameErrorReason.CONFIGURATION),
        (lambda fields: fields["configuration"].update(key_levels=13), FrameErrorReason.CONFIGURATION),
        (lambda fields: fields["configuration"].update(key_levels=float("inf")), FrameErrorReason.CONFIGURATION),
    ],
)
def test_metadata_is_read_strictly(change: Callable[[dict[str, Any]], None], reason: FrameErrorReason) -> None:
    with pytest.raises(FrameError) as caught:
        decode_frame(_with_metadata(change))
    assert caught.value.reason is reason


def test_unchanged_metadata_passes_the_same_path() -> None:
    assert _with_metadata(lambda _: None) == make_frame("levels entropy")


def test_a_frame_for_other_planes_is_refused() -> None:
    frame = make_frame("identity")
    for out in (torch.empty(4, 8, 1, 8, dtype=torch.bfloat16), torch.empty(4, 9, 1, 8, dtype=torch.float16)):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame, out)
        assert caught.value.reason is FrameErrorReason.SHAPE
    with pytest.raises(FrameError) as caught:
        decode_frame(frame, max_raw_bytes=100)
    assert caught.value.reason is FrameErrorReason.TOO_LARGE


def test_buffers_may_be_of_any_kind_but_not_too_small() -> None:
    codec = KVCodec(Configuration(CONFIGURATIONS["identity"]), LAYOUT)
    planes = torch.randn(4, 9, 1, 8).bfloat16()
    size = codec.max_frame_bytes(9)
    for buffer in (torch.zeros(size, dtype=torch.uint8), np.zeros(size, np.uint8), bytearray(size)):
        used = codec.encode_into(planes, buffer, first_token=0)
        assert peek_header(buffer).frame_bytes == used <= size
        assert torch.equal(torch.as_tensor(decode_frame(buffer).planes), planes)
    for unfit in (bytearray(size - 200), bytes(size), torch.zeros(size), torch.zeros(2 * size, dtype=torch.uint8)[::2]):
        with pytest.raises(CodecError) as caught:
            codec.encode_into(planes, unfit, first_token=0)
        assert caught.value.code == "codec.buffer"


def test_an_empty_chunk_is_a_frame_too() -> None:
    for name in CONFIGURATIONS:
        decoded = decode_frame(make_frame(name, tokens=0))
        assert decoded.header.tokens == 0
        assert torch.as_tensor(decoded.planes).shape == (4, 0, 1, 8)
