"""Outside codecs are measured, or named with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import outside_codecs

torch.set_num_threads(1)


def test_constriction_is_lossless_and_close_to_the_entropy() -> None:
    pytest.importorskip("constriction")
    codec = outside_codecs.ConstrictionAns()
    planes = torch.randn(4, 256, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    coded = codec.encode(planes)
    assert torch.equal(codec.decode(coded).view(torch.int16), planes.view(torch.int16))
    halves = planes.view(torch.uint8).view(-1, 2)
    entropy_bytes = 0.0
    for half in halves.unbind(1):
        shares = torch.bincount(half.int(), minlength=256).double() / len(half)
        entropy_bytes -= len(half) / 8 * float((shares * shares.clamp_min(1e-30).log2()).sum())
    assert entropy_bytes < coded.wire_bytes < entropy_bytes * 1.01 + 1100


class NotLossless(outside_codecs.ConstrictionAns):
    def decode(self, coded: outside_codecs.Coded) -> torch.Tensor:
        return super().decode(coded) * 2


def test_each_outside_codec_is_measured_or_absent_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> outside_codecs.OutsideCodec:
        raise ImportError("No module named 'elsewhere'")

    pytest.importorskip("constriction")
    builders = {"here": outside_codecs.ConstrictionAns, "elsewhere": missing, "broken": NotLossless}
    monkeypatch.setattr(outside_codecs, "builders", lambda head_dim: builders)
    codecs, droppers, absent = outside_codecs.find_outside(64)
    assert [type(codec) for codec in codecs] == [outside_codecs.ConstrictionAns]
    assert not droppers
    assert {one.name: one.reason for one in absent} == {
        "elsewhere": "ImportError: No module named 'elsewhere'",
        "broken": "ValueError: is not lossless",
    }


def test_a_dropper_shortens_every_layer_alike() -> None:
    class FirstHalf(outside_codecs.TokenDropper):
        name = "the first half"

        def keep(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return keys[:, :, :4], values[:, :, :4]

    planes = torch.randn(6, 8, 2, 16).bfloat16()
    kept = outside_codecs.shortened(FirstHalf(), planes)
    assert len(kept) == 3
    for layer, (keys, values) in enumerate(kept):
        assert torch.equal(keys[0].transpose(0, 1), planes[layer, :4].float())
        assert torch.equal(values[0].transpose(0, 1), planes[3 + layer, :4].float())
