"""The loss is zero for what changes nothing, grows with the error, and belongs to the prompt's KV alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplanes.sglang.profiler.corpus import CorpusError
from dataplanes.sglang.profiler.quality import Loss, Planes, PromptBank, QualityError

SIZES = (64, 200)


@pytest.fixture(scope="module")
def bank(bench: Any) -> PromptBank:
    made: PromptBank = bench.bank_for("dialogue", 32)
    return made


def noisy(share: float) -> Any:
    def trip(planes: Planes) -> Planes:
        assert isinstance(planes, torch.Tensor)
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(planes.shape, generator=generator)
        return (planes.float() * (1 + share * noise)).to(planes.dtype)

    return trip


@pytest.mark.parametrize("tokens", SIZES)
def test_raw_through_the_identity_is_zero(bank: PromptBank, tokens: int) -> None:
    prompt = bank.prompt(tokens, 0)
    assert bank.meter.measure(prompt, lambda planes: planes.clone()) == Loss(0.0, 1.0)  # type: ignore[union-attr]
    assert abs(bank.meter.noise_floor_nats(prompt)) < 1e-6


def test_the_evaluation_tells_a_change_in_the_last_bit_of_one_number(bank: PromptBank) -> None:
    prompt = bank.prompt(64, 0)
    changed = prompt.planes.clone()  # type: ignore[union-attr]
    changed[0, 40, 1, 5] *= 1.5
    loss = bank.meter.measure_planes(prompt, changed)
    assert 0 < loss.loss_nats < 0.1


def test_more_noise_is_more_loss(bank: PromptBank) -> None:
    prompt = bank.prompt(200, 1)
    losses = [bank.meter.measure(prompt, noisy(share)) for share in (0.02, 0.1, 0.5)]
    assert 0 < losses[0].loss_nats < losses[1].loss_nats < losses[2].loss_nats
    assert losses[0].top1_agreement >= losses[2].top1_agreement


def test_losing_all_of_the_prompt_costs_much(bank: PromptBank) -> None:
    prompt = bank.prompt(200, 0)
    gone = bank.meter.measure(prompt, lambda planes: torch.zeros_like(planes))  # type: ignore[arg-type]
    assert gone.loss_nats > 10 * bank.meter.measure(prompt, noisy(0.02)).loss_nats


def test_a_short_prompt_is_the_beginning_of_the_long_one(bank: PromptBank) -> None:
    bank.prefill(200, 2)
    short = bank.prompt(64, 2)
    fresh = bank.meter.prefill(bank._window(64, 2)[:64])
    assert isinstance(short.planes, torch.Tensor) and isinstance(fresh, torch.Tensor)
    assert short.planes.shape == (4, 64, 2, 32)
    torch.testing.assert_close(short.planes, fresh, rtol=2e-2, atol=2e-2)
    assert short.continuation[0].tolist() == bank._window(64, 2)[64:96].tolist()
    assert short.raw_bytes == 4 * 64 * 2 * 32 * 2


def test_the_raw_run_is_what_one_unsplit_pass_says(bank: PromptBank) -> None:
    prompt = bank.prompt(64, 0)
    tokens = bank._window(64, 0)[: 64 + 32].unsqueeze(0)
    with torch.inference_mode():
        whole = bank.meter._model(tokens).logits[0, 64:].float().log_softmax(-1)
    # The cache is rounded to bfloat16, so it is close and not equal.
    assert (prompt.raw_log_probs - whole).abs().mean() < 0.05


def test_other_shapes_and_numbers_that_are_none_are_refused(bank: PromptBank) -> None:
    prompt = bank.prompt(64, 0)
    with pytest.raises(QualityError):
        bank.meter.measure(prompt, lambda planes: planes[:, :-1])  # type: ignore[call-overload]
    with pytest.raises(QualityError):
        bank.meter.measure(prompt, lambda planes: planes.float())  # type: ignore[union-attr]
    with pytest.raises(QualityError) as broken:
        bank.meter.measure(prompt, lambda planes: planes * float("nan"))  # type: ignore[operator]
    assert broken.value.code == "quality.not_finite"


def test_a_corpus_that_is_too_short_says_how_much_there_is(bank: PromptBank) -> None:
    available = bank.segments_available(64)
    assert available >= 4
    bank.require_segments(64, available)
    with pytest.raises(CorpusError, match=f"has {available} segments"):
        bank.prompt(64, available)
