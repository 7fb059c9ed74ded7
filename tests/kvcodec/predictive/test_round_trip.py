"""Frames of the layer-predictive transform codec: errors, chunks, strides, pools, hostile values and damaged bytes."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.kvcodec import (
    ArtefactShelf,
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
from dataplanes.kvcodec.native import predictive_kernels, rans_kernels
from dataplanes.kvcodec.native.predictive_kernels import JointPlanes, PackedArtefact, PredictiveKernel
from dataplanes.kvcodec.native.rans_kernels import RansCoder, RansTables
from dataplanes.kvcodec.predictive.place import Place, position_classes
from dataplanes.kvcodec.predictive.reference import ReferencePredictor
from dataplanes.kvcodec.predictive.rotary import angles, rotate


def test_every_error_is_within_its_bound_and_grows_with_the_step(bench) -> None:
    planes = bench.planes(70)
    errors, sizes = [], []
    for step in bench.artefact.steps:
        codec = KVCodec(bench.configuration(step), bench.layout(), artefacts=bench.artefacts)
        frame = codec.encode(planes, first_token=0)
        decoded = decode_frame(frame, artefacts=bench.artefacts).planes
        bound = torch.stack(codec.error_bound(planes, first_token=0))
        error = (decoded - planes).abs()
        assert (error <= bound).all()
        # A bound that is never approached would say nothing.
        assert (error / bound).max() > 0.1
        errors.append(float(error.square().mean()))
        sizes.append(len(frame))
    assert errors == sorted(errors)
    assert sizes == sorted(sizes, reverse=True)


def test_reference_and_kernels_agree(bench) -> None:
    tokens, layers, step = 70, bench.artefact.layers, bench.artefact.steps[2]
    planes, place = bench.planes(tokens), Place(0, tokens)
    heads, dim = bench.artefact.heads, bench.artefact.key_dim
    split = heads * dim
    cosines, sines = angles(bench.artefact.rotary, 0, tokens)
    joint = torch.zeros(layers, tokens, bench.artefact.width)
    joint[..., :split] = rotate(planes[:layers], cosines, sines, -1).flatten(2)
    joint[..., split : 2 * split] = planes[layers:].flatten(2)
    reference = ReferencePredictor(bench.artefact, step)
    classes = position_classes(place, tokens, bench.artefact.bands)
    wanted = reference.quantise(joint, classes)
    kernel = PredictiveKernel(PackedArtefact(bench.artefact), step)
    flat = kernel.quantise(JointPlanes(list(planes[:layers]), list(planes[layers:]), None), place)
    symbols, at = torch.zeros_like(wanted.symbols), 0
    for layer in range(layers):
        for token in range(tokens):
            rank = int(bench.artefact.ranks[2, classes[token], layer])
            symbols[layer, token, :rank] = torch.from_numpy(flat[at : at + rank])
            at += rank
    assert at == flat.size
    # A coefficient on the border of two cells may fall into the other one, and lead later layers to others.
    assert (symbols[0] != wanted.symbols[0]).float().mean() < 0.01
    assert (symbols[0] - wanted.symbols[0]).abs().max() <= 1
    decoded = [torch.empty(tokens, heads, dim) for _ in planes]
    kernel.dequantise(flat, JointPlanes(decoded[:layers], decoded[layers:], None), place)
    expected = reference.dequantise(symbols, classes)
    keys = rotate(expected[..., :split].reshape(planes[:layers].shape), cosines, sines, 1)
    values = expected[..., split : 2 * split].reshape(planes[layers:].shape)
    assert torch.allclose(torch.stack(decoded), torch.cat([keys, values]), atol=1e-3)


def _plain_build(name: str, ours: ctypes.CDLL, functions: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """A C file compiled for a processor without the vector instructions that its fast paths want."""
    if platform.machine() != "x86_64":
        pytest.skip("there is one kind of code on this processor")
    source, target = Path(rans_kernels.__file__).with_name(name), folder / f"{name}.so"
    subprocess.run(["cc", "-O2", "-march=x86-64-v2", "-w", "-shared", "-fPIC", "-o", target, source], check=True)
    library = ctypes.CDLL(str(target))
    for function in functions:
        own, known = getattr(library, function), getattr(ours, function)
        own.argtypes, own.restype = known.argtypes, known.restype
    return library


def test_streams_do_not_depend_on_the_processor(bench, monkeypatch, tmp_path) -> None:
    generator = np.random.default_rng(1)
    kinds = np.repeat(np.arange(6, dtype=np.int32), 50)
    tables = np.repeat(np.array([0, 20, 30, 40, 50, 63], np.uint8)[:, None], 64, axis=1)
    coder = RansCoder(RansTables(bench.artefact.frequencies.numpy()), np.full(6, 64, np.int32), tables)
    # The last kind has many escapes.
    scale = np.repeat(np.array([0.05, 0.3, 1, 3, 20, 3000]), 50 * 64)
    symbols = (generator.laplace(size=scale.size) * scale).round().clip(-32000, 32000).astype(np.int16)
    coded = coder.encode(symbols, kinds)
    assert np.array_equal(coder.decode(coded, kinds), symbols)
    ours = rans_kernels.load_rans_library()
    plain = _plain_build("rans.c", ours, ("kv_rans_encode", "kv_rans_decode"), tmp_path)
    monkeypatch.setattr(rans_kernels, "load_rans_library", lambda: plain)
    assert np.array_equal(coder.encode(symbols, kinds), coded)
    assert np.array_equal(coder.decode(coded, kinds), symbols)


def test_predictions_do_not_depend_on_the_processor(bench, monkeypatch, tmp_path) -> None:
    step = 0.14
    codec = KVCodec(bench.configuration(step), bench.layout(), artefacts=bench.artefacts)
    planes = bench.planes(300)
    frame = codec.encode(planes, first_token=0)
    decoded = decode_frame(frame, artefacts=bench.artefacts).planes
    ours = predictive_kernels.load_predictive_library()
    functions = ("kv_predictive_encode", "kv_predictive_decode")
    plain = _plain_build("predictive.c", ours, functions, tmp_path)
    monkeypatch.setattr(predictive_kernels, "load_predictive_library", lambda: plain)
    # No fused multiply-add there: a last bit may differ, and with it one unit of a prediction's inputs. Which tokens
    # that happens to depends on the processor, and even there it is far less than a step.
    off = (decode_frame(frame, artefacts=bench.artefacts).planes - decoded).abs().amax(dim=(0, 2, 3))
    assert (off > 1e-4).float().mean() < 0.02
    assert off.max() < step / 4
    assert abs(len(codec.encode(planes, first_token=0)) - len(frame)) < 0.01 * len(frame)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 130),
    cuts=st.integers(1, 7),
    dtype=st.sampled_from(KVDtype),
    step=st.sampled_from([0.1, 0.28, 0.8]),
    knows_length=st.booleans(),
)
def test_chunking_changes_nothing(
    bench, tokens: int, cuts: int, dtype: KVDtype, step: float, knows_length: bool
) -> None:
    layout = bench.layout(dtype, page_tokens=1)
    planes = bench.planes(tokens, dtype=dtype.torch_dtype)
    codec = KVCodec(bench.configuration(step), layout, artefacts=bench.artefacts)
    request_tokens = tokens if knows_length else 0

    def through(part, first_token: int):
        frame = codec.encode(part, first_token=first_token, request_tokens=request_tokens)
        return decode_frame(frame, artefacts=bench.artefacts).planes

    whole = through(planes, 0)
    size = -(-tokens // cuts)
    parts = [through(planes[:, at : at + size], at) for at in range(0, tokens, size)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_the_end_of_a_request_is_coded_more_finely(bench) -> None:
    planes = bench.planes(300)
    codec = KVCodec(bench.configuration(0.4), bench.layout(), artefacts=bench.artefacts)

    def errors(request_tokens: int):
        frame = codec.encode(planes, first_token=0, request_tokens=request_tokens)
        assert peek_header(frame).request_tokens == request_tokens
        decoded = decode_frame(frame, artefacts=bench.artefacts).planes
        bound = torch.stack(codec.error_bound(planes, first_token=0, request_tokens=request_tokens))
        assert ((decoded - planes).abs() <= bound).all()
        return (decoded - planes).square().mean((0, 2, 3))

    unknown, known = errors(0), errors(300)
    assert torch.equal(unknown[:172], known[:172])
    outer, inner = slice(172, 236), slice(284, 300)
    assert known[outer].mean() < 0.9 * unknown[outer].mean()
    assert known[inner].mean() < 0.5 * unknown[inner].mean()
    with pytest.raises(CodecError, match="of a request of 299"):
        codec.encode(planes, first_token=0, request_tokens=299)


def test_a_pool_is_read_and_written_in_place(bench) -> None:
    planes = bench.planes(30)
    codec = KVCodec(bench.configuration(), bench.layout(page_tokens=1), artefacts=bench.artefacts)
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:30]
    pool = torch.full((planes.shape[0], 200, *planes.shape[2:]), 7.0)
    pool[:, rows] = planes
    buffer = torch.empty(codec.max_frame_bytes(30), dtype=torch.uint8)
    size = codec.encode_into(pool, buffer, first_token=0, rows=rows)
    plain = codec.encode(planes, first_token=0)
    assert bytes(buffer[:size].numpy()) == plain
    target = torch.full_like(pool, 5.0)
    other_rows = rows.flip(0).contiguous()
    decode_frame(plain, target, rows=other_rows, artefacts=bench.artefacts)
    assert torch.equal(target[:, other_rows], decode_frame(plain, artefacts=bench.artefacts).planes)
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[other_rows] = False
    assert (target[:, untouched] == 5.0).all()


def test_strided_planes_code_like_contiguous_ones(bench) -> None:
    planes = bench.planes(30)
    codec = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts)
    permuted = planes.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert not permuted.is_contiguous()
    assert codec.encode(permuted, first_token=0) == codec.encode(planes, first_token=0)
    out = torch.empty_like(permuted)
    decode_frame(codec.encode(planes, first_token=0), out, artefacts=bench.artefacts)
    assert torch.equal(out, decode_frame(codec.encode(planes, first_token=0), artefacts=bench.artefacts).planes)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 3e38])
def test_what_cannot_be_expressed_goes_raw(bench, value: float) -> None:
    planes = bench.planes(9)
    planes[3, 5, 1, 2] = value
    codec = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts)
    frame = codec.encode(planes, first_token=0)
    assert peek_header(frame).is_raw
    decoded = decode_frame(frame, artefacts=bench.artefacts).planes
    assert torch.equal(decoded.view(torch.int32), planes.view(torch.int32))


@pytest.mark.parametrize("kind", ["zero", "constant", "subnormal", "negative_zero", "outlier"])
@pytest.mark.parametrize("dtype", list(KVDtype))
def test_hostile_values_stay_within_the_bound(bench, kind: str, dtype: KVDtype) -> None:
    planes = bench.planes(13)
    match kind:
        case "zero":
            planes = torch.zeros_like(planes)
        case "constant":
            planes = torch.full_like(planes, -3.7)
        case "subnormal":
            planes = planes * torch.finfo(dtype.torch_dtype).tiny * 0.25
        case "negative_zero":
            planes = torch.where(planes > 0, planes, torch.tensor(-0.0))
        case "outlier":
            planes[..., ::13] *= 1000
    planes = planes.to(dtype.torch_dtype)
    codec = KVCodec(bench.configuration(), bench.layout(dtype), artefacts=bench.artefacts)
    frame = codec.encode(planes, first_token=0)
    decoded = decode_frame(frame, artefacts=bench.artefacts).planes
    assert torch.isfinite(decoded).all()
    bound = torch.stack(codec.error_bound(planes, first_token=0))
    is_raw = peek_header(frame).is_raw
    assert torch.equal(decoded, planes) if is_raw else ((decoded.float() - planes.float()).abs() <= bound).all()
    assert len(frame) <= codec.max_frame_bytes(13, 0)


def test_no_tokens_make_an_empty_frame(bench) -> None:
    codec = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts)
    frame = codec.encode(bench.planes(4)[:, :0], first_token=0)
    assert decode_frame(frame, artefacts=bench.artefacts).planes.shape[1] == 0


def test_without_the_artefact_a_frame_is_refused_for_that(bench) -> None:
    frame = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts).encode(
        bench.planes(5), first_token=0
    )
    with pytest.raises(FrameError) as caught:
        decode_frame(frame, artefacts=ArtefactShelf())
    assert caught.value.reason is FrameErrorReason.ARTEFACT


def test_another_models_layout_is_refused(bench) -> None:
    layout = KVLayout.keys_then_values(layers=5, heads=3, head_dim=20, dtype=KVDtype.FLOAT32, page_tokens=4)
    with pytest.raises(CodecError, match="another model"):
        KVCodec(bench.configuration(), layout, artefacts=bench.artefacts)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_symbols_are_refused_or_decode_to_numbers(bench, data: st.DataObject) -> None:
    """With the checksum made right again, so that the entropy decoder itself meets the damage."""
    import struct

    import xxhash

    codec = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts)
    frame = bytearray(codec.encode(bench.planes(6), first_token=0))
    metadata_bytes = struct.unpack_from("<I", frame, 44)[0]
    first = FIXED_BYTES + metadata_bytes + 8
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(first, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    state = xxhash.xxh3_64(bytes(frame[:56]))
    state.update(bytes(frame[FIXED_BYTES:]))
    struct.pack_into("<Q", frame, 56, state.intdigest())
    try:
        decoded = decode_frame(bytes(frame), artefacts=bench.artefacts).planes
    except FrameError as error:
        assert error.reason is FrameErrorReason.PAYLOAD
    else:
        assert decoded.shape == bench.planes(6).shape


def test_a_cut_stream_is_refused(bench) -> None:
    stage = KVCodec(bench.configuration(), bench.layout(), artefacts=bench.artefacts)._stages[0]
    layout, planes = bench.layout(), bench.planes(6)
    (coded,) = stage.encode(layout.chunk(planes), 0)
    for size in (0, 4, 127, 129, coded.size - 4):
        with pytest.raises(FrameError):
            stage.decode([coded[:size]], layout.chunk(planes.clone()), 0)
