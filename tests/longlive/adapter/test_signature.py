"""Another LongLive is refused by the name of the function that moved: in its source, and on what was built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine
from dataplanes.longlive.adapter.signature import require_fit, require_methods, source_drift
from dataplanes.longlive.engine import EngineError, LoadSpec

from .conftest import CHECKOUT, setting

PIPELINE = "pipeline/causal_diffusion_inference.py"


def test_the_double_has_the_signatures_that_the_adapter_was_written_for() -> None:
    assert source_drift(CHECKOUT) == ()


@pytest.mark.skipif("CONTROLD_LONGLIVE" not in os.environ, reason="CONTROLD_LONGLIVE names no checkout of LongLive-2.0")
def test_the_real_checkout_has_them_too() -> None:
    assert source_drift(Path(os.environ["CONTROLD_LONGLIVE"])) == ()


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            PIPELINE,
            "_initialize_sample_scheduler(self, noise)",
            "_initialize_sample_scheduler(self, noise, steps)",
            "noise, steps",
        ),
        (PIPELINE, "vae_work_queue", "queue", "_vae_thread_fn has no vae_work_queue"),
        (PIPELINE, "def _pin_current_chunk", "def pin_current_chunk", r"_pin_current_chunk\(missing\)"),
        (
            PIPELINE,
            "return_latents=False",
            "give_latents=False",
            r"inference\(self, noise.*initial_latent=, give_latents=",
        ),
        (
            "utils/config.py",
            "def normalize_config(config)",
            "def normalize_config(config, *more, **rest)",
            r"config, \*more, \*\*rest",
        ),
        ("utils/fp8.py", "def", "def def", r"utils/fp8\.py:quantize_model_fp8\(file missing\)"),
    ],
)
def test_a_function_that_moved_is_named(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, checkout)
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    with pytest.raises(EngineError, match=said) as caught:
        require_fit(checkout)
    assert "7860ad9" in caught.value.hint


def test_a_folder_without_longlive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"file missing.* and \d+ more"):
        require_fit(tmp_path)


def test_what_was_built_is_compared_too() -> None:
    class Decoder:
        def cached_decode(self, z: object, scale: object, first: bool) -> None: ...

    with pytest.raises(EngineError, match=r"Decoder\.cached_decode\(z, scale, first\), written for \(z, scale\)"):
        require_methods(Decoder(), {"cached_decode": "z, scale"})


def test_a_name_that_is_taken_in_this_process_is_told(
    make_engine: Callable[..., LongLiveEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "utils.py").write_text("")
    engine = make_engine()
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    __import__("utils")
    with pytest.raises(EngineError, match="utils"):
        engine.load(LoadSpec(checkpoint="", setting=setting()))
