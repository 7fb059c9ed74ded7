"""How much a coded prompt changes what the model says next.

The prompt's KV goes through the real bytes of encode, frame and decode. Then the continuation is teacher-forced: one
forward pass of its tokens over a cache that holds the prompt's KV, raw in one run and decoded in the other. Only the
prompt's KV differs between the two: the continuation's own KV is computed by the model in that pass and is never coded.
The loss is the mean over the continuation's positions of KL(raw || coded) of the next-token distributions, in nats per
token.

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
from dataplanes.sglang.profiler.corpus import Corpus, CorpusError

WINDOW_PROMPT_TOKENS = 2048
"""Segments are cut for prompts of this length; shorter prompts are their first tokens.

So one prefill serves all lengths of a segment: a token's KV does not depend on what follows.
"""

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
    """

    loss_nats: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prefilled prompt with what the model says after it when nothing is coded.

    Args:
        planes: the prompt's KV.
        continuation: token ids `[1, continuation_tokens]`.
        raw_log_probs: `[continuation_tokens, vocabulary]`, float32.
    """

    planes: Planes
    continuation: torch.Tensor
    raw_log_probs: torch.Tensor

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

    def prompt(self, planes: Planes, continuation: torch.Tensor) -> Prompt:
        """The prompt that left these planes, with the continuation (a row of tokens) evaluated on them."""
        row = continuation.reshape(1, -1)
        return Prompt(planes, row, self._continue(planes, row))

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
            return Loss(0.0, 1.0)  # the same numbers into the same computation
        log_probs = self._continue(received, prompt.continuation)
        loss_nats = _kl_nats(prompt.raw_log_probs, log_probs)
        if not math.isfinite(loss_nats):
            raise QualityError(f"the loss is {loss_nats}", code="quality.not_finite")
        agreement = (prompt.raw_log_probs.argmax(-1) == log_probs.argmax(-1)).float().mean()
        return Loss(loss_nats, float(agreement))

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
        token_ids: the corpus as one row of tokens.
        corpus_label: name and hash of the texts.
        continuation_tokens: teacher-forced tokens after the prompt.
    """

    def __init__(
        self, meter: QualityMeter, token_ids: torch.Tensor, corpus_label: str, *, continuation_tokens: int = 128
    ) -> None:
        self.meter = meter
        self.corpus_label = corpus_label
        self.continuation_tokens = continuation_tokens
        self._token_ids = token_ids
        self._prefilled: dict[int, Planes] = {}
        self._prompts: dict[tuple[int, int], Prompt] = {}

    def segments_available(self, prompt_tokens: int) -> int:
        """How many disjoint segments the corpus has for prompts of this length."""
        return int(self._token_ids.numel()) // self._window_tokens(prompt_tokens)

    def require_segments(self, prompt_tokens: int, count: int) -> None:
        """Check that there are at least `count` segments.

        Raises:
            CorpusError: there are fewer.
        """
        available = self.segments_available(prompt_tokens)
        if count > available:
            raise CorpusError(
                f"{self.corpus_label} has {available} segments of {self._window_tokens(prompt_tokens)} tokens, "
                f"{count} were asked for",
                code="corpus.too_short",
                hint="give more texts or ask for fewer segments",
            )

    def prefill(self, prompt_tokens: int, segment: int) -> None:
        """Have the KV of at least `prompt_tokens` tokens; worth calling for the longest prompt first.

        Raises:
            CorpusError: the corpus is too short for this segment.
        """
        self.require_segments(prompt_tokens, segment + 1)
        kept = self._prefilled.get(segment)
        if kept is None or int(kept[0].shape[0]) < prompt_tokens:
            self._prefilled[segment] = self.meter.prefill(self._window(prompt_tokens, segment)[:prompt_tokens])

    def prompt(self, prompt_tokens: int, segment: int) -> Prompt:
        """The prompt, prefilled on first use.

        Raises:
            CorpusError: the corpus is too short for this segment.
        """
        key = (prompt_tokens, segment)
        if key not in self._prompts:
            self.prefill(prompt_tokens, segment)
            kept = self._prefilled[segment]
            whole = int(kept[0].shape[0]) == prompt_tokens
            planes = kept if whole else _dense([plane[:prompt_tokens] for plane in kept])
            following = self._window(prompt_tokens, segment)[prompt_tokens:]
            self._prompts[key] = self.meter.prompt(planes, following[: self.continuation_tokens])
        return self._prompts[key]

    def _window_tokens(self, prompt_tokens: int) -> int:
        return max(WINDOW_PROMPT_TOKENS, prompt_tokens) + self.continuation_tokens

    def _window(self, prompt_tokens: int, segment: int) -> torch.Tensor:
        size = self._window_tokens(prompt_tokens)
        return self._token_ids[segment * size : (segment + 1) * size]


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
    ids = tokenizer("\n\n".join(corpus.held_out), verbose=False, return_tensors="pt").input_ids[0]
    return PromptBank(meter, ids, corpus.label, continuation_tokens=continuation_tokens)


def _dense(planes: list[torch.Tensor]) -> Planes:
    if len({plane.shape for plane in planes}) == 1:
        return torch.stack(planes)
    return [plane.contiguous() for plane in planes]


def _kl_nats(raw_log_probs: torch.Tensor, log_probs: torch.Tensor) -> float:
    """Mean KL over rows. The terms are summed in float64: they are large against their sum."""
    terms = raw_log_probs.exp() * (raw_log_probs - log_probs)
    return float(terms.sum(-1, dtype=torch.float64).mean())
