"""Probing: what is offered and why not; libraries for GPUs say clearly what they lack here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from controld.contract.errors import FieldError
from dataplanes.longlive.linear.backend import LIBRARY_ERROR_BOUND, LinearBackend, Offer, QuantisedWeight
from dataplanes.longlive.linear.emulated import EmulatedBackend, EmulatedWeight
from dataplanes.longlive.linear.four_over_six import FourOverSixBackend
from dataplanes.longlive.linear.precision import BF16, LinearPrecision, Precision
from dataplanes.longlive.linear.probing import ProbeSize, judged, probe, probe_all
from dataplanes.longlive.linear.te import TransformerEngineBackend, quantised_init, quantised_run, recipe_for
from dataplanes.longlive.linear.torchao_fp8 import TorchaoFP8Backend
from dataplanes.numerics.nvfp4 import BlockRule

torch.set_num_threads(1)

CPU = torch.device("cpu")
TINY = ProbeSize(rows=16, inputs=64, outputs=32, repeats=1)
W4A4 = LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4)


class SwappedHalves(EmulatedBackend):
    """Reads each byte's two codes in the wrong order."""

    name = "swapped"

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        return super().linear(x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), weight, bias)


class Unregistered(EmulatedBackend):
    """Its kernels are declared and not there."""

    name = "unregistered"

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> EmulatedWeight:
        raise NotImplementedError("no kernel image for quantize")


class Native(EmulatedBackend):
    """One that does not emulate, as far as its name goes."""

    name = "native"
    is_emulated = False


def clock_of(bf16_s: float, other_s: float) -> Iterator[float]:
    """Readings of a clock by which bf16 and the other take so long, in turns."""
    now = 0.0
    while True:
        for seconds in (bf16_s, other_s):
            yield now
            now += seconds
            yield now


def test_the_emulated_one_is_offered_for_memory_at_every_precision() -> None:
    offers = probe_all(CPU, backends=[EmulatedBackend()], size=TINY)
    assert offers.precisions == EmulatedBackend.precisions
    assert {(found.offer, found.is_emulated) for found in offers.probes} == {(Offer.MEMORY, True)}
    # What is left is bf16's rounding of the result.
    assert all(found.error is not None and 0 < found.error < 0.002 for found in offers.probes)
    assert all(found.speed_ratio is not None and found.speed_ratio > 0 for found in offers.probes)
    assert offers.offered == {"torch_emulated": "memory"} and offers.left_out == {}
    assert offers.backend_for(W4A4).name == "torch_emulated"


@pytest.mark.parametrize(("bf16_s", "other_s", "offer"), [(2.0, 1.0, Offer.SPEED), (1.0, 1.25, Offer.NOTHING)])
def test_speed_is_offered_where_it_was_measured(bf16_s: float, other_s: float, offer: Offer) -> None:
    found = probe(Native(), W4A4, CPU, size=TINY, clock=clock_of(bf16_s, other_s).__next__)
    assert found.passed and found.speed_ratio == pytest.approx(bf16_s / other_s)
    assert found.offer is offer
    assert ("slower than bf16: 0.80" in found.reason) == (offer is Offer.NOTHING)


def test_what_is_wrong_or_raises_is_not_offered_and_says_so() -> None:
    wrong = probe(SwappedHalves(), W4A4, CPU, size=TINY)
    assert not wrong.passed and wrong.error is not None and wrong.error > 10 * LIBRARY_ERROR_BOUND
    assert wrong.offer is Offer.NOTHING and wrong.speed_ratio is None and "self-test" in wrong.reason
    broken = probe(Unregistered(), W4A4, CPU, size=TINY)
    assert broken.offer is Offer.NOTHING and "no kernel image" in broken.reason
    offers = probe_all(CPU, backends=[SwappedHalves(), Unregistered()], precisions=[W4A4], size=TINY)
    with pytest.raises(FieldError, match=r"swapped: self-test.*unregistered: failed"):
        offers.backend_for(W4A4)
    assert offers.offered == {} and "no kernel image" in offers.left_out["weights=nvfp4"]


def test_a_result_that_is_not_finite_fails() -> None:
    assert judged(float("nan"), 2.0, bound=0.1, is_emulated=False)[0] is Offer.NOTHING


def test_the_fastest_for_speed_goes_before_one_for_memory() -> None:
    offers = probe_all(CPU, backends=[EmulatedBackend(), Native()], precisions=[W4A4], size=TINY)
    memory = offers.probes[0]
    assert memory.offer is Offer.MEMORY
    fast = probe(Native(), W4A4, CPU, size=TINY, clock=clock_of(3.0, 1.0).__next__)
    both = type(offers)((memory, fast), offers.backends)
    assert both.backend_for(W4A4).name == "native"
    assert both.offered == {"torch_emulated": "memory", "native": "speed"}


@pytest.mark.parametrize("backend", [TransformerEngineBackend(), FourOverSixBackend(), TorchaoFP8Backend()])
def test_a_library_that_cannot_run_here_says_what_it_lacks(backend: LinearBackend) -> None:
    """None of them has been run on a GPU."""
    assert backend.refusal(BF16, CPU) == "bf16/bf16 is not carried"
    for precision in backend.precisions:
        refusal = backend.refusal(precision, CPU)
        if refusal is None:
            continue
        assert "compute capability" in refusal or "does not import" in refusal
        with pytest.raises(FieldError, match=r"precision: .*(compute capability|does not import)"):
            backend.quantise_weight(torch.randn(32, 64), precision)
        found = probe(backend, precision, CPU, size=TINY)
        assert not found.passed and found.offer is Offer.NOTHING and found.reason == refusal


@dataclass
class OlderRecipe:
    """Fields of NVFP4BlockScaling before 4over6 (the double of a signature; it computes nothing)."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False


@dataclass
class NewerRecipe(OlderRecipe):
    """Those of Transformer Engine 2.20."""

    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_err_mode: str = "MAE"


def test_a_recipe_asks_for_what_the_version_knows() -> None:
    module = ModuleType("recipe")
    vars(module)["NVFP4BlockScaling"] = OlderRecipe
    assert set(asdict(recipe_for(module, BlockRule.PLAIN)).values()) == {True}
    vars(module)["NVFP4BlockScaling"] = NewerRecipe
    assert recipe_for(module, BlockRule.PLAIN).nvfp4_4over6 == "none"
    newer = recipe_for(module, BlockRule.FOUR_OVER_SIX)
    assert (newer.nvfp4_4over6, newer.nvfp4_4over6_err_mode, newer.row_scaled_activation) == ("all", "MSE", True)


def test_contexts_have_the_names_of_the_version() -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def context(name: str) -> Any:
        def enter(**given: Any) -> contextlib.AbstractContextManager[None]:
            calls.append((name, given))
            return contextlib.nullcontext()

        return enter

    older, newer = ModuleType("older"), ModuleType("newer")
    vars(older).update({name: context(name) for name in ("fp8_model_init", "fp8_autocast")})
    vars(newer).update(vars(older) | {name: context(name) for name in ("quantized_model_init", "autocast")})
    for module in (older, newer):
        with quantised_init(module, "r"), quantised_run(module, "r"):
            pass
    assert calls == [
        ("fp8_model_init", {"enabled": True, "recipe": "r"}),
        ("fp8_autocast", {"enabled": True, "fp8_recipe": "r"}),
        ("quantized_model_init", {"enabled": True, "recipe": "r"}),
        ("autocast", {"enabled": True, "recipe": "r"}),
    ]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "backend"), [("fouroversix", FourOverSixBackend()), ("torchao", TorchaoFP8Backend())])
def test_a_library_that_is_here_agrees_with_the_emulated_result(name: str, backend: LinearBackend) -> None:
    """By what it does without a GPU."""
    pytest.importorskip(name)
    runnable = [precision for precision in backend.precisions if backend.refusal(precision, CPU) is None]
    assert runnable
    for precision in runnable:
        found = probe(backend, precision, CPU, size=TINY)
        assert found.passed and found.error is not None and 0 < found.error < LIBRARY_ERROR_BOUND
        weight = backend.quantise_weight(torch.randn(128, 256), precision)
        assert weight.nbytes == pytest.approx(128 * 256 * (0.5625 if name == "fouroversix" else 1), rel=0.05)
