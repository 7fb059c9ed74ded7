"""The definitions on the real model: what is lossless costs nothing, and coarser is worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.trial import TrialStatus, TrialTask
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.trial import TimingPlan, TrialRunner

pytestmark = pytest.mark.slow

MODEL_DIR = Path(__file__).parents[2] / "build/models/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def real_bench() -> ModelBench:
    if not MODEL_DIR.is_dir():
        pytest.skip("make setup converts the model")
    return ModelBench(MODEL_DIR)


def mean_loss(bench: ModelBench, lossy: dict[str, Any]) -> float:
    task = TrialTask(
        study_id="s",
        trial_id="t",
        workload="general",
        lossy=Configuration(lossy),
        coders=("entropy",),
        prompt_tokens=(256,),
        segments_per_length=2,
    )
    timing = TimingPlan(codec_threads=1, evaluation_threads=torch.get_num_threads())
    outcome = TrialRunner(bench.space, bench.bank_for, bench.codec_for, timing).run(task)
    assert outcome.status is TrialStatus.MEASURED, outcome.detail
    return sum(loss.loss_nats for loss in outcome.losses) / len(outcome.losses)


def levels(key: int, value: int) -> dict[str, Any]:
    return {
        "transform": "hadamard",
        "quantise": "levels",
        "sink_tokens": 0,
        "key_levels": key,
        "key_axis": "channel",
        "key_group": 64,
        "value_levels": value,
        "value_axis": "token",
        "value_group": 64,
    }


def test_raw_against_raw_is_below_the_noise_that_matters(real_bench: ModelBench) -> None:
    bank = real_bench.bank_for("general", 128)
    assert abs(bank.meter.noise_floor_nats(bank.prompt(256, 0))) < 1e-6


def test_a_lossless_part_loses_nothing(real_bench: ModelBench) -> None:
    assert mean_loss(real_bench, {"transform": "none", "quantise": "none"}) == 0.0


def test_coarser_levels_lose_more(real_bench: ModelBench) -> None:
    fine, middle, coarse = (mean_loss(real_bench, levels(*pair)) for pair in ((32, 16), (16, 8), (8, 4)))
    assert 0 < fine < middle < coarse
    # An order of magnitude lies between the ends; each halving of the levels costs about fourfold.
    assert coarse > 5 * fine


def test_eight_bits_are_within_a_tight_limit(real_bench: ModelBench) -> None:
    assert 0 < mean_loss(real_bench, {"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 0}) < 0.01
