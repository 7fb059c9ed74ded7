"""What the adapter's engine does when something goes wrong, on the contract double. NOT run on the real engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.longlive.adapter import longlive_engine
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

from .conftest import clip, loaded, nvfp4, setting

Make = Callable[..., LongLiveEngine]


def test_latents_that_are_not_finite_close_the_session_and_the_engine_goes_on(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(make_engine)
    monkeypatch.setenv("LONGLIVE_DOUBLE_FAULT", "nan_at_position=8")
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")
    other = setting(vae="async")
    engine.apply(other, version=3)
    with pytest.raises(EngineError, match="not finite") as caught:
        engine.step("a")
    assert caught.value.code == "engine.not_finite"
    assert [(one.version, one.setting_id) for one in caught.value.applied] == [(3, other.config_id)]
    with pytest.raises(EngineError, match="unknown session"):
        engine.step("a")
    monkeypatch.delenv("LONGLIVE_DOUBLE_FAULT")
    frames, _ = clip(engine, 2)
    assert len(frames) == 61


def test_out_of_memory_at_load_frees_everything_and_a_smaller_setting_loads(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLIVE_DOUBLE_FAULT", "oom_at_load=model_bf16.pt")
    engine = make_engine()
    built = watch_pipelines(monkeypatch, engine)
    with pytest.raises(EngineError, match="no memory for model_bf16") as caught:
        engine.load(LoadSpec(checkpoint="", setting=setting()))
    assert caught.value.code == "engine.out_of_memory"
    assert "could not be freed" not in caught.value.hint
    assert [one() for one in built] == [None], "nothing keeps the half built pipeline"
    engine.load(LoadSpec(checkpoint="", setting=nvfp4()))
    assert len(clip(engine, 1)[0]) == 29


def test_a_reload_that_runs_out_of_memory_goes_back_to_what_was_there(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")
    monkeypatch.setenv("LONGLIVE_DOUBLE_FAULT", "oom_at_load=model_te.pt")
    engine.apply(nvfp4(), 1)
    result = engine.step("a")
    (applied,) = result.applied
    assert applied.setting_id == setting().config_id == result.report.setting_id
    assert set(applied.refused) == {"weights", "activations", "block_rule"}
    assert "out of memory" in applied.refused["weights"]
    assert not applied.keeps_kv
    assert not engine.step("a").applied


def test_a_reload_that_cannot_go_back_either_is_answered_and_leaves_nothing_loaded(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")

    def build(*_: object) -> None:
        raise torch.OutOfMemoryError("the memory is in pieces")

    engine.apply(nvfp4(), 7)
    with monkeypatch.context() as patched:
        patched.setenv("LONGLIVE_DOUBLE_FAULT", "oom_at_load=model_te.pt")
        patched.setattr(longlive_engine, "PipelineDriver", build)
        with pytest.raises(EngineError, match=r"neither .* nor the one before") as caught:
            engine.step("a")
    assert caught.value.code == "engine.worker_died"
    (answer,) = caught.value.applied
    assert (answer.version, answer.setting_id) == (7, setting().config_id)
    assert set(answer.refused) == {"weights", "activations", "block_rule"}
    assert engine.sessions() == frozenset()
    engine.load(LoadSpec(checkpoint="", setting=setting()))
    assert len(clip(engine, 1)[0]) == 29


def test_a_load_beside_what_is_loaded_is_refused_and_the_clip_goes_on(make_engine: Make) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")
    for spec in (LoadSpec(checkpoint="", setting=nvfp4()), LoadSpec(checkpoint="/nowhere", setting=setting())):
        with pytest.raises(EngineError, match="loaded already") as caught:
            engine.load(spec)
        assert caught.value.code == "engine.already_loaded"
    assert engine.step("a").report.setting_id == setting().config_id


def test_out_of_memory_in_a_chunk_closes_the_clip_only(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(make_engine)
    monkeypatch.setenv("LONGLIVE_DOUBLE_FAULT", "oom_at_cache=16")
    engine.apply(setting(window=16), 1)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=2))
    result = engine.step("a")
    assert "out of memory" in result.applied[0].refused["window"]
    assert result.report.setting_id == setting().config_id


def test_unload_frees_the_pipeline(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    built = watch_pipelines(monkeypatch, engine)
    engine.load(LoadSpec(checkpoint="", setting=setting(vae="pipeline")))
    engine.open(SessionSpec(session_id="a", prompt="a cat"))
    engine.step("a")
    assert engine.unload().reserved_bytes == 0
    assert [one() for one in built] == [None]
    with pytest.raises(EngineError, match="nothing is loaded"):
        engine.open(SessionSpec(session_id="a", prompt="a cat"))


def watch_pipelines(monkeypatch: pytest.MonkeyPatch, engine: LongLiveEngine) -> list[Callable[[], object]]:
    """References to the pipelines that are built from here on, which keep none alive."""
    import weakref

    from dataplanes.longlive.adapter.loading import Checkout

    built: list[Callable[[], object]] = []
    original = Checkout.build

    def build(self: Checkout, asked: Configuration) -> tuple[object, object]:
        pipe, config = original(self, asked)
        built.append(weakref.ref(pipe))
        return pipe, config

    monkeypatch.setattr(Checkout, "build", build)
    return built


def test_a_decoder_that_fails_in_its_thread_is_told_at_the_next_chunk(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(make_engine, setting(vae="pipeline"))
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=6))
    engine.step("a")

    def fail(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("the decoder broke")

    monkeypatch.setattr(engine._driver.pipe.vae.model.decoder, "forward", fail)  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="the decoder broke") as caught:
        for _ in range(4):
            engine.step("a")
    assert caught.value.code == "engine.failed"
    monkeypatch.undo()
    assert len(clip(engine, 1, name="b")[0]) == 29


def test_a_fault_of_the_device_asks_for_another_process(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(make_engine)
    engine.open(SessionSpec(session_id="a", prompt="a cat"))

    def fail(*arguments: object, **keywords: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(engine._driver.pipe.vae.model.decoder, "forward", fail)  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="illegal memory access") as caught:
        engine.step("a")
    assert caught.value.code == "engine.worker_died"
