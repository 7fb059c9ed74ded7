"""What the reference engine offers follows from the self-test of its back end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.longlive.engine import EngineError, LoadSpec
from dataplanes.longlive.linear.backend import QuantisedWeight
from dataplanes.longlive.linear.emulated import EmulatedBackend
from dataplanes.longlive.linear.precision import Precision
from dataplanes.longlive.linear.probing import ProbeSize, probe_all
from dataplanes.longlive.reference import engine as reference_engine
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.offer import EngineOffer, find_offer, offer_of
from dataplanes.longlive.reference.setting import FULL, LEFT_OUT, SPACE

W8A8 = Configuration({**FULL, "weights": "fp8", "activations": "fp8"})
W4A4 = Configuration({**FULL, "weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain"})
ACTIVE_FP8 = "weights=fp8, activations=fp8"


class WrongFP8(EmulatedBackend):
    """FP8 inputs get another scale than they are read with."""

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        is_wrong = weight.precision.activations is Precision.FP8
        return super().linear(x * 2 if is_wrong else x, weight, bias)


def probed(backend: EmulatedBackend) -> EngineOffer:
    size = ProbeSize(rows=16, inputs=64, outputs=32, repeats=1)
    return offer_of(probe_all(torch.device("cpu"), backends=[backend], size=size))


def test_a_back_end_that_passes_leaves_the_whole_space() -> None:
    offer = find_offer()
    assert offer.space is SPACE and offer.left_out == LEFT_OUT and offer.backends == {"torch_emulated": "memory"}
    assert find_offer() is offer, "probed once"


def test_a_precision_that_fails_is_left_out_with_the_reason_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = probed(WrongFP8())
    monkeypatch.setattr(reference_engine, "find_offer", lambda: offer)
    engine = ReferenceEngine()
    found = engine.capabilities()
    assert "self-test" in found.left_out[ACTIVE_FP8]
    pairs = {(one["weights"], one["activations"]) for one in found.space.enumerate()}
    assert ("fp8", "fp8") not in pairs and {("fp8", "bf16"), ("nvfp4", "nvfp4")} <= pairs
    with pytest.raises(EngineError, match="weights: torch_emulated: self-test"):
        engine.load(LoadSpec(checkpoint="untrained", setting=W8A8))
    engine.load(LoadSpec(checkpoint="untrained", setting=W4A4))
    with pytest.raises(EngineError, match="weights: torch_emulated: self-test"):
        engine.apply(W8A8, version=1)
    engine.unload()
