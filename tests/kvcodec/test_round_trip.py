"""Frames give back what went in: bit for bit where lossless, within the stated bound where lossy."""

from __future__ import annotations

import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import CodecError, KVCodec, KVDtype, KVLayout, Plane, PlaneRole, decode_frame, peek_header
from dataplanes.kvcodec.coders import CODERS

torch.set_num_threads(1)

LAYOUT = KVLayout.keys_then_values(layers=3, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
LEVELS: dict[str, str | int] = {
    "quantise": "levels",
    "key_levels": 12,
    "key_axis": "channel",
    "key_group": 16,
    "value_levels": 8,
    "value_axis": "token",
    "value_group": 64,
}


def _levels(**changes: str | int) -> Configuration:
    return Configuration({"transform": "none", "code": "bitpack", **LEVELS, **changes})


def _lossless(code: str) -> Configuration:
    return Configuration({"transform": "none", "quantise": "none", "code": code})


@pytest.mark.parametrize("code", [code for code in CODERS if code not in ("bitpack", "rans")])
@pytest.mark.parametrize("dtype", list(KVDtype))
def test_lossless_configurations_keep_every_bit(code: str, dtype: KVDtype) -> None:
    layout = KVLayout.keys_then_values(layers=2, heads=2, head_dim=64, dtype=dtype, page_tokens=16)
    planes = torch.randn(4, 37, 2, 64).to(dtype.torch_dtype)
    planes[0, 0, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 6.5e4])
    decoded = decode_frame(KVCodec(_lossless(code), layout).encode(planes, first_token=0))
    assert isinstance(decoded.planes, torch.Tensor)
    assert torch.equal(decoded.planes.view(torch.uint8), planes.view(torch.uint8))
    # LZ4 finds no repeats in half precision, so that the planes are sent raw.
    assert not decoded.header.is_raw or code == "lz4"


@pytest.mark.parametrize("code", [code for code in CODERS if code not in ("splitzip", "rans")])
def test_every_coder_decodes_to_the_same_values(code: str) -> None:
    planes = torch.randn(6, 50, 2, 64).bfloat16()
    reference = decode_frame(KVCodec(_levels(), LAYOUT).encode(planes, first_token=3)).planes
    decoded = decode_frame(KVCodec(_levels(code=code), LAYOUT).encode(planes, first_token=3)).planes
    assert torch.equal(torch.as_tensor(decoded), torch.as_tensor(reference))
    assert (torch.as_tensor(decoded).float() - planes.float()).abs().max() < 0.6


@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("transform", ["none", "hadamard"])
def test_a_chunk_with_infinities_or_nans_travels_raw(poison: float, transform: str) -> None:
    planes = torch.randn(6, 20, 2, 64).bfloat16()
    planes[4, 7, 1, 3] = poison
    decoded = decode_frame(KVCodec(_levels(transform=transform), LAYOUT).encode(planes, first_token=0))
    assert decoded.header.is_raw
    assert torch.equal(torch.as_tensor(decoded.planes).view(torch.uint8), planes.view(torch.uint8))


def test_header_tells_everything() -> None:
    codec = KVCodec(_levels(), LAYOUT)
    frame = codec.encode(torch.randn(6, 20, 2, 64).bfloat16(), first_token=32, chunk_index=2, chunk_count=5)
    header = peek_header(frame)
    assert (header.first_token, header.tokens, header.chunk_index, header.chunk_count) == (32, 20, 2, 5)
    assert header.configuration == codec.configuration
    assert header.layout == LAYOUT
    assert header.frame_bytes == len(frame)
    assert header.raw_bytes == 6 * 20 * 2 * 64 * 2


def test_frames_are_decoded_into_strided_views() -> None:
    planes = torch.randn(6, 20, 2, 64).bfloat16()
    frame = KVCodec(_levels(), LAYOUT).encode(planes, first_token=0)
    pool = torch.zeros(40, 6, 2, 64, dtype=torch.bfloat16)
    out = pool[::2].transpose(0, 1)
    decode_frame(frame, out)
    assert torch.equal(out, torch.as_tensor(decode_frame(frame).planes))
    assert not pool[1::2].any()


def test_planes_may_differ_in_shape_and_come_as_a_list() -> None:
    layout = KVLayout(
        planes=(Plane(PlaneRole.KEY, 2, 64), Plane(PlaneRole.VALUE, 2, 32), Plane(PlaneRole.KEY, 1, 96)),
        dtype=KVDtype.BFLOAT16,
        page_tokens=16,
    )
    planes = [torch.randn(18, 2, 64), torch.randn(18, 2, 32), torch.randn(18, 1, 96)]
    planes = [plane.bfloat16() for plane in planes]
    decoded = decode_frame(KVCodec(_levels(transform="hadamard", value_group=32), layout).encode(planes, first_token=0))
    for got, sent in zip(decoded.planes, planes, strict=True):
        assert (got.float() - sent.float()).abs().max() < 1.5


@pytest.mark.parametrize(
    "changes",
    [
        {"key_levels": 1},
        {"key_levels": 257},
        {"key_levels": "12"},
        {"key_levels": True},
        {"key_group": 24},
        {"value_group": 48},
        {"key_axis": "layer"},
        {"code": "brotli"},
        {"code": "splitzip"},
        {"surprise": 1},
        {"quantise": "fp8_e4m3"},
        {"quantise": "none"},
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, str | int]) -> None:
    with pytest.raises(CodecError, match=r"configuration\."):
        KVCodec(_levels(**changes), LAYOUT)
