"""The native kernels make the very bytes of the torch reference, both ways."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from dataplanes import native_build
from dataplanes.kvcodec import KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.kvcodec.native import library

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(library.load_library() is None, reason="no C compiler on this machine")


@st.composite
def lossy_configurations(draw: st.DrawFn, head_dim: int) -> Configuration:
    quantise = draw(
        st.sampled_from(["levels", "levels", "layer_levels", "absmax_levels", "lloyd_max", "fp8_e4m3", "nvfp4"])
    )
    values: dict[str, str | int] = {
        "transform": "hadamard" if quantise == "lloyd_max" else draw(st.sampled_from(["none", "hadamard"])),
        "quantise": quantise,
        "code": draw(st.sampled_from(["none", "entropy" if quantise == "fp8_e4m3" else "bitpack"])),
    }
    for part in ("key", "value") if quantise in ("absmax_levels", "lloyd_max") else ():
        values[f"{part}_levels"] = draw(st.integers(4, 256))
        if quantise == "absmax_levels":
            values |= {f"{part}_low_levels": 4, f"{part}_low_percent": 50}
    if quantise == "nvfp4" and draw(st.booleans()):
        values["block_rule"] = "4over6"
    if quantise in ("levels", "layer_levels"):
        for part in ("key", "value"):
            axis, group = draw(st.sampled_from(["channel", "token", "all_heads"])), draw(st.sampled_from([4, 16, 32]))
            if axis == "token" and head_dim % min(group, head_dim):
                group = 4096
            values |= {f"{part}_levels": draw(st.integers(3, 256)), f"{part}_axis": axis}
            if axis != "all_heads":
                values[f"{part}_group"] = group
            if quantise == "layer_levels":
                values |= {f"{part}_low_levels": 2, f"{part}_low_percent": 50}
    return Configuration(values)


@settings(deadline=None, max_examples=300)
@given(
    data=st.data(),
    dtype=st.sampled_from(KVDtype),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 4, 36, 64, 80, 96, 100, 128, 576]),
    tokens=st.integers(1, 50),
    first_token=st.integers(0, 40),
    scale=st.sampled_from([1e-40, 1e-6, 1.0, 1e3]),
    outlier=st.sampled_from([1.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_kernels_equal_the_reference(
    data: st.DataObject,
    dtype: KVDtype,
    heads: int,
    head_dim: int,
    tokens: int,
    first_token: int,
    scale: float,
    outlier: float,
    seed: int,
) -> None:
    configuration = data.draw(lossy_configurations(head_dim))
    layout = KVLayout.keys_then_values(layers=2, heads=heads, head_dim=head_dim, dtype=dtype, page_tokens=4)
    planes = torch.randn(4, tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)) * scale
    planes[..., :: max(head_dim // 3, 1)] *= outlier
    planes[0, : tokens // 2] = 0.0
    planes[1, : tokens // 2] = -0.0
    planes = planes.clamp(-6.5e4, 6.5e4).to(dtype.torch_dtype)
    native = KVCodec(configuration, layout).encode(planes, first_token=first_token)
    reference = KVCodec(configuration, layout, use_native=False).encode(planes, first_token=first_token)
    assert native == reference
    decoded = decode_frame(native)
    assert not decoded.header.is_raw
    plain = decode_frame(native, use_native=False).planes
    assert torch.equal(torch.as_tensor(decoded.planes).view(torch.uint8), torch.as_tensor(plain).view(torch.uint8))


def test_the_lossless_split_equals_the_reference() -> None:
    every_pattern = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    planes = every_pattern.view(2, 128, 4, 64)
    layout = KVLayout.keys_then_values(layers=1, heads=4, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=16)
    configuration = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})
    native = KVCodec(configuration, layout).encode(planes, first_token=0)
    assert native == KVCodec(configuration, layout, use_native=False).encode(planes, first_token=0)
    for use_native in (True, False):
        decoded = torch.as_tensor(decode_frame(native, use_native=use_native).planes)
        assert torch.equal(decoded.view(torch.uint8), planes.contiguous().view(torch.uint8))


def test_kernels_write_only_the_tokens_they_were_given() -> None:
    layout = KVLayout.keys_then_values(layers=1, heads=2, head_dim=80, dtype=KVDtype.BFLOAT16, page_tokens=4)
    configuration = Configuration(
        {
            "transform": "hadamard", "quantise": "levels", "code": "bitpack",
            "key_levels": 6, "key_axis": "channel", "key_group": 4,
            "value_levels": 5, "value_axis": "token", "value_group": 80,
        }
    )  # fmt: skip
    frame = KVCodec(configuration, layout).encode(torch.randn(2, 11, 2, 80).bfloat16(), first_token=2)
    pool = torch.full((2, 15, 3, 80), 7.0, dtype=torch.bfloat16)
    decode_frame(frame, [plane[1:12] for plane in pool[:, :, :2].contiguous().unbind(0)])
    out = pool.clone()
    decode_frame(frame, [out[0, 2:13, :2], out[1, 2:13, :2]])
    assert torch.equal(out[:, :2], pool[:, :2])
    assert torch.equal(out[:, 13:], pool[:, 13:])
    assert torch.equal(out[:, :, 2], pool[:, :, 2])
    assert not torch.equal(out[:, 2:13, :2], pool[:, 2:13, :2])


def test_without_a_compiler_the_reference_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.WARNING)
    # Past the cache, which holds the library of the other tests.
    assert library.load_library.__wrapped__() is None
    assert "slower torch reference" in caplog.text


@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["ours", "others may write"])
def test_a_cache_that_others_may_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    folder = tmp_path / "controld" / "kvcodec"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    source = tmp_path / "small.c"
    source.write_text("int one(void) { return 1; }\n")
    built = native_build.built(compiler, source, native_build.FLAGS)
    assert (folder in built.parents) == (mode == 0o700)
    shutil.rmtree(built.parent)
