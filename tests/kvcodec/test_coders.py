"""One conformance suite that every coder passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.kvcodec import FrameError, FrameErrorReason
from dataplanes.kvcodec.coders import CODERS, Bytes, CalibratedCoder, Coder
from dataplanes.numerics import packing

# Calibrated symbols are coded by the stage that makes them, and tested with it.
BYTE_CODERS = {name: coder for name, coder in CODERS.items() if name != CalibratedCoder.name}
coders = pytest.mark.parametrize("coder", BYTE_CODERS.values(), ids=list(BYTE_CODERS))


def encode_one(coder: Coder, plain: Bytes) -> Bytes:
    (coded,) = coder.encode([plain])
    return coded


def decode_one(coder: Coder, coded: bytes, size: int) -> Bytes:
    (plain,) = coder.decode([memoryview(coded)], [size])
    return plain


def skewed_bytes(size: int, spread: float, seed: int) -> Bytes:
    generator = np.random.default_rng(seed)
    return np.clip(np.round(generator.normal(128, spread, size)), 0, 255).astype(np.uint8)


@coders
@settings(deadline=None, max_examples=60)
@given(size=st.integers(0, 3000), spread=st.floats(0, 200), seed=st.integers(0, 2**31))
def test_round_trip_within_the_announced_size(coder: Coder, size: int, spread: float, seed: int) -> None:
    plain = skewed_bytes(size, spread, seed)
    coded = encode_one(coder, plain)
    assert coded.size <= coder.max_bytes(size)
    assert np.array_equal(decode_one(coder, coded.tobytes(), size), plain)


@coders
@pytest.mark.parametrize("size", [0, 1, 131072, 131073, 1_000_000])
def test_round_trip_at_block_edges(coder: Coder, size: int) -> None:
    for spread in (0.0, 3.0, 1e6):
        plain = skewed_bytes(size, spread, size)
        coded = encode_one(coder, plain)
        assert coded.size <= coder.max_bytes(size)
        assert np.array_equal(decode_one(coder, coded.tobytes(), size), plain)


@coders
def test_sections_are_coded_each_on_its_own(coder: Coder) -> None:
    plain = [skewed_bytes(size, 4, size) for size in (0, 5000, 0, 1, 70_000, 0)]
    coded = coder.encode(plain)
    assert [part.size for part in coded] == [encode_one(coder, part).size for part in plain]
    decoded = coder.decode([memoryview(part.tobytes()) for part in coded], [part.size for part in plain])
    assert all(np.array_equal(got, want) for got, want in zip(decoded, plain, strict=True))


@coders
def test_a_wrong_size_is_refused(coder: Coder) -> None:
    coded = encode_one(coder, skewed_bytes(500, 5, 0)).tobytes()
    for size in (0, 1, 499, 501, 100_000):
        with pytest.raises(FrameError):
            decode_one(coder, coded, size)


@coders
@settings(deadline=None, max_examples=150)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 50))
def test_damaged_data_give_a_frame_error_or_the_announced_size(
    coder: Coder, position: int, value: int, cut: int
) -> None:
    coded = bytearray(encode_one(coder, skewed_bytes(2000, 5, 1)).tobytes())
    coded[position % len(coded)] = value
    try:
        plain = decode_one(coder, bytes(coded[: len(coded) - cut]), 2000)
    except FrameError as error:
        assert error.reason is FrameErrorReason.PAYLOAD
    else:
        assert plain.size == 2000


@coders
def test_coders_serve_many_threads_at_once(coder: Coder) -> None:
    def round_trip(seed: int) -> bool:
        plain = skewed_bytes(200_000, 5, seed)
        return np.array_equal(decode_one(coder, encode_one(coder, plain).tobytes(), plain.size), plain)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(16)))


@pytest.mark.parametrize("levels", [6, 8, 10, 12, 16])
def test_the_entropy_coder_comes_within_two_per_cent_of_the_entropy(levels: int) -> None:
    generator = np.random.default_rng(0)
    wanted = generator.normal((levels - 1) / 2, levels / 5.5, (8, 512, 192))
    symbols = np.clip(np.round(wanted), 0, levels - 1).astype(np.uint8)
    counts = np.bincount(symbols.reshape(-1), minlength=levels)
    shares = counts[counts > 0] / symbols.size
    entropy_bits = -float((shares * np.log2(shares)).sum()) * symbols.size
    packed = packing.pack(torch.from_numpy(symbols), levels).numpy().reshape(-1)
    assert encode_one(CODERS["entropy"], packed).size * 8 < 1.02 * entropy_bits
