"""What measures the ground truth: many lossy parts on the same few prompts, as quickly as one thread can.

The bytes are those of the profiler (`FrameCodec`, `measure_coder`), and the loss is that of `QualityMeter`; here
several parts go through the model in one forward pass, and codecs find their memory warm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from dataplanes.kvcodec import ArtefactShelf, CodecError, KVLayout, decode_frame
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.coder_cost import measure_coder
from dataplanes.sglang.profiler.corpus import python_manual
from dataplanes.sglang.profiler.quality import Planes, Prompt, PromptBank, QualityMeter, bank_for, load_model
from dataplanes.sglang.profiler.segments import TextSegments
from dataplanes.sglang.profiler.wire_codec import FRAME_BYTES, FrameCodec, layout_of

PAGE_TOKENS: Final = 64
_SUM_BLOCK: Final = 64
_MOST_FRAME_TOKENS: Final = 128
_SPARE: Final = 2
"""No frame is longer than so many times its raw bytes."""


class TruthError(ControldError):
    """The ground truth cannot be measured here, or a file of it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A lossy part to measure.

    Args:
        codes: its coders; only the first runs on all segments.
        repeats: how often each is timed.
    """

    lossy: Configuration
    codes: tuple[str, ...]
    repeats: int = 1

    def __post_init__(self) -> None:
        if not self.codes:
            raise FieldError("wanted.codes", "is empty")
        if self.repeats < 1:
            raise FieldError("wanted.repeats", f"{self.repeats} is not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoderTiming:
    """One coder on the first segment.

    Args:
        encode_s, decode_s: processor time of the thread.
    """

    wire_bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One lossy part.

    Args:
        losses: of every segment, nats a token; empty where the part is infeasible.
        coders: by name.
        infeasible: why it cannot be measured; empty where it was.
    """

    lossy: Configuration
    losses: tuple[float, ...] = ()
    coders: Mapping[str, CoderTiming]
    infeasible: str = ""


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """What a sender and a receiver have ready before anything is timed; one codec after another uses it."""

    frames: tuple[torch.Tensor, ...]
    planes: torch.Tensor

    @classmethod
    def for_prompt(cls, planes: torch.Tensor, frame_bytes: int = FRAME_BYTES) -> TransferMemory:
        """Enough for one prompt in frames of at most `_MOST_FRAME_TOKENS` tokens."""
        tokens = int(planes.shape[1])
        token_bytes = planes.numel() * planes.element_size() // tokens
        count = -(-tokens // PAGE_TOKENS)
        size = max(frame_bytes, token_bytes * min(_MOST_FRAME_TOKENS, tokens)) * _SPARE
        frames = tuple(torch.full((size,), 0, dtype=torch.uint8) for _ in range(count))
        return cls(frames, torch.zeros_like(planes).fill_(0))


class WarmFrameCodec(FrameCodec):
    """A `FrameCodec` in memory that was used before, with what both sides prepare for a configuration in place.

    So its first call costs what the tenth of a serving process costs.
    """

    def __init__(
        self, configuration: Configuration, layout: KVLayout, memory: TransferMemory, artefacts: Mapping[str, object]
    ) -> None:
        super().__init__(configuration, layout, artefacts=artefacts)
        if self._codec.max_frame_bytes(self.frame_tokens) > memory.frames[0].numel():
            raise TruthError("a frame may be longer than the memory for it", code="truth.memory")
        self._buffers = list(memory.frames)
        self._received = memory.planes
        nothing = memory.planes[:, :0]
        tokens = int(memory.planes.shape[1])
        decode_frame(self._codec.encode(nothing, first_token=0, request_tokens=tokens), artefacts=artefacts)


class LossBatch:
    """The losses of several parts on the same prompts, in one forward pass.

    Args:
        model: a causal language model of `transformers`, float32, in evaluation mode.
        prompts: of one length and one length of continuation.
        parts: how many fit in.
    """

    def __init__(self, model: Any, prompts: Sequence[Prompt], parts: int) -> None:
        planes = [_dense(prompt.planes) for prompt in prompts]
        count, tokens, heads, head_dim = planes[0].shape
        self._model = model
        self._planes = planes
        self._continuations = torch.cat([prompt.continuation for prompt in prompts]).repeat(parts, 1)
        self._raw_log_probs = torch.stack([prompt.raw_log_probs for prompt in prompts])
        self._raw_probs = self._raw_log_probs.exp()
        self._rows = torch.zeros(count, parts * len(prompts), heads, tokens, head_dim)
        self._unchanged = [False] * (parts * len(prompts))

    def put(self, part: int, segment: int, received: Planes) -> None:
        """Take what arrived of a prompt; copied."""
        planes = _dense(received)
        row = part * len(self._planes) + segment
        self._unchanged[row] = torch.equal(planes, self._planes[segment])
        self._rows[:, row].copy_(planes.transpose(1, 2))

    def losses(self, parts: int) -> list[tuple[float, ...]]:
        """Mean KL(raw || coded) over the continuation, nats a token, of the first `parts` parts by segment."""
        from transformers import DynamicCache

        segments, layers = len(self._planes), len(self._rows) // 2
        used = parts * segments
        with torch.inference_mode():
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(self._rows[layer, :used], self._rows[layers + layer, :used], layer)
            hidden = self._model.model(
                self._continuations[:used], past_key_values=cache, use_cache=True
            ).last_hidden_state
            found = []
            for part in range(parts):
                rows = slice(part * segments, (part + 1) * segments)
                losses = self._kl_nats(self._model.lm_head(hidden[rows])).tolist()
                # The same numbers into the same computation.
                found.append(tuple(0.0 if same else x for x, same in zip(losses, self._unchanged[rows], strict=True)))
            return found

    def _kl_nats(self, logits: torch.Tensor) -> torch.Tensor:
        """Of every segment. The terms are large against their sum: float64 sums sums of short blocks."""
        log_probs = logits.log_softmax(-1)
        terms = torch.sub(self._raw_log_probs, log_probs, out=log_probs).mul_(self._raw_probs)
        vocabulary = terms.shape[-1]
        whole = vocabulary // _SUM_BLOCK * _SUM_BLOCK
        blocks = terms[..., :whole].reshape(*terms.shape[:-1], -1, _SUM_BLOCK).sum(-1)
        sums = blocks.sum(-1, dtype=torch.float64) + terms[..., whole:].sum(-1, dtype=torch.float64)
        return sums.mean(-1)


class TruthBench:
    """A model with its prompts, and everything that measuring a part needs.

    Args:
        model_dir: a Hugging Face model folder.
        artefacts_dir: of calibrated artefacts; those of this model are used.
        prompt_tokens, continuation_tokens, segments: what is measured on, of the Python manual's held-out part.
        batch_parts: how many parts go through the model at once.
        tokens_file: the tokens of another text instead, as `{"corpus": name, "token_ids": [...]}`: every Python has
            another manual.

    Raises:
        CorpusError: the text has fewer segments.
    """

    def __init__(
        self,
        model_dir: Path,
        artefacts_dir: Path,
        *,
        prompt_tokens: int,
        continuation_tokens: int,
        segments: int,
        batch_parts: int,
        tokens_file: Path | None = None,
    ) -> None:
        self.identity = identify_model(model_dir)
        self.layout = layout_of(self.identity, page_tokens=PAGE_TOKENS)
        self.artefacts = ArtefactShelf.of_folder(artefacts_dir, self.identity.fingerprint)
        model = load_model(model_dir)
        self.meter = QualityMeter(model, kv_dtype=getattr(torch, self.identity.kv_dtype))
        if tokens_file is None:
            bank = bank_for(self.meter, model_dir, python_manual(), continuation_tokens=continuation_tokens)
        else:
            text = json.loads(tokens_file.read_text())
            segments_of = TextSegments(torch.tensor(text["token_ids"]), continuation_tokens)
            bank = PromptBank(self.meter, segments_of, text["corpus"])
        bank.require_segments(prompt_tokens, segments)
        self.corpus_label = bank.corpus_label
        self.prompts = [bank.prompt(prompt_tokens, segment) for segment in range(segments)]
        self.batch_parts = batch_parts
        self._batch = LossBatch(model, self.prompts, batch_parts)
        planes = _dense(self.prompts[0].planes)
        self._memory = TransferMemory.for_prompt(planes)
        self._other_memory = TransferMemory(self._memory.frames, torch.zeros_like(planes).fill_(0))

    @property
    def raw_bytes(self) -> int:
        """Of one prompt's KV."""
        return self.prompts[0].raw_bytes

    def measure(self, parts: Sequence[Wanted]) -> Iterator[Measured]:
        """Measure lossy parts, in order but for those that the codec refuses: they follow those of their batch.

        Raises:
            TruthError: coders of a part decode to different values.
        """
        for start in range(0, len(parts), self.batch_parts):
            coded: list[Measured] = []
            refused: list[Measured] = []
            for part in parts[start : start + self.batch_parts]:
                try:
                    coders = self._run_coders(len(coded), part)
                except CodecError as error:
                    refused.append(Measured(lossy=part.lossy, coders={}, infeasible=f"{error.code}: {error}"))
                else:
                    coded.append(Measured(lossy=part.lossy, coders=coders))
            losses = self._batch.losses(len(coded)) if coded else []
            for found, of_part in zip(coded, losses, strict=True):
                yield replace(found, losses=of_part)
            yield from refused

    def _run_coders(self, slot: int, part: Wanted) -> dict[str, CoderTiming]:
        """Every coder on the first segment, the first coder on the others, as in a trial of the profiler."""
        found: dict[str, CoderTiming] = {}
        first = torch.empty(0)
        for code in part.codes:
            configuration = part.lossy.with_coder(code)
            memory = self._other_memory if found else self._memory
            codec = WarmFrameCodec(configuration, self.layout, memory, self.artefacts)
            cost = measure_coder(
                codec, self.prompts[0].planes, warm_up=0, repeats=part.repeats, budget_s=1.0, timer=time.thread_time
            )
            received = _dense(cost.received)
            if not found:
                first = received
            elif not torch.equal(first, received):
                raise TruthError(f"{configuration} decodes to other values than its other coders", code="truth.coder")
            found[code] = CoderTiming(wire_bytes=cost.wire_bytes, encode_s=cost.encode_s, decode_s=cost.decode_s)
        self._batch.put(slot, 0, first)
        codec = WarmFrameCodec(part.lossy.with_coder(part.codes[0]), self.layout, self._memory, self.artefacts)
        with torch.inference_mode():
            for segment, prompt in enumerate(self.prompts[1:], start=1):
                self._batch.put(slot, segment, codec.decode(codec.encode(prompt.planes), prompt.tokens))
        return found


def _dense(planes: Planes) -> torch.Tensor:
    if not isinstance(planes, torch.Tensor):
        raise TruthError("layers of different shapes are not measured here", code="truth.layout")
    return planes
