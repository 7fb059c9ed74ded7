"""SplitZip keeps every bit, makes the same bytes in C and in numpy, and is as small as its formula says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import FrameError, FrameErrorReason, KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.kvcodec.native.library import load_splitzip_library
from dataplanes.kvcodec.splitzip import CHUNK, Bytes, Form, decode_sections, encode_sections

torch.set_num_threads(1)

LOSSLESS = Configuration({"transform": "none", "quantise": "none", "code": "splitzip"})
FP8 = Configuration({"transform": "none", "quantise": "fp8_e4m3", "code": "splitzip"})
both = pytest.mark.parametrize(
    "use_native",
    [
        pytest.param(True, marks=pytest.mark.skipif(load_splitzip_library() is None, reason="no C compiler")),
        False,
    ],
)


def round_trip(plain: Bytes, *, use_native: bool) -> Bytes:
    (coded,) = encode_sections([plain], use_native=use_native)
    (decoded,) = decode_sections([coded], [plain.size], use_native=use_native)
    assert np.array_equal(decoded, plain)
    assert coded.size <= plain.size
    return coded


def fp8_bytes(dtype: torch.dtype, size: int, seed: int) -> Bytes:
    """Gaussian values whose exponents spread as those of scaled heads do."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 100
    plain: Bytes = x.clamp(-448, 448).to(dtype).view(torch.uint8).numpy()
    return plain


def escape_share(exponents: Bytes) -> float:
    counts = np.sort(np.bincount(exponents.reshape(-1)))[::-1]
    return 1 - float(counts[:16].sum()) / exponents.size


@both
@settings(deadline=None, max_examples=150)
@given(
    size=st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 5000])),
    common=st.integers(1, 256),
    rare=st.floats(0, 0.3),
    seed=st.integers(0, 2**31),
)
def test_any_bytes_come_back(use_native: bool, size: int, common: int, rare: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    plain = generator.integers(0, common, size).astype(np.uint8)
    plain = np.where(generator.random(size) < rare, generator.integers(0, 256, size), plain).astype(np.uint8)
    round_trip(plain, use_native=use_native)


@pytest.mark.skipif(load_splitzip_library() is None, reason="no C compiler")
@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=4),
    kind=st.sampled_from(["exponents", "e4m3", "e5m2", "noise"]),
    seed=st.integers(0, 2**31),
)
def test_native_bytes_equal_the_reference(sizes: list[int], kind: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    sections = []
    for size in sizes:
        match kind:
            case "exponents":
                section = np.round(generator.normal(120, 3.5, size)).astype(np.uint8)
            case "e4m3":
                section = fp8_bytes(torch.float8_e4m3fn, size, seed)
            case "e5m2":
                section = fp8_bytes(torch.float8_e5m2, size, seed)
            case _:
                section = generator.integers(0, 256, size).astype(np.uint8)
        sections.append(section)
    native = encode_sections(sections)
    reference = encode_sections(sections, use_native=False)
    assert all(np.array_equal(left, right) for left, right in zip(native, reference, strict=True))
    for use_native in (True, False):
        decoded = decode_sections(native, sizes, use_native=use_native)
        assert all(np.array_equal(got, want) for got, want in zip(decoded, sections, strict=True))


@both
@pytest.mark.parametrize(("dtype", "smallest_ratio"), [(torch.float8_e5m2, 1.13), (torch.float8_e4m3fn, 1.09)])
def test_fp8_bytes_are_as_small_as_the_formula_says(
    use_native: bool, dtype: torch.dtype, smallest_ratio: float
) -> None:
    plain = fp8_bytes(dtype, 200_000, 1)
    coded = round_trip(plain, use_native=use_native)
    assert coded[0] == Form.FP8
    escapes = escape_share((plain >> 2) & 31)
    assert plain.size / coded.size == pytest.approx(8 / (7 + 8 * (3 * escapes + 2 / CHUNK)), rel=0.02)
    assert plain.size / coded.size > smallest_ratio


@both
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_every_fp8_pattern_survives_among_ordinary_values(use_native: bool, dtype: torch.dtype) -> None:
    """All NaN payloads, infinities, denormals and both zeros."""
    plain = fp8_bytes(dtype, 60_000, 2).copy()
    plain[::201] = np.resize(np.arange(256, dtype=np.uint8), plain[::201].size)
    assert round_trip(plain, use_native=use_native).size < plain.size


def hostile_bfloat16(shape: tuple[int, ...], share: float, seed: int) -> torch.Tensor:
    """Gaussian values among which a share are arbitrary bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).bfloat16()
    patterns = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    chosen = torch.rand(shape, generator=generator) < share
    return torch.where(chosen, patterns, x.view(torch.int16)).view(torch.bfloat16)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(0, 60),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 64, 80, 96, 100, 128, 576]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    dtype=st.sampled_from(KVDtype),
    seed=st.integers(0, 2**31),
)
def test_lossless_frames_keep_every_bit(
    tokens: int, heads: int, head_dim: int, share: float, dtype: KVDtype, seed: int
) -> None:
    layout = KVLayout.keys_then_values(layers=2, heads=heads, head_dim=head_dim, dtype=dtype, page_tokens=4)
    planes = hostile_bfloat16((4, tokens, heads, head_dim), share, seed)
    if dtype is not KVDtype.BFLOAT16:
        planes = planes.to(dtype.torch_dtype)
    codec = KVCodec(LOSSLESS, layout)
    frame = codec.encode(planes, first_token=3)
    assert len(frame) <= codec.max_frame_bytes(tokens, 3)
    decoded = torch.as_tensor(decode_frame(frame).planes)
    assert torch.equal(decoded.view(torch.uint8), planes.view(torch.uint8))


@pytest.mark.parametrize("rare", [0.0, 0.002, 0.007, 0.05])
def test_a_frame_is_as_small_as_the_formula_says(rare: float) -> None:
    """Bytes of an element are 1.5 + 3 e + 2/1024; never over the paper's 1.5 + 7 e by more than 2 %."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(118, 134, (8, 512, 2, 64), generator=generator, dtype=torch.int32) << 7
    escaped = torch.rand(bits.shape, generator=generator) < rare
    bits = torch.where(escaped, torch.tensor(90 << 7), bits)
    bits |= torch.randint(0, 128, bits.shape, generator=generator, dtype=torch.int32)
    planes = bits.to(torch.int16).view(torch.bfloat16)
    layout = KVLayout.keys_then_values(layers=4, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
    share = escape_share((planes.view(torch.int16).numpy() >> 7) & 255)
    ratio = layout.raw_bytes(512) / len(KVCodec(LOSSLESS, layout).encode(planes, first_token=0))
    assert ratio == pytest.approx(2 / (1.5 + 3 * share + 2 / CHUNK), rel=0.02)
    assert ratio > 2 / (1.5 + 7 * share) * 0.98


def test_gaussian_kv_reaches_the_published_ratio() -> None:
    layout = KVLayout.keys_then_values(layers=4, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
    planes = torch.randn(8, 512, 2, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert layout.raw_bytes(512) / len(KVCodec(LOSSLESS, layout).encode(planes, first_token=0)) > 1.32


def test_fp8_symbols_shrink_and_decode_to_the_same_values() -> None:
    layout = KVLayout.keys_then_values(layers=2, heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
    planes = torch.randn(4, 300, 2, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    plain = KVCodec(Configuration({**FP8, "code": "none"}), layout).encode(planes, first_token=0)
    coded = KVCodec(FP8, layout).encode(planes, first_token=0)
    assert len(plain) / len(coded) > 1.08
    assert torch.equal(torch.as_tensor(decode_frame(coded).planes), torch.as_tensor(decode_frame(plain).planes))


@both
@settings(deadline=None, max_examples=200)
@given(position=st.integers(0, 3000), value=st.integers(0, 255), form=st.sampled_from(Form))
def test_damaged_sections_are_refused_or_stay_in_bounds(
    use_native: bool, position: int, value: int, form: Form
) -> None:
    plain = np.round(np.random.default_rng(0).normal(120, 6, 2000)).astype(np.uint8)
    if form is Form.FP8:
        plain = fp8_bytes(torch.float8_e5m2, 2000, 0)
    (coded,) = encode_sections([plain])
    coded = coded.copy()
    assert coded.size < plain.size
    coded[position % coded.size] = value
    try:
        (decoded,) = decode_sections([coded], [plain.size], use_native=use_native)
    except FrameError as error:
        assert error.reason is FrameErrorReason.PAYLOAD
    else:
        assert decoded.size == plain.size


@both
def test_places_and_symbols_outside_are_refused(use_native: bool) -> None:
    plain = np.full(3000, 120, np.uint8)
    plain[::7] = np.arange(plain[::7].size) % 40
    (coded,) = encode_sections([plain], use_native=False)
    assert coded.size < plain.size
    escapes = (coded.size - (1 + 8 + 16 + 1500 + 2 * 3)) // 3
    place = coded.size - 3 * escapes
    for last_place in (b"\xff\xff", b"\x00\x04"):
        forged = coded.copy()
        forged[place + 2 * escapes - 2 : place + 2 * escapes] = np.frombuffer(last_place, np.uint8)
        with pytest.raises(FrameError):
            decode_sections([forged], [plain.size], use_native=use_native)
    with pytest.raises(FrameError):
        decode_sections([coded[:-1]], [plain.size], use_native=use_native)
    with pytest.raises(FrameError):
        decode_sections([coded], [coded.size - 1], use_native=use_native)
