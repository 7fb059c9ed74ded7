"""The loss is zero for what changes nothing, grows with the error, and belongs to the prompt's KV alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplanes.sglang.profiler.corpus import CorpusError
from dataplanes.sglang.profiler.quality import Loss, Planes, PromptBank, QualityError
from dataplanes.sglang.profiler.segments import Segment

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
    assert bank.meter.measure(prompt, lambda planes: planes.clone()) == Loss(0.0, 1.0, 0.0)  # type: ignore[union-attr]
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
    fresh = bank.meter.prefill(bank.segments.cut(64, 2).prompt)
    assert isinstance(short.planes, torch.Tensor) and isinstance(fresh, torch.Tensor)
    assert short.planes.shape == (4, 64, 2, 32)
    torch.testing.assert_close(short.planes, fresh, rtol=2e-2, atol=2e-2)
    assert short.continuation[0].tolist() == bank.segments.cut(64, 2).continuation.tolist()
    assert short.raw_bytes == 4 * 64 * 2 * 32 * 2


def test_the_raw_run_is_what_one_unsplit_pass_says(bank: PromptBank) -> None:
    prompt = bank.prompt(64, 0)
    cut = bank.segments.cut(64, 0)
    tokens = torch.cat([cut.prompt, cut.continuation]).unsqueeze(0)
    with torch.inference_mode():
        whole = bank.meter._model(tokens).logits[0, 64:].float().log_softmax(-1)
    # The cache is rounded to bfloat16, so it is close and not equal.
    assert (prompt.raw_log_probs - whole).abs().mean() < 0.05


def test_the_answer_loss_is_how_much_less_likely_the_true_tokens_became(bank: PromptBank) -> None:
    """Against two runs over prompt and continuation that are put together here."""
    prompt = bank.prompt(64, 0)
    changed = noisy(0.3)(prompt.planes)
    likelihoods = []
    for planes in (prompt.planes, changed):
        log_probs = bank.meter.prompt(planes, prompt.continuation).raw_log_probs
        of_true = [float(log_probs[n - 1, token]) for n, token in enumerate(prompt.continuation[0].tolist()) if n]
        likelihoods.append(sum(of_true) / 31)
    loss = bank.meter.measure_planes(prompt, changed)
    assert loss.answer_nats == pytest.approx(likelihoods[0] - likelihoods[1], rel=1e-4)
    assert abs(likelihoods[0] - likelihoods[1]) > 0.01

    part = bank.meter.prompt(prompt.planes, prompt.continuation, range(5, 6))
    token = prompt.continuation[0, 5]
    expected = float(prompt.raw_log_probs[4, token] - log_probs[4, token])
    assert bank.meter.measure_planes(part, changed).answer_nats == pytest.approx(expected, rel=1e-4)
    assert bank.meter.measure_planes(part, changed).loss_nats == loss.loss_nats


def test_an_answer_that_the_pass_does_not_predict_is_refused_and_none_has_no_loss(bank: PromptBank) -> None:
    prompt = bank.prompt(64, 0)
    for beyond in (range(4), range(20, 33), range(1, 9, 2)):
        with pytest.raises(QualityError, match="answer"):
            bank.meter.prompt(prompt.planes, prompt.continuation, beyond)
    short = bank.meter.prompt(prompt.planes, prompt.continuation[:, :1])
    assert bank.meter.measure(short, noisy(0.3)).answer_nats is None
    assert bank.meter.measure_planes(short, short.planes).answer_nats is None


def test_prompts_of_different_beginnings_are_prefilled_apart(bank: PromptBank) -> None:
    class Ends:
        """The last tokens before one border, however long the prompt."""

        def window_tokens(self, prompt_tokens: int) -> int:
            return 232

        def available(self, prompt_tokens: int) -> int:
            return 1

        def cut(self, prompt_tokens: int, segment: int) -> Segment:
            whole = bank.segments.cut(200, 0)
            return Segment(whole.prompt[-prompt_tokens:], whole.continuation, range(1, 32))

    ends = PromptBank(bank.meter, Ends(), "ends")
    ends.prefill(200, 0)
    short = ends.prompt(64, 0)
    fresh = bank.meter.prefill(bank.segments.cut(200, 0).prompt[-64:])
    assert isinstance(short.planes, torch.Tensor) and isinstance(fresh, torch.Tensor)
    assert torch.equal(short.planes, fresh)
    long = ends.prompt(200, 0).planes
    assert isinstance(long, torch.Tensor)
    torch.testing.assert_close(long, bank.prompt(200, 0).planes)


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
