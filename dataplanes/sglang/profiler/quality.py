"""How much a coded prompt changes what the model says next.

The prompt's KV goes through the real bytes of encode, frame and decode. Then the continuation is teacher-forced: one
forward pass of its tokens over a cache that holds the prompt's KV, raw in one run and decoded in the other. Only the
prompt's KV differs between the two: the continuation's own KV is computed by the model in that pass and is never coded.
The loss is the mean over the continuation's positions of KL(raw || coded) of the next-token distributions, in nats per
token. Beside it stands by how much the log-likelihood of the true tokens falls; of plain texts that is every token that
the pass predicts, of worked examples the answer's.

Everything is evaluated in float32 on KV rounded to the cache's dtype. Evaluating in bfloat16 would add about 0.0015
nats of its own; this way raw against raw is zero within 1e-6, which `QualityMeter.noise_floor_nats` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from controld.contract.errors import ControldError
from dataplanes.sglang.profiler.corpus import Corpus, CorpusError, WorkedExample
from dataplanes.sglang.profiler.segments import ExampleSegments, ExampleTokens, Segments, TextSegments

Planes = torch.Tensor | Sequence[torch.Tensor]
"""The keys of all layers, then the values; each `[tokens, kv_heads, head_dim]` in the cache's dtype.

One dense tensor `[planes, tokens, kv_heads, head_dim]` where all layers agree, else a list.
"""

RoundTrip = Callable[[Planes], Planes]
"""Takes a prompt's planes to what a receiver would have."""


class QualityError(ControldError):
    """A loss could not be measured."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one segment.

    Args:
        loss_nats: mean KL(raw || coded) over the continuation, nats a token; below zero by rounding at most.
        top1_agreement: share of positions where both runs name the same most likely token.
        answer_nats: mean log-likelihood of the answer's true tokens, raw minus coded, nats a token; below zero where
            coding made them likelier by chance. None where no token of the answer is predicted.
    """

    loss_nats: float
    top1_agreement: float
    answer_nats: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prefilled prompt with what the model says after it when nothing is coded.

    Args:
        planes: the prompt's KV.
        continuation: token ids `[1, continuation_tokens]`.
        raw_log_probs: `[continuation_tokens, vocabulary]`, float32; row `n` predicts token `n + 1`.
        answer: positions in the continuation, from 1 on; see `Segment`.
    """

    planes: Planes
    continuation: torch.Tensor
    raw_log_probs: torch.Tensor
    answer: range

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return int(self.planes[0].shape[0])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the prompt's KV."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes)


class QualityMeter:
    """Measures losses on one model.

    Args:
        model: a causal language model of `transformers`, float32, in evaluation mode.
        kv_dtype: what the KV is rounded to.
    """

    def __init__(self, model: Any, *, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        self._model = model
        self.kv_dtype = kv_dtype

    def prefill(self, token_ids: torch.Tensor) -> Planes:
        """The KV of a row of tokens."""
        with torch.inference_mode():
            layers = self._model.model(token_ids.reshape(1, -1), use_cache=True).past_key_values.layers
            rows = [layer.keys for layer in layers] + [layer.values for layer in layers]
            return _dense([row[0].transpose(0, 1).to(self.kv_dtype) for row in rows])

    def prompt(self, planes: Planes, continuation: torch.Tensor, answer: range | None = None) -> Prompt:
        """The prompt that left these planes, with the continuation (a row of tokens) evaluated on them.

        Args:
            answer: see `Segment`; None: all of the continuation that the pass predicts.

        Raises:
            QualityError: the answer is not within what the pass predicts.
        """
        row = continuation.reshape(1, -1)
        predicted = range(1, row.shape[1])
        if answer is None:
            answer = predicted
        elif answer and not (answer[0] in predicted and answer[-1] in predicted and answer.step == 1):
            raise QualityError(f"answer: {answer} is not within {predicted}", code="quality.answer")
        return Prompt(planes, row, self._continue(planes, row), answer)

    def measure(self, prompt: Prompt, round_trip: RoundTrip) -> Loss:
        """The loss of one way of moving the prompt's KV.

        Raises:
            QualityError: the round trip changed a shape or dtype, or the loss is not finite.
        """
        return self.measure_planes(prompt, round_trip(prompt.planes))

    def measure_planes(self, prompt: Prompt, received: Planes) -> Loss:
        """The loss of planes that have already made the trip; see `measure`."""
        expected = [(plane.shape, plane.dtype) for plane in prompt.planes]
        actual = [(plane.shape, plane.dtype) for plane in received]
        if actual != expected:
            raise QualityError("the round trip changed the planes' shapes or dtypes", code="quality.shape")
        if all(torch.equal(before, after) for before, after in zip(prompt.planes, received, strict=True)):
            return Loss(0.0, 1.0, 0.0 if prompt.answer else None)  # the same numbers into the same computation
        log_probs = self._continue(received, prompt.continuation)
        loss_nats = _kl_nats(prompt.raw_log_probs, log_probs)
        answer_nats = _answer_nats(prompt, log_probs)
        if not math.isfinite(loss_nats) or not math.isfinite(answer_nats or 0.0):
            raise QualityError(f"the loss is {loss_nats}, of the answer {answer_nats}", code="quality.not_finite")
        agreement = (prompt.raw_log_probs.argmax(-1) == log_probs.argmax(-1)).float().mean()
        return Loss(loss_nats, float(agreement), answer_nats)

    def noise_floor_nats(self, prompt: Prompt) -> float:
        """The loss of the prompt's own planes, evaluated once more: the noise of the evaluation alone."""
        return _kl_nats(prompt.raw_log_probs, self._continue(prompt.planes, prompt.continuation))

    def _continue(self, planes: Planes, continuation: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[continuation_tokens, vocabulary]` after the prompt with these planes."""
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache()
            rows = [plane.to(torch.float32).transpose(0, 1).unsqueeze(0) for plane in planes]
            layers = len(rows) // 2
            for layer in range(layers):
                cache.update(rows[layer], rows[layers + layer], layer)
            logits: torch.Tensor = self._model(continuation, past_key_values=cache, use_cache=True).logits
            return logits[0].float().log_softmax(-1)


class PromptBank:
    """Prompts of one corpus, prefilled once and kept: every trial reuses them.

    A segment with prompts of 256, 1,024 and 2,048 tokens of a 135M model takes 77 MB of KV and 75 MB of
    log-probabilities.

    Args:
        meter: of the model.
        segments: of the corpus.
        corpus_label: name and hash of the texts, and how they were cut if not as plain texts.
    """

    def __init__(self, meter: QualityMeter, segments: Segments, corpus_label: str) -> None:
        self.meter = meter
        self.segments = segments
        self.corpus_label = corpus_label
        self._prefilled: dict[int, tuple[torch.Tensor, Planes]] = {}
        self._prompts: dict[tuple[int, int], Prompt] = {}

    def segments_available(self, prompt_tokens: int) -> int:
        """How many disjoint segments the corpus has for prompts of this length."""
        return self.segments.available(prompt_tokens)

    def require_segments(self, prompt_tokens: int, count: int) -> None:
        """Check that there are at least `count` segments.

        Raises:
            CorpusError: there are fewer.
        """
        available = self.segments_available(prompt_tokens)
        if count > available:
            raise CorpusError(
                f"{self.corpus_label} has {available} segments of {self.segments.window_tokens(prompt_tokens)} tokens, "
                f"{count} were asked for",
                code="corpus.too_short",
                hint="give more texts or ask for fewer segments",
            )

    def prefill(self, prompt_tokens: int, segment: int) -> None:
        """Have the KV of this prompt; worth calling for the longest first: what begins alike is prefilled once.

        Raises:
            CorpusError: the corpus is too short for this segment, or has no prompt this short.
        """
        if (prompt_tokens, segment) in self._prompts:
            return
        self.require_segments(prompt_tokens, segment + 1)
        token_ids = self.segments.cut(prompt_tokens, segment).prompt
        if self._kept(token_ids, segment) is None:
            self._prefilled[segment] = token_ids, self.meter.prefill(token_ids)

    def prompt(self, prompt_tokens: int, segment: int) -> Prompt:
        """The prompt, prefilled on first use.

        Raises:
            CorpusError: the corpus is too short for this segment, or has no prompt this short.
        """
        key = (prompt_tokens, segment)
        if key not in self._prompts:
            self.require_segments(prompt_tokens, segment + 1)
            cut = self.segments.cut(prompt_tokens, segment)
            planes = self._kept(cut.prompt, segment)
            if planes is None:
                planes = self.meter.prefill(cut.prompt)
                # The kept one stays: it is what a caller prefilled for the longer prompts that follow.
                self._prefilled.setdefault(segment, (cut.prompt, planes))
            self._prompts[key] = self.meter.prompt(planes, cut.continuation, cut.answer)
        return self._prompts[key]

    def _kept(self, token_ids: torch.Tensor, segment: int) -> Planes | None:
        """Planes of these tokens, if the prefilled row begins with them: KV does not depend on what follows."""
        if segment not in self._prefilled:
            return None
        kept_ids, planes = self._prefilled[segment]
        tokens = int(token_ids.numel())
        if not torch.equal(kept_ids[:tokens], token_ids):
            return None
        return planes if kept_ids.numel() == tokens else _dense([plane[:tokens] for plane in planes])


def load_model(model_dir: Path) -> Any:
    """The model in float32, for evaluation only."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32, local_files_only=True).eval()


def bank_for(meter: QualityMeter, model_dir: Path, corpus: Corpus, *, continuation_tokens: int = 128) -> PromptBank:
    """A bank over the held-out part of a corpus, in the words of the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    if corpus.examples:
        examples = [_example_tokens(tokenizer, example) for example in corpus.examples]
        return PromptBank(meter, ExampleSegments(examples, continuation_tokens), f"{corpus.label}:answers")
    ids = tokenizer("\n\n".join(corpus.held_out), verbose=False, return_tensors="pt").input_ids[0]
    return PromptBank(meter, TextSegments(ids, continuation_tokens), corpus.label)


def _example_tokens(tokenizer: Any, example: WorkedExample) -> ExampleTokens:
    """Its pieces are tokenized one by one: no token then lies across a border."""
    pieces = [f"Question: {example.question}", "\nAnswer:", f" {example.answer}", "\n\n"]
    question, lead, answer, tail = map(tuple, tokenizer(pieces, add_special_tokens=False, verbose=False).input_ids)
    return ExampleTokens(question=question, lead=lead, answer=answer, tail=tail)


def _dense(planes: list[torch.Tensor]) -> Planes:
    if len({plane.shape for plane in planes}) == 1:
        return torch.stack(planes)
    return [plane.contiguous() for plane in planes]


def _kl_nats(raw_log_probs: torch.Tensor, log_probs: torch.Tensor) -> float:
    """Mean KL over rows. The terms are summed in float64: they are large against their sum."""
    terms = raw_log_probs.exp() * (raw_log_probs - log_probs)
    return float(terms.sum(-1, dtype=torch.float64).mean())


def _answer_nats(prompt: Prompt, log_probs: torch.Tensor) -> float | None:
    """Raw minus coded log-probability of the answer's tokens, on average; None without any."""
    answer = prompt.answer
    if not answer:
        return None
    rows = slice(answer.start - 1, answer.stop - 1)
    tokens = prompt.continuation[0, answer.start : answer.stop, None]
    fall = prompt.raw_log_probs[rows].gather(-1, tokens) - log_probs[rows].gather(-1, tokens)
    return float(fall.mean(dtype=torch.float64))
