"""Segments: a prompt and what really follows it, cut from the texts of a workload.

Plain texts are one row of tokens, cut every so many tokens wherever that falls. Worked examples keep their borders: a
prompt is whole examples and then a question, and what follows is that question's own answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dataplanes.sglang.profiler.corpus import CorpusError

WINDOW_PROMPT_TOKENS = 2048
"""Segments are cut for prompts of this length; shorter prompts are taken from the same tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One prompt and its continuation.

    Args:
        prompt, continuation: rows of token ids.
        answer: where in the continuation the tokens are whose log-likelihood counts. It starts at 1 or later: the first
            token is predicted by the prompt's last one, which is not evaluated again.
    """

    prompt: torch.Tensor
    continuation: torch.Tensor
    answer: range


class Segments(Protocol):
    """Disjoint segments of a workload, by number."""

    def window_tokens(self, prompt_tokens: int) -> int:
        """Tokens of the texts that a segment takes, at least."""
        ...

    def available(self, prompt_tokens: int) -> int:
        """How many there are for prompts of this length."""
        ...

    def cut(self, prompt_tokens: int, segment: int) -> Segment:
        """The segment of this number, which is below `available`.

        Raises:
            CorpusError: its texts have no prompt this short.
        """
        ...


class TextSegments:
    """Segments of plain texts. A short prompt is the first tokens of the long one, so one prefill serves all lengths.

    Args:
        token_ids: the texts as one row of tokens.
        continuation_tokens: length of every continuation.
    """

    def __init__(self, token_ids: torch.Tensor, continuation_tokens: int) -> None:
        self._token_ids = token_ids
        self._continuation_tokens = continuation_tokens

    def window_tokens(self, prompt_tokens: int) -> int:
        """See `Segments`."""
        return max(WINDOW_PROMPT_TOKENS, prompt_tokens) + self._continuation_tokens

    def available(self, prompt_tokens: int) -> int:
        """See `Segments`."""
        return int(self._token_ids.numel()) // self.window_tokens(prompt_tokens)

    def cut(self, prompt_tokens: int, segment: int) -> Segment:
        """See `Segments`; the prompt has exactly this length."""
        start = segment * self.window_tokens(prompt_tokens)
        border = start + prompt_tokens
        return Segment(
            self._token_ids[start:border],
            self._token_ids[border : border + self._continuation_tokens],
            range(1, self._continuation_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTokens:
    """A worked example in a model's tokens.

    Args:
        lead: what stands between question and answer.
        tail: what separates the answer from the next example.
    """

    question: tuple[int, ...]
    lead: tuple[int, ...]
    answer: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole example."""
        return self.question + self.lead + self.answer + self.tail


class ExampleSegments:
    """Segments of worked examples.

    A segment's examples are its own. Its prompt of a length is the run of whole examples, with the question of the next
    one, that comes closest to that length from below. The continuation starts with the lead, so that the answer's first
    token is predicted too, and runs into the next examples or stops inside the answer.

    Args:
        examples: in the order in which they are used.
        continuation_tokens: length of every continuation.
    """

    def __init__(self, examples: Sequence[ExampleTokens], continuation_tokens: int) -> None:
        self._examples = examples
        self._continuation_tokens = continuation_tokens

    def window_tokens(self, prompt_tokens: int) -> int:
        """See `Segments`."""
        return max(WINDOW_PROMPT_TOKENS, prompt_tokens) + self._continuation_tokens

    def available(self, prompt_tokens: int) -> int:
        """See `Segments`."""
        return sum(1 for _ in self._windows(prompt_tokens))

    def cut(self, prompt_tokens: int, segment: int) -> Segment:
        """See `Segments`; the prompt is at most this long."""
        window = next(window for number, window in enumerate(self._windows(prompt_tokens)) if number == segment)
        row = [token for example in window for token in example.token_ids]
        starts = [0]
        for example in window:
            starts.append(starts[-1] + len(example.token_ids))
        runs = [
            (border - first, first, border, example)
            for example, start in zip(window, starts[:-1], strict=True)
            if (border := start + len(example.question)) + self._continuation_tokens <= len(row)
            for first in starts
            if first <= start and border - first <= prompt_tokens
        ]
        if not runs:
            shortest = min(len(example.question) for example in window)
            raise CorpusError(
                f"no question of segment {segment} fits in {prompt_tokens} tokens, the shortest has {shortest}",
                code="corpus.question_too_long",
                hint="profile longer prompts",
            )
        _, first, border, asked = max(runs, key=lambda run: run[0])
        answer_start = len(asked.lead)
        return Segment(
            torch.tensor(row[first:border]),
            torch.tensor(row[border : border + self._continuation_tokens]),
            range(answer_start, min(answer_start + len(asked.answer), self._continuation_tokens)),
        )

    def _windows(self, prompt_tokens: int) -> Iterator[list[ExampleTokens]]:
        """Consecutive examples, for each segment just enough."""
        wanted = self.window_tokens(prompt_tokens)
        window: list[ExampleTokens] = []
        tokens = 0
        for example in self._examples:
            window.append(example)
            tokens += len(example.token_ids)
            if tokens >= wanted:
                yield window
                window, tokens = [], 0
