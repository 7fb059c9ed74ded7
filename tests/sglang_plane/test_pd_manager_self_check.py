"""What a sender finds that decodes frames of its own, and what controld makes of it; see `pd_rig`."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import sampled_index
from controld.contract.effect import Effect, Verdict
from controld.contract.effect import Path as EffectPath
from controld.contract.fair_queue import Tenancy
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Feedback, Learner
from dataplanes.kvcodec import FrameError, FrameErrorReason
from dataplanes.kvcodec.reconstruction import reconstruction_error
from dataplanes.sglang.pd import page_sizes
from dataplanes.sglang.pd import self_check as self_check_module
from dataplanes.sglang.pd import sender as sender_module
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.self_check import SelfCheck
from tests.sglang_plane.pd_rig import LAYERS, LEVELS, LOSSLESS, PAGE_TOKENS, TWO_TENANTS, Rig, assert_close, coded

pytestmark = pytest.mark.slow  # importing SGLang takes most of it


def test_a_sampled_transfer_tells_how_far_off_its_frames_are(rig: Rig) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    source, target, tokens = list(range(3, 63)), list(range(100, 160)), 60 * PAGE_TOKENS - 5
    before = rig.prefill.pool.clone()
    assert rig.succeeded(source, target, tokens)

    effect = rig.effect()
    sent, got = rig.sent(source, tokens), rig.got(target, tokens)
    whole = reconstruction_error([[(sent[:LAYERS], got[:LAYERS])], [(sent[LAYERS:], got[LAYERS:])]])
    assert effect.reconstruction_error == pytest.approx(whole, rel=0.02)
    assert 0.01 < whole < 0.05
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.CODED, Verdict.VERIFIED, "")
    assert torch.equal(rig.prefill.pool, before), "the look writes nothing into the pool"
    rig.prefill.agent.self_check = False
    assert rig.succeeded(source, target, tokens)
    assert rig.effect(2).reconstruction_error is None


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first source page of every frame that is looked at, as it goes on."""
    first_pages: list[int] = []
    real = SelfCheck.look

    def note(self: SelfCheck, frame: torch.Tensor, pages: Any, tokens: int) -> Any:
        first_pages.append(int(pages[0]))
        return real(self, frame, pages, tokens)

    monkeypatch.setattr(SelfCheck, "look", note)
    return first_pages


@pytest.mark.parametrize(("pages", "chunk_pages"), [(8, 2), (64, None)], ids=["chunked prefill", "fair parts"])
def test_every_part_of_a_prompt_is_looked_at_as_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, looked_at: list[int], pages: int, chunk_pages: int | None
) -> None:
    monkeypatch.setattr(page_sizes, "PART_BYTES", 1)
    rig.prefill.agent.shares = TWO_TENANTS if chunk_pages is None else Tenancy()
    coded(rig)
    rig.prefill.agent.self_check = True
    transfers, source, target = 80, range(3, 3 + pages), range(100, 100 + pages)
    for number in range(1, transfers + 1):
        assert rig.succeeded(source, target, pages * PAGE_TOKENS, chunk_pages=chunk_pages)
        assert rig.effect(number).chunks >= 4
        assert rig.effect(number).reconstruction_error is not None
    assert len(looked_at) == transfers, "one frame of each"
    quarters = Counter((page - 3) // (pages // 4) for page in looked_at)
    assert sorted(quarters) == [0, 1, 2, 3]
    # By chance some quarter has fewer than 4 of 80 once in 700,000 runs.
    assert min(quarters.values()) >= 4


def test_the_token_that_is_looked_at_is_counted_behind_the_prefix(rig: Rig, looked_at: list[int]) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    tokens = 6 * PAGE_TOKENS
    assert rig.succeeded(range(3, 9), range(100, 106), tokens, chunk_pages=2, prefix_tokens=64 * PAGE_TOKENS)
    expected = sampled_index(rig.effect().transfer_id, tokens) // (2 * PAGE_TOKENS)
    assert looked_at == [3 + 2 * expected]


def test_a_transfer_that_turns_out_shorter_is_not_looked_at(rig: Rig, looked_at: list[int]) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    assert rig.succeeded([1, 2], [3, 4], 32, prompt_tokens=10**15)
    assert (rig.effect().path, rig.effect().reconstruction_error, looked_at) == (EffectPath.CODED, None, [])


def test_a_lossless_codec_is_exact_to_the_last_bit_of_the_look(rig: Rig) -> None:
    coded(rig, LOSSLESS)
    rig.prefill.agent.self_check = True
    rig.prefill.pool[3, 5 * PAGE_TOKENS] = float("inf")
    rig.prefill.pool[4, 5 * PAGE_TOKENS + 1] = float("nan")
    assert rig.succeeded([5, 9, 7], [1, 3, 2], 3 * PAGE_TOKENS)
    assert rig.effect().reconstruction_error == 0.0


def raising(error: Exception) -> Callable[..., Any]:
    """Something that fails when it is called."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_sender_that_cannot_decode_its_own_frame_says_so_and_goes_on_raw(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    in_the_second_chunk = 2 * PAGE_TOKENS
    monkeypatch.setattr(sender_module, "sampled_index", lambda *_: in_the_second_chunk)
    refusal = FrameError(FrameErrorReason.CHECKSUM, "not ours")
    monkeypatch.setattr(self_check_module, "decode_frame", raising(refusal))
    assert rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=2)
    effect = rig.effect()
    assert (effect.path, effect.reason) == (EffectPath.RAW_FALLBACK, "self_check:checksum")
    assert effect.reconstruction_error is None
    assert_close(rig.got(range(8, 12), 4 * PAGE_TOKENS), rig.sent(range(4), 4 * PAGE_TOKENS))
    assert torch.equal(rig.got(range(12, 16), 4 * PAGE_TOKENS), rig.sent(range(4, 8), 4 * PAGE_TOKENS))
    assert rig.prefill.agent.counts["pd.raw.self_check:checksum"] == 1
    assert "pd.self_check_skipped" not in rig.prefill.agent.counts


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't allocate memory")])
def test_a_look_that_fails_says_nothing_about_the_codec(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    monkeypatch.setattr(self_check_module, "decode_frame", raising(error))
    assert rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=2)
    effect = rig.effect()
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.CODED, Verdict.VERIFIED, "")
    assert effect.reconstruction_error is None
    assert_close(rig.got(range(8, 16), 8 * PAGE_TOKENS), rig.sent(range(8), 8 * PAGE_TOKENS))
    counts = rig.prefill.agent.counts
    assert (counts["pd.self_check_skipped"], counts["pd.exception"]) == (1, 1)
    assert sum("tells nothing" in record.getMessage() for record in caplog.records) == 1


def test_a_codec_made_worse_behind_its_back_is_pinned_off(rig: Rig) -> None:
    """The hidden switch: under the arm's name half the levels, as a wrong scale would have it."""
    coded(rig)
    rig.prefill.agent.self_check = True
    source, target, tokens = list(range(12)), list(range(60, 72)), 12 * PAGE_TOKENS

    def error(number: int) -> Effect:
        rig.fill(number)
        assert rig.succeeded(source, target, tokens)
        return rig.effect(number)

    healthy = [error(number) for number in range(1, 6)]
    errors = [effect.reconstruction_error or 0.0 for effect in healthy]
    learner = Learner("pd", "default", KvTransfer())
    measured = Profile(
        configuration=LEVELS, workload="general", model_fingerprint="m", loss_mean_nats=0.01, loss_se_nats=0.001,
        loss_samples=5, worst_prompt_tokens=256, ratio=2.0, encode=StageTime(1e-3, 5e-9),
        decode=StageTime(1e-3, 5e-9), median_transfer_bytes=1e6, error_mean=float(np.exp(np.mean(np.log(errors)))),
        error_log_sd=float(np.std(np.log(errors), ddof=1)), error_samples=len(errors),
    )  # fmt: skip
    learner.set_candidates([measured], workloads={"default": "general"})

    def observe(effect: Effect) -> None:
        # The agent's bandwidth is invented; of an effect with times that cannot be, nothing is believed.
        true = dataclasses.replace(effect, bandwidth_bytes_per_s=effect.wire_bytes / effect.wire_s)
        assert learner.observe(true, true.finished_unix_s) is Feedback.LEARNED

    for number in range(6, 12):
        effect = error(number)
        observe(effect)
    assert learner.pins(time.time()).pins == ()

    sender = rig.prefill.manager.controld_plane.sender
    sender._parts = dataclasses.replace(sender._parts, faults=Faults(coarse_codec_from=1))
    bad = 0
    while not learner.pins(time.time()).pins:
        bad += 1
        assert bad <= 4, "it should be out by now"
        effect = error(11 + bad)
        assert (effect.arm_id, effect.verdict) == (LEVELS.config_id, Verdict.VERIFIED), "nobody else has seen anything"
        observe(effect)
    assert bad == 3
    (pin,) = learner.pins(time.time()).pins
    assert (pin.arm_id, pin.service_class) == (LEVELS.config_id, "default")
    assert "2 times the profiled" in pin.reason
    sender._parts = dataclasses.replace(sender._parts, faults=Faults())
