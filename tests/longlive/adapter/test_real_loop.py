"""The adapter on LongLive's OWN inference loop and cache updates, with the double's tiny models: no real model.

Needs CONTROLD_LONGLIVE (a checkout), OmegaConf and tqdm. Runs on a CPU, so only the ways of decoding that LongLive can
do there. Says nothing about the real engine's quality or speed.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine
from dataplanes.longlive.engine import LoadSpec, SessionSpec

from .conftest import CHECKOUT, DOUBLE, nvfp4, setting

REAL = Path(os.environ.get("CONTROLD_LONGLIVE", "/nonexistent"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REAL.is_dir(), reason="CONTROLD_LONGLIVE names no checkout of LongLive-2.0"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("omegaconf", "tqdm"))), reason="OmegaConf or tqdm is not installed"
    ),
]
_OF_THE_REAL_ONE = (
    "pipeline/causal_diffusion_inference.py",
    "utils/config.py",
    "utils/prompt_conditioning.py",
    "utils/i2v_conditioning.py",
)
MODEL = "wan_5b/modules/causal_model.py"
UPDATES = "_apply_cache_updates"
Make = Callable[..., LongLiveEngine]
Script = dict[int, Configuration | str]


def real_method(name: str) -> str:
    """A method of LongLive's model, whose module needs a GPU to be imported."""
    text = (REAL / MODEL).read_text()
    (found,) = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef) and one.name == name)
    return "".join(text.splitlines(keepends=True)[found.lineno - 1 : found.end_lineno])


@pytest.fixture
def real_loop_file(deployment_file: Path, tmp_path: Path) -> Path:
    """A deployment on a checkout whose loop and cache updates are LongLive's and whose models are the double's."""
    checkout = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, checkout)
    shutil.copytree(DOUBLE / "real_loop", checkout, dirs_exist_ok=True)
    for file in _OF_THE_REAL_ONE:
        shutil.copyfile(REAL / file, checkout / file)
    model = checkout / MODEL
    # The class ends with this method and what only this one calls.
    before, _, _ = model.read_text().partition(f"    def {UPDATES}")
    model.write_text(before + real_method(UPDATES))
    file = tmp_path / "real_loop.toml"
    file.write_text(deployment_file.read_text().replace(str(CHECKOUT), str(checkout)))
    return file


def run(engine: LongLiveEngine, first: Configuration, script: Script, chunks: int = 8) -> list[torch.Tensor]:
    """A clip, steered by `script`; the frames of each chunk, what was left last."""
    engine.load(LoadSpec(checkpoint="", setting=first))
    engine.open(SessionSpec(session_id="a", prompt="a cat", seed=3, chunks=chunks))
    frames = []
    for number in range(chunks):
        what = script.get(number)
        if isinstance(what, str):
            engine.push_prompt("a", what.removeprefix("cut "), scene_cut=what.startswith("cut "))
        elif what is not None:
            engine.apply(what, number)
        result = engine.step("a")
        assert not any(one.refused for one in result.applied)
        frames.append(result.frames)
    return [*frames, engine.close("a")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("first", "script"),
    [
        (setting(), {}),
        (setting(vae="batch"), {}),
        (setting(multi_shot="yes"), {2: "cut a street", 3: "cut a field", 5: "a dog"}),
        (setting(), {1: setting(steps=8), 2: setting(sink=16), 4: setting(window=24), 6: nvfp4(window=24)}),
        (setting(vae="batch"), {3: setting(), 5: setting(multi_shot="yes"), 6: "cut a street"}),
    ],
    ids=["plain", "batch", "prompts", "settings", "decoding"],
)
def test_the_double_s_loop_and_longlive_s_make_the_same_frames(
    make_engine: Make, deployment_file: Path, real_loop_file: Path, first: Configuration, script: Script
) -> None:
    real = run(make_engine(file=real_loop_file), first, script)
    double = run(make_engine(file=deployment_file), first, script)
    assert sum(map(len, real)) == 8 * 32 - 3
    assert [len(one) for one in real] == [len(one) for one in double]
    assert all(torch.equal(a, b) for a, b in zip(real, double, strict=True) if len(a))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_longlive_s_own_loop_has_the_sink_of_a_shot_pinned_again(make_engine: Make, real_loop_file: Path) -> None:
    engine = make_engine(file=real_loop_file)
    script = {1: "cut a street", 6: setting(multi_shot="yes", window=24)}
    made: list[tuple[int, int]] = []

    def watch(*_: object) -> None:
        cache = engine._driver.pipe.kv_cache_pos[0]  # type: ignore[union-attr]
        made.append((int(cache["pinned_start"]), int(cache["pinned_len"])))

    engine.load(LoadSpec(checkpoint="", setting=setting(multi_shot="yes")))
    engine._driver.pipe.generator.register_forward_pre_hook(watch)  # type: ignore[union-attr]
    engine.open(SessionSpec(session_id="a", prompt="a cat", seed=3, chunks=7))
    for number in range(7):
        what = script.get(number)
        if isinstance(what, str):
            engine.push_prompt("a", what.removeprefix("cut "), scene_cut=True)
        elif what is not None:
            made.clear()
            engine.apply(what, number)
        assert not any(one.refused for one in engine.step("a").applied)
    # Two chunks are given, the second of them is pinned before the five passes of the chunk that is made.
    assert made == [(-1, 0)] * 2 + [(8 * 4, 8 * 4)] * 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_longlive_s_own_updates_put_into_a_quantised_cache_is_measured(
    make_engine: Make, real_loop_file: Path
) -> None:
    engine = make_engine(file=real_loop_file)
    engine.load(LoadSpec(checkpoint="", setting=nvfp4(kv="nvfp4", window=24)))
    engine.open(SessionSpec(session_id="a", prompt="a cat", seed=3, chunks=5))
    quant = importlib.import_module("utils.quant")
    # The window is full after three chunks: blocks are moved then, and written to the last slot.
    for number in range(5):
        found = engine.step("a").report.kv_signal_to_noise_db
        clip = engine._clip
        assert clip is not None and clip.first is not None
        # Rows of 128 keys are the 16 values of a token, again and again, with one scale.
        key = (clip.recent[-1] if number else clip.first).latents.reshape(32, 16)
        slot = quant.quantize_to_fp4(key, engine._driver.pipe.kv_quant_config)  # type: ignore[union-attr]
        lost = key - quant.dequantize_kv_cache([slot], 1, 1, 32, key.dtype, key.device).reshape(32, 16)
        expected = 20 * math.log10(float(key.float().norm() / lost.float().norm()))
        assert found == pytest.approx(expected, abs=0.05)
