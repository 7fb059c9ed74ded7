"""The adapter's engine on the contract double, in this process. NOT run on the real engine."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Transition
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine
from dataplanes.longlive.engine import EngineError, SessionSpec

from .conftest import clip, loaded, nvfp4, setting

Make = Callable[..., LongLiveEngine]


def test_a_clip_longer_than_one_call_goes_on_from_the_same_cache_and_decoder(
    make_engine: Make, deployment_file: Path
) -> None:
    long_calls = deployment_file.read_text().replace("chunks_per_call = 3", "chunks_per_call = 7")
    split, results = clip(loaded(make_engine), 7)
    deployment_file.write_text(long_calls)
    whole, _ = clip(loaded(make_engine), 7)
    assert split.shape == (7 * 32 - 3, 8, 8, 3)
    assert torch.equal(split, whole)
    assert [one.report.frames for one in results] == [29] + [32] * 6
    assert [one.is_last for one in results] == [False] * 6 + [True]


@pytest.mark.parametrize("vae", ["batch", "async", "pipeline"])
def test_every_way_of_decoding_gives_the_same_frames(make_engine: Make, vae: str) -> None:
    streamed, _ = clip(loaded(make_engine), 4)
    other, results = clip(loaded(make_engine, setting(vae=vae)), 4)
    assert torch.equal(streamed, other)
    if vae == "batch":
        assert not any(len(one.frames) for one in results)


def test_the_same_seed_gives_the_same_clip_and_another_one_does_not(make_engine: Make) -> None:
    engine = loaded(make_engine)
    first, _ = clip(engine, 2)
    again, _ = clip(engine, 2)
    engine.open(SessionSpec(session_id="b", prompt="a cat", seed=4, chunks=1))
    assert torch.equal(first, again)
    assert not torch.equal(engine.step("b").frames, first[:29])


def test_one_report_a_chunk_has_a_time_for_each_step_and_the_recache(make_engine: Make) -> None:
    _, results = clip(loaded(make_engine), 3)
    for number, result in enumerate(results):
        report = result.report
        assert (report.chunk, report.session_chunk, report.service_class) == (number, number, "default")
        assert len(report.denoise_s) == 4
        assert all(one > 0 for one in (*report.denoise_s, report.recache_s, report.vae_s, report.total_s))
        assert report.fps_denoise > 0 and report.fps_end_to_end > 0
        assert report.latent_sd > 0 and not report.has_nan
        assert (report.first_frame_s > 0) == (number == 0)
        assert (report.drift > 0) == (number > 0)


def test_the_unused_negative_cache_is_dropped_and_the_loop_s_own_list_is_not(make_engine: Make) -> None:
    engine = loaded(make_engine)
    clip(engine, 1)
    pipe = engine._driver.pipe  # type: ignore[union-attr]
    assert pipe.kv_cache_neg is None
    assert pipe.crossattn_cache_neg is not None
    kv_bytes = engine._driver.memory().kv_bytes  # type: ignore[union-attr]
    assert kv_bytes == sum(2 * one["k"].nbytes + 36 for one in pipe.kv_cache_pos)


def test_the_loop_collects_no_frames(make_engine: Make) -> None:
    engine = loaded(make_engine, setting(vae="async"))
    clip(engine, 3)
    assert engine._driver.pipe.collected == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wanted", "reach", "keeps_kv"),
    [
        (setting(steps=8), Transition.CHUNK, True),
        (setting(multi_shot="yes"), Transition.CHUNK, True),
        (setting(sink=16), Transition.NEXT_CALL, True),
        (setting(vae="pipeline"), Transition.NEXT_CALL, True),
        (setting(window=24), Transition.KV_REBUILD, False),
        (setting(kv="nvfp4"), Transition.KV_REBUILD, False),
        (nvfp4(), Transition.RELOAD, True),
        (nvfp4(block_rule="4over6", kv="nvfp4"), Transition.RELOAD, False),
        (setting(weights="fp8", activations="fp8", compile="yes"), Transition.RELOAD, True),
        (setting(), Transition.NONE, True),
    ],
)
def test_a_change_is_applied_at_its_class_and_the_clip_goes_on(
    make_engine: Make, wanted: Configuration, reach: Transition, keeps_kv: bool
) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=6))
    engine.step("a")
    engine.step("a")
    plan = engine.plan(setting(), wanted)
    assert (plan.transition, plan.keeps_kv) == (reach, keeps_kv)
    engine.apply(wanted, 7)
    results = [engine.step("a") for _ in range(4)]
    (applied,) = results[0].applied
    assert (applied.version, applied.setting_id, applied.chunk) == (7, wanted.config_id, 2)
    assert (applied.transition, applied.keeps_kv, dict(applied.refused)) == (reach, keeps_kv, {})
    assert [one.report.setting_id for one in results] == [wanted.config_id] * 4
    assert len(results[0].report.denoise_s) == wanted["steps"]
    frames = sum(len(one.frames) for one in results) + len(engine.close("a"))
    assert frames == 4 * 32, "no seam: the decoder kept its state"
    again = engine.plan(setting(), wanted)
    assert again.is_measured
    if reach > Transition.CHUNK:
        assert not plan.is_measured
        assert again.seconds == applied.seconds


def test_a_reload_keeps_the_history_and_loads_the_asked_for_file(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.step("a")
    caches = engine._driver.pipe.kv_cache_pos  # type: ignore[union-attr]
    engine.apply(nvfp4(steps=2), 1)
    engine.step("a")
    pipe = engine._driver.pipe  # type: ignore[union-attr]
    assert pipe.kv_cache_pos is caches
    assert pipe.generator.loaded[0] == "te"
    assert pipe.generator.loaded[1].endswith("model_s2.pt")
    engine.apply(nvfp4(block_rule="4over6"), 2)
    engine.step("a")
    backend, file, rule = engine._driver.pipe.generator.loaded  # type: ignore[union-attr]
    assert (backend, Path(file).name, rule) == ("fouroversix", "model_4o6.pt", "mse")


def test_a_cache_made_anew_is_filled_from_the_clip_s_first_and_last_latents(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    for _ in range(5):
        engine.step("a")
    clip_state = engine._clip
    first, last = clip_state.first.latents, clip_state.recent[-1].latents  # type: ignore[union-attr]
    engine.apply(setting(window=24), 1)
    engine.step("a")
    # Two chunks of history fit beside the one being made.
    assert clip_state.position == 24  # type: ignore[union-attr]
    assert engine._driver.pipe.kv_cache_pos[0]["k"].shape[1] == 24 * 4  # type: ignore[union-attr]
    (expected,) = {float(first.float().mean() + last.float().mean())}  # type: ignore[union-attr]
    made = float(clip_state.recent[-1].latents.float().mean())  # type: ignore[union-attr]
    held = float(engine._driver.pipe.kv_cache_pos[0]["sum"])  # type: ignore[union-attr]
    assert held == pytest.approx(expected + made, abs=1e-5)


def test_positions_past_the_table_are_counted_anew(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplanes.longlive.adapter.driver.POSITIONS", 40)
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    positions = []
    for _ in range(7):
        engine.step("a")
        positions.append(engine._clip.position)  # type: ignore[union-attr]
    assert positions == [8, 16, 24, 32, 40, 32, 40]


def test_a_prompt_takes_effect_in_the_chunk_that_comes_next(make_engine: Make) -> None:
    engine = loaded(make_engine)
    plain, _ = clip(engine, 4)
    engine.open(SessionSpec(session_id="a", prompt="a cat", seed=3, chunks=4))
    before = torch.cat([engine.step("a").frames, engine.step("a").frames])
    engine.push_prompt("a", "a dog in the rain")
    after = torch.cat([engine.step("a").frames, engine.step("a").frames])
    assert torch.equal(before, plain[:61])
    assert not torch.equal(after[:32], plain[61:93])
    assert engine._driver.hooks.raw_prompts == ["a dog in the rain"]  # type: ignore[union-attr]


def test_a_scene_cut_pins_its_chunk_even_where_a_call_begins_with_it(make_engine: Make) -> None:
    engine = loaded(make_engine, setting(multi_shot="yes", sink=8))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    for _ in range(3):
        engine.step("a")
    engine.push_prompt("a", "a street", scene_cut=True, at_chunk=3)
    engine.push_prompt("a", "a field", scene_cut=True, at_chunk=4)
    pipe = engine._driver.pipe  # type: ignore[union-attr]
    pinned, offsets, seen = [], [], []
    pipe.generator.register_forward_hook(lambda module, _, __: seen.append(module.model.rope_temporal_offset))
    for _ in range(3):
        engine.step("a")
        pinned.append(int(pipe.kv_cache_pos[0]["pinned_start"]))
        offsets.append(set(seen))
        seen.clear()
    # Four tokens a latent frame; the cache holds 32 frames.
    assert pinned[0] == 24 * 4
    assert offsets == [{8}, {16}, {16}]


@pytest.mark.parametrize("window", [16, 24, 32])
def test_the_sink_of_a_shot_is_pinned_again_in_a_cache_that_is_made_anew(make_engine: Make, window: int) -> None:
    engine = loaded(make_engine, setting(multi_shot="yes", sink=8, window=32 if window < 32 else 24))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.step("a")
    engine.push_prompt("a", "a street", scene_cut=True)
    for _ in range(5):
        engine.step("a")
    state, passes = engine._clip, []
    assert state is not None
    first, pinned, last = state.first, state.pinned, state.recent[-1]
    assert pinned is not None and pinned not in state.recent, "its chunk is long out of the last ones"
    expected = {16: [first], 24: [first, pinned], 32: [first, pinned, last]}[window]
    engine._driver.pipe.generator.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, _, given: passes.append((module.model.rope_temporal_offset, given["noisy_image_or_video"])),
        with_kwargs=True,
    )
    engine.apply(setting(multi_shot="yes", sink=8, window=window), 1)
    assert not engine.step("a").applied[0].refused
    offsets = [offset for offset, _ in passes]
    given = [latents for _, latents in passes[: len(expected)]]
    assert all(torch.equal(one, each.latents) for one, each in zip(given, expected, strict=True))
    assert offsets == [8.0 * each.shot for each in expected] + [8.0] * 5, "each at its own shot's place in time"
    caches = engine._driver.pipe.kv_cache_pos  # type: ignore[union-attr]
    # Four tokens a latent frame; a window of two chunks has no room for it.
    place = (-1, 0) if window == 16 else (8 * 4, 8 * 4)
    assert {(int(cache["pinned_start"]), int(cache["pinned_len"])) for cache in caches} == {place}


def test_without_multi_shot_no_sink_is_pinned_again(make_engine: Make) -> None:
    engine = loaded(make_engine, setting(multi_shot="yes", sink=8))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.step("a")
    engine.push_prompt("a", "a street", scene_cut=True)
    engine.step("a")
    engine.step("a")
    engine.apply(setting(multi_shot="no", window=24), 1)
    engine.step("a")
    assert int(engine._driver.pipe.kv_cache_pos[0]["pinned_start"]) == -1  # type: ignore[union-attr]
    engine.apply(setting(multi_shot="yes", window=32), 2)
    engine.step("a")
    assert int(engine._driver.pipe.kv_cache_pos[0]["pinned_start"]) == -1, "what the cache did not hold is not made up"  # type: ignore[union-attr]


def test_what_a_quantised_cache_lost_of_a_chunk_is_measured_from_what_was_written(make_engine: Make) -> None:
    engine = loaded(make_engine, nvfp4(kv="nvfp4", window=16))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    quant = importlib.import_module("utils.quant")
    for number in range(4):
        result = engine.step("a")
        found = result.report.kv_signal_to_noise_db
        assert not result.kv_unreadable
        clip_state = engine._clip
        assert clip_state is not None and clip_state.first is not None
        latents = (clip_state.recent[-1] if number else clip_state.first).latents
        # The double's keys are its latents: 32 tokens of two heads of four.
        key = latents.reshape(1, 32, -1)[..., :8].reshape(-1, 4)
        slot = quant.quantize_to_fp4(key, engine._driver.pipe.kv_quant_config)  # type: ignore[union-attr]
        lost = key - quant.dequantize_kv_cache([slot], 1, 2, 32, key.dtype, key.device).reshape(-1, 4)
        expected = 20 * math.log10(float(key.float().norm() / lost.float().norm()))
        assert found == pytest.approx(expected, abs=0.05), "keys and values lose alike here"
        assert 10 < expected < 40
    engine.apply(nvfp4(kv="bf16", window=16), 1)
    assert engine.step("a").report.kv_signal_to_noise_db is None, "nothing is quantised"
    engine.apply(nvfp4(kv="nvfp4", window=16, steps=2), 2)
    assert engine.step("a").report.kv_signal_to_noise_db is not None, "another generator is looked at, too"


def test_what_a_pass_that_failed_had_written_counts_for_no_other_clip(make_engine: Make) -> None:
    def report_of_b(engine: LongLiveEngine) -> float | None:
        engine.open(SessionSpec(session_id="b", prompt="a cat", seed=3))
        return engine.step("b").report.kv_signal_to_noise_db

    expected = report_of_b(loaded(make_engine, nvfp4(kv="nvfp4")))
    engine = loaded(make_engine, nvfp4(kv="nvfp4"))
    driver = engine._driver
    assert driver is not None and expected is not None

    def fail(*_: object) -> None:
        if driver.hooks._fidelity._pairs:
            raise RuntimeError("the device failed behind the cache's update")

    failing = driver.pipe.generator.register_forward_hook(fail, prepend=True)
    engine.open(SessionSpec(session_id="a", prompt="a dog", seed=4))
    with pytest.raises(EngineError, match="behind the cache"):
        engine.step("a")
    failing.remove()
    assert report_of_b(engine) == expected


def test_a_cache_that_cannot_be_read_back_costs_the_figure_and_not_the_clip(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = loaded(make_engine, nvfp4(kv="nvfp4"))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine._driver.hooks._fidelity, "_dequantise", fail)  # type: ignore[union-attr]
    results = [engine.step("a") for _ in range(2)]
    assert [(one.report.kv_signal_to_noise_db, one.kv_unreadable) for one in results] == [(None, True)] * 2
    (told,) = caplog.records
    assert told.levelname == "ERROR" and "None from now on" in told.getMessage()
    assert "RuntimeError: no such kernel" in caplog.text, "the whole error, and once"
    engine.apply(nvfp4(kv="bf16"), 1)
    assert not engine.step("a").kv_unreadable, "nothing is quantised"


def test_a_compiled_generator_is_not_looked_into(make_engine: Make) -> None:
    engine = loaded(make_engine, nvfp4(kv="nvfp4", compile="yes"))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    assert engine.step("a").report.kv_signal_to_noise_db is None


def test_a_prompt_for_a_chunk_that_has_begun_is_refused(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")
    for at, said in ((0, "has begun"), (4, "4 chunks only")):
        with pytest.raises(EngineError, match=said):
            engine.push_prompt("a", "a dog", at_chunk=at)
    with pytest.raises(EngineError, match="prompt: is empty"):
        engine.push_prompt("a", "")


@pytest.mark.parametrize("vae", ["stream", "async", "pipeline", "batch"])
def test_closing_mid_clip_leaves_no_thread_and_another_clip_is_unharmed(make_engine: Make, vae: str) -> None:
    engine = loaded(make_engine, setting(vae=vae))
    reference, _ = clip(engine, 2)
    before = set(threading.enumerate())
    engine.open(SessionSpec(session_id="b", prompt="a horse", chunks=6))
    made = [engine.step("b"), engine.step("b")]
    frames = sum(len(one.frames) for one in made) + len(engine.close("b"))
    assert frames == 61
    assert not set(threading.enumerate()) - before
    again, _ = clip(engine, 2)
    assert torch.equal(again, reference)


def test_closing_before_the_first_chunk_gives_no_frames(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    assert len(engine.close("a")) == 0


def test_an_older_version_is_stale_and_a_newer_one_replaces_what_waits(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.apply(setting(steps=8), 5)
    with pytest.raises(EngineError, match="older than 5") as caught:
        engine.apply(setting(), 4)
    assert caught.value.code == "engine.stale"
    engine.apply(setting(sink=16), 6)
    assert [one.version for one in engine.step("a").applied] == [6]
    with pytest.raises(EngineError, match="older than 6"):
        engine.apply(setting(), 5)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SessionSpec(session_id="a", prompt=""), "session.prompt"),
        (SessionSpec(session_id="a", prompt="  "), "session.prompt"),
    ],
)
def test_a_hostile_session_is_refused(make_engine: Make, spec: SessionSpec, said: str) -> None:
    engine = loaded(make_engine)
    with pytest.raises(EngineError, match=said):
        engine.open(spec)


def test_one_clip_at_a_time_and_no_more_chunks_than_it_has(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=1))
    with pytest.raises(EngineError, match="one clip at a time"):
        engine.open(SessionSpec(session_id="b", prompt="a cat"))
    assert engine.step("a").is_last
    with pytest.raises(EngineError, match="has made its 1 chunks"):
        engine.step("a")


def test_decoding_at_the_end_needs_an_end(make_engine: Make) -> None:
    engine = loaded(make_engine, setting(vae="batch"))
    with pytest.raises(EngineError, match="must have an end"):
        engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.apply(setting(), 1)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=9))
    engine.step("a")
    engine.close("a")
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.apply(setting(vae="batch"), 2)
    assert "no end" in engine.step("a").applied[0].refused["vae"]


def test_a_decoder_that_falls_behind_holds_the_chunks_back(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(make_engine, setting(vae="pipeline"))
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=3))
    driver, slow = engine._driver, threading.Event()
    assert driver is not None
    original = driver.pipe.vae.model.decoder.forward

    def forward(*arguments: object, **keywords: object) -> torch.Tensor:
        assert slow.wait(timeout=60)
        made: torch.Tensor = original(*arguments, **keywords)
        return made

    monkeypatch.setattr(driver.pipe.vae.model.decoder, "forward", forward)
    assert len(engine.step("a").frames) == 0
    thread = threading.Thread(target=engine.step, args=("a",))
    thread.start()
    while driver.hooks._submitted < 2:
        time.sleep(0.001)
    thread.join(timeout=0.1)
    assert thread.is_alive(), "a second chunk waits in the decoder, so no third one may be begun"
    slow.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize(("compiled", "chunks"), [("no", 1), ("yes", 5)])
def test_a_compiled_generator_is_warmed_up_until_the_window_is_full(
    make_engine: Make, compiled: str, chunks: int
) -> None:
    engine = loaded(make_engine, setting(compile=compiled))
    # Four tokens a latent frame, eight frames a chunk.
    assert int(engine._driver.pipe.kv_cache_pos[0]["global_end_index"]) == chunks * 32  # type: ignore[union-attr]
