from pathlib import Path

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Transition
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec, VideoEngine
from dataplanes.longlive.reference.checkpoint import build_vae, full_transformer
from dataplanes.longlive.reference.engine import MOST_SESSIONS, ReferenceEngine
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.setting import FULL, SPACE
from dataplanes.longlive.reference.weights import save_weights

TINY = ModelShape(dim=64, heads=4, layers=2, feed_forward=64)
W4A4 = {"weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain"}
KV4 = {"kv": "nvfp4", "kv_smooth": "token_mean"}


def _changed(**values: str | int) -> Configuration:
    return Configuration({**FULL, **values})


def _clip(session_id: str = "a", *, chunks: int = 0, seed: int = 0) -> SessionSpec:
    return SessionSpec(session_id=session_id, prompt="a red circle moves sideways", chunks=chunks, seed=seed)


def _loaded(setting: Configuration = FULL, *, limit: int = 0, resident: str = "in_force") -> ReferenceEngine:
    engine = ReferenceEngine(TINY)
    spec = LoadSpec(checkpoint="untrained", setting=setting, memory_limit_bytes=limit, options={"resident": resident})
    engine.load(spec)
    return engine


def _film(engine: ReferenceEngine, spec: SessionSpec, chunks: int) -> torch.Tensor:
    engine.open(spec)
    frames = [engine.step(spec.session_id).frames for _ in range(chunks)]
    return torch.cat([*frames, engine.close(spec.session_id)])


def test_it_is_a_video_engine() -> None:
    engine: VideoEngine = ReferenceEngine()
    assert engine.capabilities().space is SPACE
    SPACE.validate(FULL)


def test_every_setting_of_the_space_leaves_the_chunk_before_in_the_window() -> None:
    for setting in SPACE.enumerate(lossy_only=True):
        sinks = int(setting["sink"]) + (3 if setting["multi_shot"] == "yes" else 0)
        assert int(setting["window"]) - sinks >= 6, setting


@pytest.mark.parametrize("vae", ["batch", "stream", "async"])
def test_a_clip_has_all_its_frames(vae: str) -> None:
    frames = _film(_loaded(_changed(vae=vae)), _clip(chunks=3), 3)
    assert frames.shape == (9 + 12 + 12, 32, 32, 3)
    assert frames.dtype is torch.uint8
    assert torch.equal(frames, _film(_loaded(), _clip(), 3))


def test_the_last_chunk_says_so_and_no_more_come() -> None:
    engine = _loaded()
    engine.open(_clip(chunks=2))
    assert [engine.step("a").is_last for _ in range(2)] == [False, True]
    with pytest.raises(EngineError, match="all its 2 chunks are made"):
        engine.step("a")


def test_a_clip_depends_on_its_seed_and_not_on_its_neighbours() -> None:
    engine = _loaded(_changed(vae="stream"))
    alone = _film(engine, _clip(seed=5), 3)
    assert not torch.equal(alone, _film(engine, _clip(seed=6), 3))
    engine.open(_clip("other", seed=9))
    engine.open(_clip("mine", seed=5))
    mixed = []
    for _ in range(3):
        engine.step("other")
        mixed.append(engine.step("mine").frames)
    assert torch.equal(torch.cat(mixed), alone)


def test_a_report_has_what_was_measured() -> None:
    engine = _loaded(_changed(vae="stream", **KV4))
    engine.open(_clip())
    first, second = (engine.step("a").report for _ in range(2))
    assert len(first.denoise_s) == 4
    assert first.frames == 9 and second.frames == 12
    assert 0 < sum(second.denoise_s) + second.recache_s + second.vae_s <= second.total_s
    assert first.first_frame_s > 0 == second.first_frame_s
    assert second.fps_denoise > second.fps_end_to_end > 0
    assert second.vae_overlap == 0.0
    assert first.drift == 0.0 < second.drift
    assert second.kv_signal_to_noise_db is not None and 15 < second.kv_signal_to_noise_db < 30
    assert (first.chunk, second.chunk, second.session_chunk) == (0, 1, 1)
    assert second.memory.kv_bytes == 2 * first.memory.kv_bytes > 0


def test_quantised_history_takes_less_by_the_format_and_is_noisier() -> None:
    reports = []
    for setting in (FULL, _changed(kv="fp8", kv_smooth="none"), _changed(kv="nvfp4", kv_smooth="none")):
        engine = _loaded(setting)
        engine.open(_clip())
        reports.append(engine.step("a").report)
    plain, fp8, nvfp4 = (report.memory.kv_bytes for report in reports)
    values = TINY.chunk_tokens * TINY.dim * 2 * TINY.layers
    assert plain == 2 * values
    assert fp8 == values + 4 * 2 * TINY.layers
    assert nvfp4 == 0.5625 * values + 4 * 2 * TINY.layers
    noise = [report.kv_signal_to_noise_db for report in reports]
    assert noise[0] > noise[1] > noise[2]


@pytest.mark.parametrize(
    ("change", "transition"),
    [
        ({}, Transition.NONE),
        ({"steps": 2}, Transition.CHUNK),
        ({"window": 9, "sink": 0}, Transition.CHUNK),
        ({"vae": "stream"}, Transition.CHUNK),
        (KV4, Transition.KV_REBUILD),
        (W4A4, Transition.RELOAD),
        ({**W4A4, **KV4, "steps": 1}, Transition.RELOAD),
        ({"ranks": 2}, Transition.RESTART),
    ],
)
def test_a_plan_says_how_far_a_change_reaches(change: dict[str, str | int], transition: Transition) -> None:
    plan = _loaded().plan(FULL, _changed(**change))
    assert plan.transition is transition
    assert plan.keeps_kv and plan.peak_bytes > 0


def test_resident_weights_switch_with_the_chunk() -> None:
    engine = _loaded(resident="all")
    assert engine.plan(FULL, _changed(**W4A4)).transition is Transition.CHUNK
    assert engine.memory().weights_bytes > _loaded().memory().weights_bytes


@pytest.mark.parametrize("resident", ["all", "in_force"])
def test_a_setting_takes_effect_at_the_next_chunk_and_says_so(resident: str) -> None:
    engine = _loaded(_changed(vae="stream"), resident=resident)
    engine.open(_clip())
    engine.step("a")
    wanted = _changed(vae="stream", steps=1, window=9, sink=0, **W4A4, **KV4)
    before = engine.memory().kv_bytes
    engine.apply(wanted, version=7)
    assert engine.memory().kv_bytes == before
    result = engine.step("a")
    (applied,) = result.applied
    assert (applied.version, applied.setting_id, applied.chunk) == (7, wanted.config_id, 1)
    assert applied.keeps_kv and not applied.refused
    assert result.report.setting_id == wanted.config_id and len(result.report.denoise_s) == 1
    # Two chunks of history in NVFP4 are less than one was.
    assert result.report.memory.kv_bytes < before
    assert not engine.step("a").applied
    # What was measured is what the next plan says.
    assert engine.plan(FULL, wanted).seconds == applied.seconds


def test_the_same_setting_from_the_start_or_by_a_switch_makes_the_same_clip() -> None:
    quantised = _changed(vae="stream", **W4A4)
    expected = _film(_loaded(quantised), _clip(), 2)
    engine = _loaded(_changed(vae="stream"))
    engine.apply(quantised, version=1)
    assert torch.equal(_film(engine, _clip(), 2), expected)


def test_a_newer_setting_replaces_one_that_waits_and_an_older_one_is_stale() -> None:
    engine = _loaded()
    engine.open(_clip())
    engine.apply(_changed(steps=1), version=5)
    engine.apply(_changed(steps=2), version=6)
    with pytest.raises(EngineError, match="version 5 is older than 6") as caught:
        engine.apply(FULL, version=5)
    assert caught.value.code == "engine.stale"
    result = engine.step("a")
    assert [one.version for one in result.applied] == [6]
    assert len(result.report.denoise_s) == 2
    with pytest.raises(EngineError):
        engine.apply(FULL, version=5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 3}, "steps"),
        ({"window": 6}, "leaves the chunk before no place"),
        ({"activations": "nvfp4"}, "activations below bf16"),
        ({"kv_smooth": "token_mean"}, "kv_smooth"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(change: dict[str, str | int], named: str) -> None:
    engine = _loaded()
    with pytest.raises(EngineError, match=named):
        engine.apply(_changed(**change), version=1)
    engine.open(_clip())
    assert not engine.step("a").applied


def test_memory_that_does_not_suffice_is_told_at_load_and_something_smaller_fits() -> None:
    roomy = _loaded()
    roomy.open(_clip())
    limit = roomy.memory().reserved_bytes - 1
    engine = ReferenceEngine(TINY)
    with pytest.raises(EngineError, match="the limit is") as caught:
        engine.load(LoadSpec(checkpoint="untrained", setting=FULL, memory_limit_bytes=limit))
    assert caught.value.code == "engine.out_of_memory"
    assert engine.memory().weights_bytes == 0
    small = _changed(window=6, sink=0, multi_shot="no")
    engine.load(LoadSpec(checkpoint="untrained", setting=small, memory_limit_bytes=limit))
    assert _film(engine, _clip(), 2).shape[0] == 21


def test_memory_for_another_session_is_kept_for_whole_windows() -> None:
    roomy = _loaded()
    roomy.open(_clip())
    # Two sessions fit with the smallest window only.
    engine = _loaded(limit=roomy.memory().reserved_bytes + 80_000)
    engine.open(_clip())
    with pytest.raises(EngineError) as caught:
        engine.open(_clip("b"))
    assert caught.value.code == "engine.out_of_memory"
    small = _changed(window=6, sink=0, multi_shot="no")
    engine.apply(small, version=1)
    # The larger setting is still in force, so that there is no room yet.
    with pytest.raises(EngineError):
        engine.open(_clip("b"))
    engine.step("a")
    engine.open(_clip("b"))
    with pytest.raises(EngineError) as caught:
        engine.apply(FULL, version=2)
    assert caught.value.code == "engine.out_of_memory"


def test_what_is_reserved_is_what_full_windows_take() -> None:
    engine = _loaded(_changed(vae="stream"))
    engine.open(_clip())
    for _ in range(6):
        memory = engine.step("a").report.memory
    kept_latents = 4 * 3 * 8 * 8 * 8 * 4
    total = memory.weights_bytes + memory.kv_bytes + memory.activation_bytes
    assert total == memory.reserved_bytes + kept_latents


def test_decoding_at_the_end_needs_an_end() -> None:
    engine = _loaded(_changed(vae="batch"))
    with pytest.raises(EngineError, match=r"session\.chunks: .* must have an end"):
        engine.open(_clip())
    engine.open(_clip(chunks=2))
    engine.close("a")
    engine.apply(FULL, version=1)
    engine.open(_clip("first", chunks=2))
    engine.step("first")
    engine.open(_clip())
    with pytest.raises(EngineError, match=r"vae: .* session a has no end"):
        engine.apply(_changed(vae="batch"), version=2)
    engine.close("a")
    engine.apply(_changed(vae="batch"), version=2)
    with pytest.raises(EngineError, match=r"session\.chunks"):
        engine.open(_clip())


def test_latents_that_wait_for_the_end_are_in_the_forecast() -> None:
    batch = _changed(vae="batch")
    roomy = _loaded(batch)
    roomy.open(_clip(chunks=60))
    limit = roomy.memory().reserved_bytes
    engine = _loaded(batch, limit=limit)
    with pytest.raises(EngineError, match="the limit is") as caught:
        engine.open(_clip(chunks=61))
    assert caught.value.code == "engine.out_of_memory"
    engine.open(_clip(chunks=60))
    for _ in range(60):
        memory = engine.step("a").report.memory
    kept_latents = 4 * 3 * 8 * 8 * 8 * 4
    # The window's latents, of which the decoder holds the same tensors.
    assert memory.peak_bytes <= limit + kept_latents


def test_a_latent_that_is_not_finite_ends_its_session_and_no_other() -> None:
    engine = _loaded(_changed(vae="stream"))
    engine.open(_clip("a"))
    engine.open(_clip("b"))
    engine.step("a")
    engine.step("b")
    assert engine._loaded is not None
    held = engine._loaded.generator._caches["a"].entries[0].values[0].data  # type: ignore[union-attr]
    assert isinstance(held, torch.Tensor)
    held[0] = float("nan")
    fewer = _changed(vae="stream", steps=2)
    engine.apply(fewer, version=3)
    with pytest.raises(EngineError, match="session a: chunk 1 is not finite") as caught:
        engine.step("a")
    assert caught.value.code == "engine.not_finite"
    (answer,) = caught.value.applied
    assert (answer.version, answer.setting_id, answer.chunk) == (3, fewer.config_id, 2), "in force all the same"
    after = engine.step("b")
    assert after.frames.shape[0] == 12
    assert (after.report.setting_id, after.applied) == (fewer.config_id, ()), "told once"
    with pytest.raises(EngineError) as caught:
        engine.step("a")
    assert caught.value.code == "engine.unknown_session"
    engine.open(_clip("a"))
    assert engine.step("a").report.session_chunk == 0


def test_a_prompt_takes_effect_at_its_chunk_and_a_cut_begins_a_shot() -> None:
    engine = _loaded(_changed(vae="stream"))
    engine.open(_clip("a"))
    engine.open(_clip("b"))
    engine.push_prompt("b", "a blue ring moves around", scene_cut=True, at_chunk=2)
    frames = {name: [engine.step(name).frames for _ in range(7)] for name in ("a", "b")}
    same = [torch.equal(*pair) for pair in zip(frames["a"], frames["b"], strict=True)]
    assert same == [True, True, False, False, False, False, False]
    # Sink, the new shot's first chunk, and the two before.
    assert engine._loaded is not None
    assert engine._loaded.generator.kept("b") == (0, 2, 5, 6)
    assert engine._loaded.generator.kept("a") == (0, 4, 5, 6)


def test_prompts_for_begun_or_missing_chunks_are_refused() -> None:
    engine = _loaded()
    engine.open(_clip(chunks=3))
    engine.step("a")
    with pytest.raises(EngineError, match="chunk 0 of session a has begun"):
        engine.push_prompt("a", "a red circle moves around", at_chunk=0)
    with pytest.raises(EngineError, match="ends after 3 chunks"):
        engine.push_prompt("a", "a red circle moves around", at_chunk=3)
    with pytest.raises(EngineError, match="'hexagon'"):
        engine.push_prompt("a", "a red hexagon moves around")


def test_what_is_not_open_or_loaded_is_told_apart() -> None:
    engine = ReferenceEngine(TINY)
    with pytest.raises(EngineError) as caught:
        engine.open(_clip())
    assert caught.value.code == "engine.not_loaded"
    engine = _loaded()
    for call in (engine.step, engine.close):
        with pytest.raises(EngineError) as caught:
            call("nobody")
        assert caught.value.code == "engine.unknown_session"
    with pytest.raises(EngineError, match="loaded already"):
        engine.load(LoadSpec(checkpoint="untrained", setting=FULL))


def test_there_is_a_most_of_sessions() -> None:
    engine = _loaded()
    for number in range(MOST_SESSIONS):
        engine.open(_clip(str(number)))
    with pytest.raises(EngineError, match="which is the most"):
        engine.open(_clip("one more"))
    with pytest.raises(EngineError, match="is open already"):
        engine.open(_clip("0"))


def test_unloading_frees_everything_and_loading_works_again() -> None:
    engine = _loaded()
    engine.open(_clip())
    engine.step("a")
    left = engine.unload()
    assert (left.weights_bytes, left.kv_bytes, left.activation_bytes) == (0, 0, 0)
    engine.load(LoadSpec(checkpoint="untrained", setting=FULL))
    assert _film(engine, _clip(), 1).shape[0] == 9


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (LoadSpec(checkpoint="/nowhere", setting=FULL), "/nowhere"),
        (LoadSpec(checkpoint="untrained", setting=FULL, options={"speed": "warp"}), "options.speed"),
        (LoadSpec(checkpoint="trained", setting=FULL), "does not fit|does not exist"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(spec: LoadSpec, named: str) -> None:
    engine = ReferenceEngine(TINY)
    with pytest.raises(EngineError, match=named):
        engine.load(spec)
    engine.load(LoadSpec(checkpoint="untrained", setting=FULL))


@pytest.mark.parametrize("damage", [b"", b"not weights", 0.5])
def test_a_damaged_checkpoint_is_named_at_load_and_answered_at_a_reload(tmp_path: Path, damage: bytes | float) -> None:
    save_weights(full_transformer("untrained", TINY), tmp_path / "dit.safetensors")
    save_weights(build_vae("untrained"), tmp_path / "vae.safetensors")
    engine = ReferenceEngine(TINY)
    engine.load(LoadSpec(checkpoint=str(tmp_path), setting=FULL))
    file = tmp_path / "dit.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage if isinstance(damage, bytes) else whole[: int(damage * len(whole))])
    engine.open(_clip())
    engine.apply(_changed(**W4A4), version=3)
    result = engine.step("a")
    assert "dit.safetensors cannot be read" in result.applied[0].refused["weights"]
    assert result.report.setting_id == FULL.config_id
    engine.unload()
    with pytest.raises(EngineError, match=r"dit\.safetensors cannot be read"):
        engine.load(LoadSpec(checkpoint=str(tmp_path), setting=FULL))


def test_a_reload_that_fails_leaves_the_old_setting_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _loaded()
    engine.open(_clip())
    engine.apply(_changed(**W4A4), version=3)
    assert engine._loaded is not None

    def gone(checkpoint: str, precisions: object) -> None:
        raise EngineError("checkpoint: is gone")

    monkeypatch.setattr(engine._loaded.generator, "reload", gone)
    result = engine.step("a")
    (applied,) = result.applied
    assert applied.refused == {"weights": "checkpoint: is gone"}
    assert applied.setting_id == result.report.setting_id == FULL.config_id
