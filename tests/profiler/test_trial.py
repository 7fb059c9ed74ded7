"""A trial through the real codecs; whatever goes wrong in it ends the trial and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Forbidden
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from dataplanes.kvcodec.errors import CodecError
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.trial import TimingPlan, TrialRunner

TIMING = TimingPlan(codec_threads=1, evaluation_threads=1, segments_per_timing=2, repeats=2)


def levels(key: int, value: int) -> dict[str, Any]:
    return {
        "transform": "hadamard",
        "quantise": "levels",
        "sink_tokens": 0,
        "key_levels": key,
        "key_axis": "channel",
        "key_group": 32,
        "value_levels": value,
        "value_axis": "token",
        "value_group": 32,
    }


LOSSLESS = {"transform": "none", "quantise": "none"}


def task(lossy: dict[str, Any], **changes: Any) -> TrialTask:
    values: dict[str, Any] = {
        "study_id": "s",
        "trial_id": "t",
        "workload": "dialogue",
        "lossy": Configuration(lossy),
        "coders": ("entropy", "zstd"),
        "prompt_tokens": (64, 200),
        "segments_per_length": 2,
        "continuation_tokens": 32,
        **changes,
    }
    return TrialTask(**values)


@pytest.fixture
def runner(bench: Any) -> TrialRunner:
    return TrialRunner(bench.space, bench.bank_for, bench.codec_for, TIMING)


def mean_loss(outcome: TrialOutcome) -> float:
    assert outcome.status is TrialStatus.MEASURED, outcome.detail
    return sum(loss.loss_nats for loss in outcome.losses) / len(outcome.losses)


def test_a_lossless_part_loses_nothing(runner: TrialRunner) -> None:
    outcome = runner.run(task(LOSSLESS))
    assert outcome.status is TrialStatus.MEASURED
    assert {(loss.loss_nats, loss.top1_agreement, loss.answer_nats) for loss in outcome.losses} == {(0.0, 1.0, 0.0)}
    assert {loss.reconstruction_error for loss in outcome.losses} == {0.0}


def test_every_segment_has_a_loss_and_every_coder_its_costs(runner: TrialRunner) -> None:
    outcome = runner.run(task(levels(8, 4)))
    assert [(loss.prompt_tokens, loss.segment) for loss in outcome.losses] == [(64, 0), (64, 1), (200, 0), (200, 1)]
    assert all(0.01 < (loss.reconstruction_error or 0.0) < 0.5 for loss in outcome.losses)
    measured = {(c.code, c.prompt_tokens, c.segment) for c in outcome.coders}
    assert measured >= {(code, tokens, 0) for code in ("entropy", "zstd") for tokens in (64, 200)}
    assert measured >= {("entropy", tokens, 1) for tokens in (64, 200)}
    for cost in outcome.coders:
        assert cost.raw_bytes == cost.prompt_tokens * 512
        assert 0 < cost.wire_bytes < cost.raw_bytes
        assert cost.encode_s > 0 and cost.decode_s > 0
    assert outcome.corpus.startswith("dialogue#")


def test_worked_examples_are_reported_under_the_length_that_was_asked_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Their prompts are a little shorter: bytes are those of the tokens that there are."""
    rows = [
        {"question": f"How much is {n} and {3 * n}?", "answer": f"It is {n} + {3 * n} = {4 * n}."} for n in range(400)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bench = ModelBench(tiny_model_dir, tmp_path, page_tokens=16, frame_bytes=64 * 512)
    runner = TrialRunner(bench.space, bench.bank_for, bench.codec_for, TIMING)
    outcome = runner.run(task(levels(8, 4), workload="sums"))
    assert outcome.status is TrialStatus.MEASURED, outcome.detail
    assert outcome.corpus.startswith("sums#") and outcome.corpus.endswith(":answers")
    asked = [(64, 0), (64, 1), (200, 0), (200, 1)]
    assert [(loss.prompt_tokens, loss.segment) for loss in outcome.losses] == asked
    assert {(cost.prompt_tokens, cost.segment) for cost in outcome.coders} == set(asked)
    bank = bench.bank_for("sums", 32)
    for cost in outcome.coders:
        assert cost.raw_bytes == bank.prompt(cost.prompt_tokens, cost.segment).tokens * 512
        assert (cost.prompt_tokens - 40) * 512 < cost.raw_bytes <= cost.prompt_tokens * 512
    assert all(loss.answer_nats for loss in outcome.losses)
    assert mean_loss(outcome) > 0


def test_a_bench_offers_only_the_part_of_its_space_that_it_is_told_to(
    bench: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    part = bench.space.restrict({"quantise": ["levels"], "transform": ["hadamard"]})
    file = tmp_path / "space.json"
    file.write_text(part.to_json())
    few = ModelBench(tiny_model_dir, page_tokens=16, space_file=file)
    assert few.space == part
    refused = TrialRunner(few.space, bench.bank_for, bench.codec_for, TIMING).run(task(LOSSLESS))
    assert refused.status is TrialStatus.INFEASIBLE and "transform" in refused.detail
    file.write_text(part.to_json().replace("hadamard", "wavelet"))
    with pytest.raises(FieldError, match=r"space\.json: .*\.transform\.values: 'wavelet' is not"):
        ModelBench(tiny_model_dir, page_tokens=16, space_file=file)
    file.write_text("[" * 100_000)
    with pytest.raises(FieldError, match="not a strategy space"):
        ModelBench(tiny_model_dir, page_tokens=16, space_file=file)
    nothing = Forbidden(values={"quantise": bench.space.parameters[1].values}, reason="none")
    file.write_text(replace(bench.space, forbidden=(*bench.space.forbidden, nothing)).to_json())
    with pytest.raises(FieldError, match="leaves nothing to measure"):
        ModelBench(tiny_model_dir, page_tokens=16, space_file=file)
    with pytest.raises(FieldError, match=r"space: .*nowhere\.json cannot be read"):
        ModelBench(tiny_model_dir, page_tokens=16, space_file=tmp_path / "nowhere.json")


def test_fewer_levels_lose_more(runner: TrialRunner) -> None:
    losses = [mean_loss(runner.run(task(levels(count, count), coders=("entropy",)))) for count in (64, 16, 4)]
    assert 0 < losses[0] < losses[1] < losses[2]


def test_the_bytes_are_those_of_the_frames(runner: TrialRunner, bench: Any) -> None:
    outcome = runner.run(task(levels(8, 4), coders=("bitpack",)))
    prompt = bench.bank_for("dialogue", 32).prompt(200, 0)
    codec = bench.codec_for(Configuration(levels(8, 4)).with_coder("bitpack"))
    frames = codec.encode(prompt.planes)
    assert len(frames) == -(-200 // codec.frame_tokens) > 1
    (cost,) = [c for c in outcome.coders if c.prompt_tokens == 200 and c.segment == 0]
    assert cost.wire_bytes == sum(frame.numel() for frame in frames)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lossy": {**levels(8, 4), "key_levels": 9}}, "key_levels"),
        ({"lossy": {**levels(8, 4), "surprise": 1}}, "surprise"),
        ({"workload": "poetry"}, "poetry"),
        ({"segments_per_length": 5000}, "segments"),
        ({"coders": ("morse",)}, "morse"),
    ],
)
def test_what_this_model_or_corpus_cannot_do_is_infeasible(
    runner: TrialRunner, changes: dict[str, Any], word: str
) -> None:
    outcome = runner.run(task(**{"lossy": levels(8, 4), **changes}))
    assert outcome.status is TrialStatus.INFEASIBLE
    assert word in outcome.detail


class Broken:
    """A codec that goes wrong in one way, around one that works."""

    def __init__(self, inner: Any, way: str) -> None:
        self.inner, self.way = inner, way

    def encode(self, planes: Any) -> Any:
        if self.way == "raises":
            raise RuntimeError("no memory left")
        return self.inner.encode(planes)

    def decode(self, frames: Any, tokens: int) -> Any:
        received = self.inner.decode(frames, tokens)
        if self.way == "zeros":
            return torch.zeros_like(received)
        if self.way == "nan":
            return received * float("nan")
        return received


@pytest.mark.parametrize(("way", "word"), [("raises", "no memory left"), ("nan", "loss is nan")])
def test_a_fault_fails_the_trial_and_the_next_one_is_measured(bench: Any, way: str, word: str) -> None:
    faulty = [True]

    def codec_for(configuration: Configuration) -> Any:
        codec = bench.codec_for(configuration)
        return Broken(codec, way) if faulty[0] else codec

    runner = TrialRunner(bench.space, bench.bank_for, codec_for, TIMING)
    outcome = runner.run(task(levels(8, 4), coders=("entropy",)))
    assert outcome.status is TrialStatus.FAILED
    assert word in outcome.detail
    faulty[0] = False
    assert runner.run(task(levels(8, 4), coders=("entropy",))).status is TrialStatus.MEASURED


def test_a_coder_that_decodes_to_something_else_is_caught(bench: Any) -> None:
    def codec_for(configuration: Configuration) -> Any:
        codec = bench.codec_for(configuration)
        return Broken(codec, "zeros") if configuration["code"] == "zstd" else codec

    outcome = TrialRunner(bench.space, bench.bank_for, codec_for, TIMING).run(task(levels(8, 4)))
    assert outcome.status is TrialStatus.FAILED
    assert "zstd decodes to other values" in outcome.detail


def test_a_codec_that_the_layout_refuses_is_infeasible(bench: Any) -> None:
    def codec_for(configuration: Configuration) -> Any:
        raise CodecError("heads of 7 do not fit", code="codec.layout")

    outcome = TrialRunner(bench.space, bench.bank_for, codec_for, TIMING).run(task(levels(8, 4)))
    assert (outcome.status, outcome.detail) == (TrialStatus.INFEASIBLE, "codec.layout: heads of 7 do not fit")


def test_cancelling_ends_the_trial_with_what_it_has(runner: TrialRunner) -> None:
    told: list[TrialOutcome] = []
    outcome = runner.run(task(levels(8, 4)), told.append, lambda: len(told) >= 2)
    assert outcome.status is TrialStatus.CANCELLED
    assert len(outcome.losses) == 2
    assert [len(progress.losses) for progress in told] == [1, 2]


def test_a_trial_that_takes_too_long_is_failed(runner: TrialRunner) -> None:
    outcome = runner.run(task(levels(8, 4), deadline_s=1e-6))
    assert outcome.status is TrialStatus.FAILED
    assert "trial.deadline" in outcome.detail
