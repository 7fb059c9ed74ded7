"""Plain texts are cut as they always were; worked examples stay whole, followed by the answer that was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.sglang.profiler.corpus import CorpusError, read_corpus
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.segments import ExampleSegments, ExampleTokens, TextSegments

ROOT = Path(__file__).parents[2]
LEAD, TAIL = (7, 8), (9,)


def example(number: int, question: int, answer: int) -> ExampleTokens:
    """Tokens that tell which example and which piece they are of."""
    return ExampleTokens(question=(1000 + number,) * question, lead=LEAD, answer=(2000 + number,) * answer, tail=TAIL)


EXAMPLES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), min_size=40, max_size=80).map(
    lambda sizes: [example(number, *size) for number, size in enumerate(sizes)]
)


def test_plain_texts_are_cut_where_profiles_measured_before_were_cut() -> None:
    """Windows of 2,048 tokens and the continuation, one after another; a longer prompt makes them longer."""
    segments = TextSegments(torch.arange(20_000), 128)
    assert (segments.window_tokens(256), segments.available(256), segments.available(3000)) == (2176, 9, 6)
    cut = segments.cut(256, 3)
    assert cut.prompt.tolist() == list(range(6528, 6784))
    assert cut.continuation.tolist() == list(range(6784, 6912))
    assert cut.answer == range(1, 128)
    assert segments.cut(3000, 1).prompt.tolist() == list(range(3128, 6128))


def test_a_loss_on_plain_texts_is_that_of_the_tokens_at_those_places(bench: Any) -> None:
    from transformers import AutoTokenizer

    bank = bench.bank_for("dialogue", 32)
    tokenizer = AutoTokenizer.from_pretrained(str(bench._model_dir))
    corpus = read_corpus(bench._texts_dir / "dialogue")
    ids = tokenizer("\n\n".join(corpus.held_out), verbose=False, return_tensors="pt").input_ids[0]
    by_hand = bank.meter.prompt(bank.meter.prefill(ids[2080 : 2080 + 64]), ids[2144 : 2144 + 32])
    coarse = (by_hand.planes.float() * 4).round().div(4).to(torch.bfloat16)
    assert bank.corpus_label == corpus.label
    cut = bank.segments.cut(64, 1)
    again = bank.meter.prompt(bank.meter.prefill(cut.prompt), cut.continuation, cut.answer)
    assert bank.meter.measure_planes(again, coarse) == bank.meter.measure_planes(by_hand, coarse)


@settings(max_examples=20, deadline=None)
@given(EXAMPLES, st.integers(60, 2500), st.integers(1, 128))
def test_a_prompt_is_whole_examples_and_a_question_followed_by_its_answer(
    examples: list[ExampleTokens], prompt_tokens: int, continuation_tokens: int
) -> None:
    segments = ExampleSegments(examples, continuation_tokens)
    row = [token for one in examples for token in one.token_ids]
    seen: set[int] = set()
    for number in range(segments.available(prompt_tokens)):
        cut = segments.cut(prompt_tokens, number)
        prompt, continuation = cut.prompt.tolist(), cut.continuation.tolist()
        assert 0 < len(prompt) <= prompt_tokens
        assert len(continuation) == continuation_tokens
        first = row.index(prompt[0])
        assert row[first : first + len(prompt) + continuation_tokens] == prompt + continuation
        asked = prompt[-1] - 1000
        assert asked >= 0 and prompt.count(prompt[-1]) == len(examples[asked].question)
        assert continuation[:2] == [7, 8][:continuation_tokens]
        answers = [place for place, token in enumerate(continuation) if token == 2000 + asked]
        assert list(cut.answer) == answers
        # No example serves two segments.
        used = {token for token in prompt if token >= 1000}
        assert not used & seen
        seen |= used


@settings(max_examples=15, deadline=None)
@given(EXAMPLES)
def test_no_run_of_examples_would_fill_the_prompt_better(examples: list[ExampleTokens]) -> None:
    segments = ExampleSegments(examples, 32)
    if not segments.available(256):
        return
    window: list[ExampleTokens] = []
    while sum(len(one.token_ids) for one in window) < segments.window_tokens(256):
        window.append(examples[len(window)])
    sizes = [len(one.token_ids) for one in window]
    fitting = [
        tokens
        for last in range(len(window))
        for first in range(last + 1)
        if (tokens := sum(sizes[first:last]) + len(window[last].question)) <= 256
        and sum(sizes[last:]) - len(window[last].question) >= 32
    ]
    assert len(segments.cut(256, 0).prompt) == max(fitting)


def test_questions_longer_than_the_prompt_are_an_error_that_says_so() -> None:
    segments = ExampleSegments([example(number, 100 + number, 80) for number in range(30)], 32)
    with pytest.raises(CorpusError, match="no question of segment 0 fits in 64 tokens, the shortest has 100") as short:
        segments.cut(64, 0)
    assert short.value.code == "corpus.question_too_long"


def gsm8k() -> Path:
    path = Path(os.environ.get("CONTROLD_GSM8K", ROOT / "data/gsm8k_first600.jsonl"))
    if not path.is_file():
        pytest.skip("GSM8K is not here (CONTROLD_GSM8K)")
    return path


def test_gsm8k_is_all_worked_examples() -> None:
    path = gsm8k()
    corpus = read_corpus(path)
    assert len(corpus.examples) == len(corpus.held_out) > 100
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answers = {row["question"]: row["answer"] for row in rows}
    assert all(answers[one.question] == one.answer for one in corpus.examples)


@pytest.mark.slow
def test_answers_of_gsm8k_become_less_likely_the_coarser_the_prompt(tmp_path: Path) -> None:
    model_dir = ROOT / "build/models/smollm2-135m-instruct"
    if not model_dir.is_dir():
        pytest.skip("make setup converts the model")
    (tmp_path / "gsm8k.jsonl").write_bytes(gsm8k().read_bytes())
    bank = ModelBench(model_dir, tmp_path).bank_for("gsm8k", 128)
    assert bank.segments_available(256) >= 4
    falls = []
    for steps in (8.0, 1.0):
        total = 0.0
        for segment in range(4):
            prompt = bank.prompt(256, segment)
            assert 200 < prompt.tokens <= 256
            assert isinstance(prompt.planes, torch.Tensor)
            coarse = (prompt.planes.float() * steps).round().div(steps).to(prompt.planes.dtype)
            loss = bank.meter.measure_planes(prompt, coarse)
            assert loss.answer_nats is not None
            total += loss.answer_nats
        falls.append(total / 4)
    assert falls[1] > max(falls[0], 0.0)
