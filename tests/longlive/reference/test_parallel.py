"""Ranks are spawned processes that meet over gloo."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Transition
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.longlive.reference.checkpoint import build_transformer, full_transformer
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.kv_tensor import KvFormat, KvRule
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.parallel import RankGroup, RankModel
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import Prompt

pytestmark = pytest.mark.slow

TINY = ModelShape(dim=64, heads=4, layers=2, feed_forward=64)
LIMITS = CacheLimits(window=3, sink=1, pins_shot=False)
PROMPT = Prompt(1, 2, 3)
W4A4 = LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4)


@pytest.fixture
def groups() -> Iterator[list[RankGroup]]:
    started: list[RankGroup] = []
    yield started
    for group in started:
        group.stop()


def _latents(generator: Generator | RankGroup, rule: KvRule) -> list[torch.Tensor]:
    generator.open("a", LIMITS, rule)
    return [generator.make("a", ChunkPlace(chunk=chunk), PROMPT, 3, 2).latents for chunk in range(4)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_bits_of_one(ranks: int, groups: list[RankGroup]) -> None:
    rule = KvRule(plain_dtype=torch.float64)
    alone = _latents(Generator(full_transformer("untrained", TINY).double(), NoExchange()), rule)
    group = RankGroup(RankModel(checkpoint="untrained", shape=TINY, precisions=()), ranks)
    groups.append(group)
    for mine, theirs in zip(alone, _latents(group, rule), strict=True):
        assert torch.equal(mine, theirs)


def test_ranks_share_quantised_weights_inputs_and_history(groups: list[RankGroup]) -> None:
    rule = KvRule(format=KvFormat.NVFP4, smooth=True)
    alone = Generator(build_transformer("untrained", TINY, (W4A4,)), NoExchange())
    expected = _latents(alone, rule)
    group = RankGroup(RankModel(checkpoint="untrained", shape=TINY, precisions=(W4A4,)), 2)
    groups.append(group)
    found = _latents(group, rule)
    for mine, theirs in zip(expected, found, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-3
    # Four bytes for the peak of each tensor are held by both.
    assert group.cache_bytes() == alone.cache_bytes() + 2 * 2 * 4 * TINY.layers


def test_the_bytes_that_are_sent_are_those_of_the_algorithm(groups: list[RankGroup]) -> None:
    group = RankGroup(RankModel(checkpoint="untrained", shape=TINY, precisions=(LinearPrecision(),)), 2)
    groups.append(group)
    group.open("a", LIMITS, KvRule())
    sent = group.make("a", ChunkPlace(chunk=0), PROMPT, 0, 2).sent_bytes
    tokens, passes = TINY.chunk_tokens, 3
    # Query, key, value and output of every layer: half of this rank's half goes to the other.
    exchanged = passes * TINY.layers * 4 * (tokens // 2) * TINY.dim * 4 // 2
    gathered = tokens // 2 * 32 * 4
    assert sent == exchanged + gathered


def test_the_engine_restarts_with_more_ranks_and_keeps_its_clips() -> None:
    engine = ReferenceEngine(TINY)
    single = Configuration({**FULL, "vae": "stream", "steps": 1})
    double = Configuration({**single, "ranks": 2})
    engine.load(LoadSpec(checkpoint="untrained", setting=single))
    engine.open(SessionSpec(session_id="a", prompt="a red circle moves sideways"))
    try:
        for _ in range(2):
            engine.step("a")
        engine.apply(double, version=1)
        result = engine.step("a")
        (applied,) = result.applied
        assert applied.transition is Transition.RESTART and applied.keeps_kv and not applied.refused
        assert result.report.communication_bytes > 0
        assert engine._loaded is not None and engine._loaded.generator.kept("a") == (0, 1, 2)
        engine.apply(single, version=2)
        assert engine.step("a").report.communication_bytes == 0
    finally:
        engine.unload()


def test_a_rank_that_dies_is_told_and_the_engine_loads_again() -> None:
    engine = ReferenceEngine(TINY)
    setting = Configuration({**FULL, "ranks": 2})
    engine.load(LoadSpec(checkpoint="untrained", setting=setting))
    try:
        engine.open(SessionSpec(session_id="a", prompt="a red circle moves sideways"))
        engine.step("a")
        assert engine._loaded is not None
        (other,) = engine._loaded.generator.process_ids  # type: ignore[union-attr]
        assert engine.sessions() == {"a"}
        os.kill(other, signal.SIGKILL)
        limit_s = time.monotonic() + 60
        while engine.sessions():
            assert time.monotonic() < limit_s, "told before anybody calls the engine"
            time.sleep(0.01)
        with pytest.raises(EngineError) as caught:
            engine.step("a")
        assert caught.value.code == "engine.worker_died"
        engine.load(LoadSpec(checkpoint="untrained", setting=FULL))
        engine.open(SessionSpec(session_id="a", prompt="a red circle moves sideways"))
        engine.step("a")
    finally:
        engine.unload()


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(EngineError, match="ranks: 3 does not divide 4 heads"):
        RankGroup(RankModel(checkpoint="untrained", shape=TINY, precisions=()), 3)
