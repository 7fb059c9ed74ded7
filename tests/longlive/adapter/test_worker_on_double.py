"""The adapter's engine on the contract double, in a worker process as operators run it. NOT run on the real engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from controld.contract.video import Transition
from dataplanes.longlive.adapter.worker_engine import WorkerDiedError, WorkerEngine
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

from .conftest import nvfp4, setting

pytestmark = pytest.mark.slow
Make = Callable[..., WorkerEngine]
SPEC = LoadSpec(checkpoint="", setting=setting())


def frames_of(engine: WorkerEngine, chunks: int) -> torch.Tensor:
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=chunks))
    made = [engine.step("a").frames for _ in range(chunks)]
    return torch.cat([*made, *([rest] if len(rest := engine.close("a")) else [])])


def test_two_adapters_at_once_make_the_same_clip_and_one_s_death_is_its_own(make_worker: Make) -> None:
    engines = [make_worker(), make_worker()]
    for engine in engines:
        engine.load(SPEC)
    first, second = (frames_of(engine, 3) for engine in engines)
    assert torch.equal(first, second)
    engines[0].kill()
    with pytest.raises(WorkerDiedError):
        engines[0].open(SessionSpec(session_id="b", prompt="x"))
    assert len(frames_of(engines[1], 1)) == 29
    engines[0].load(SPEC)
    assert torch.equal(frames_of(engines[0], 3), first)


def test_killed_in_the_middle_of_a_chunk(make_worker: Make, tmp_path: Path) -> None:
    # Four tokens a latent frame: the second chunk begins at token 32.
    fault = {"LONGLIVE_DOUBLE_FAULT": "hang_at_start=32", "LONGLIVE_DOUBLE_HANGS": str(tmp_path / "hangs")}
    engine = make_worker(environment=fault)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=3))
    assert len(engine.step("a").frames) == 29

    def kill() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDiedError, match=r"SIGKILL.*lost sessions: a"):
        engine.step("a")
    killer.join()


def test_what_a_failed_step_put_in_force_comes_over_with_its_error(make_worker: Make) -> None:
    engine = make_worker(environment={"LONGLIVE_DOUBLE_FAULT": "nan_at_position=8"})
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=4))
    engine.step("a")
    other = setting(vae="async")
    engine.apply(other, version=3)
    with pytest.raises(EngineError, match="not finite") as caught:
        engine.step("a")
    assert [(one.version, one.setting_id, one.chunk) for one in caught.value.applied] == [(3, other.config_id, 1)]


def test_out_of_memory_at_load_then_a_smaller_setting(make_worker: Make) -> None:
    engine = make_worker(environment={"LONGLIVE_DOUBLE_FAULT": "oom_at_load=model_bf16.pt"})
    with pytest.raises(EngineError, match="no memory for model_bf16") as caught:
        engine.load(SPEC)
    assert caught.value.code == "engine.out_of_memory"
    assert engine.load(LoadSpec(checkpoint="", setting=nvfp4())).weights_bytes > 0
    assert len(frames_of(engine, 2)) == 61


def test_a_refused_load_leaves_owner_and_worker_of_one_mind(make_worker: Make) -> None:
    engine = make_worker()
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=9))
    engine.step("a")
    for spec in (SPEC, replace(SPEC, setting=setting(steps=3)), replace(SPEC, checkpoint="/nowhere")):
        with pytest.raises(EngineError) as caught:
            engine.load(spec)
        assert caught.value.code == "engine.already_loaded"
        assert engine.sessions() == {"a"}
    engine.apply(setting(vae="async"), 1)
    assert engine.step("a").report.setting_id == setting(vae="async").config_id
    engine.close("a")
    engine.unload()
    with pytest.raises(EngineError) as caught:
        engine.load(LoadSpec(checkpoint="", setting=setting(steps=3)))
    assert caught.value.code == "engine.refused"
    with pytest.raises(EngineError, match="loaded"):
        engine.open(SessionSpec(session_id="b", prompt="a cat"))
    engine.load(SPEC)
    assert len(frames_of(engine, 1)) == 29


def test_a_steered_clip_is_whole(make_worker: Make) -> None:
    engine = make_worker()
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="a cat", chunks=8))
    frames, applied = 0, []
    wanted = {2: setting(steps=8), 3: nvfp4(), 5: nvfp4(kv="nvfp4", vae="async"), 6: nvfp4(window=24)}
    for number in range(8):
        if number in wanted:
            engine.apply(wanted[number], number)
        if number == 4:
            engine.push_prompt("a", "a dog", scene_cut=True)
        result = engine.step("a")
        frames += len(result.frames)
        applied += [(one.version, one.chunk, one.transition) for one in result.applied]
        assert not any(one.refused for one in result.applied)
    frames += len(engine.close("a"))
    assert frames == 8 * 32 - 3
    assert applied == [
        (2, 2, Transition.CHUNK),
        (3, 3, Transition.RELOAD),
        (5, 5, Transition.KV_REBUILD),
        (6, 6, Transition.KV_REBUILD),
    ]
