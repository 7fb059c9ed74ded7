"""Trials on the real reference engine, with untrained weights: what they say, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from dataplanes.longlive import settings
from dataplanes.longlive.profiler.trial import CORPUS, VideoTrialRunner
from dataplanes.longlive.reference.checkpoint import UNTRAINED_NAME
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.quality import QualityMeter
from dataplanes.longlive.reference.setting import FULL, SPACE

ASYNC = '{"ranks":1,"vae":"async"}'
BATCH = '{"ranks":1,"vae":"batch"}'
REFERENCE = Configuration({name: value for name, value in FULL.items() if name not in settings.LOSSLESS})


def task(lossy: Configuration = REFERENCE, **changes: Any) -> TrialTask:
    values: dict[str, Any] = {
        "study_id": "s",
        "trial_id": "t",
        "workload": "shapes",
        "lossy": lossy,
        "coders": (ASYNC,),
        "clip_chunks": (1,),
        "segments_per_length": 2,
        **changes,
    }
    return TrialTask(**values)


@pytest.fixture(scope="module")
def runner() -> VideoTrialRunner:
    space = SPACE.restrict({settings.RANKS: (1,)})
    return VideoTrialRunner(space, ReferenceEngine, QualityMeter(UNTRAINED_NAME), UNTRAINED_NAME)


@pytest.mark.slow
def test_the_reference_loses_nothing_and_another_setting_is_compared_clip_by_clip(runner: VideoTrialRunner) -> None:
    told: list[TrialOutcome] = []
    full = runner.run(task(coders=(ASYNC, BATCH)), told.append)
    assert full.status is TrialStatus.MEASURED, full.detail
    assert [clip.loss for clip in full.clips] == [0.0, 0.0]
    assert [len(outcome.clips) for outcome in told] == [1, 2]
    assert full.corpus == CORPUS
    at_once, at_the_end = full.engine
    assert (at_once.variant, at_the_end.variant) == (ASYNC, BATCH)
    assert min(at_once.forward_s, at_once.vae_s, at_the_end.forward_s, at_the_end.vae_s) > 0
    assert at_once.motion is not None
    assert at_once.motion > 0

    lossy = Configuration({**REFERENCE, "steps": 1, "kv": "nvfp4", "kv_smooth": "token_mean"})
    other = runner.run(task(lossy, first_segment=1))
    assert other.status is TrialStatus.MEASURED, other.detail
    assert [clip.segment for clip in other.clips] == [1, 2]
    meter = runner.meter
    expected = [
        meter.under(Configuration({**FULL, **lossy})).measure(n, 1).loss - meter.under(FULL).measure(n, 1).loss
        for n in (1, 2)
    ]
    assert [clip.loss for clip in other.clips] == expected
    (measured,) = other.engine
    assert measured.memory.kv_bytes < at_once.memory.kv_bytes
    assert measured.reference_bytes == sum(
        (at_once.memory.weights_bytes, at_once.memory.kv_bytes, at_once.memory.activation_bytes)
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload": "dialogue"}, "no clips of 'dialogue'"),
        ({"lossy": Configuration({**REFERENCE, "window": 6})}, "place in the window"),
        ({"lossy": Configuration({**REFERENCE, "steps": 3})}, "steps"),
        ({"coders": ('{"ranks":2,"vae":"async"}',)}, "ranks"),
        ({"coders": ("entropy",)}, "code"),
        ({"clip_chunks": (), "prompt_tokens": (256,)}, "clip_chunks"),
    ],
)
def test_what_the_engine_cannot_do_is_a_result(runner: VideoTrialRunner, changes: dict[str, Any], said: str) -> None:
    outcome = runner.run(task(**changes))
    assert outcome.status is TrialStatus.INFEASIBLE
    assert said in outcome.detail


def test_a_trial_that_is_cancelled_says_so(runner: VideoTrialRunner) -> None:
    asked: Iterator[bool] = iter([False, True])
    outcome = runner.run(task(Configuration({**REFERENCE, "steps": 1})), cancelled=lambda: next(asked))
    assert outcome.status is TrialStatus.CANCELLED
    assert len(outcome.clips) == 1
