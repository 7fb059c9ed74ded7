"""A setting written into LongLive's configuration: with OmegaConf and the real checkout's code where they are there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from dataplanes.longlive.adapter.deployment import read_deployment
from dataplanes.longlive.adapter.loading import make_config
from dataplanes.longlive.adapter.offer import route_of

from .conftest import CHECKOUT, DOUBLE, nvfp4, said_hardware, setting

REAL = Path(os.environ.get("CONTROLD_LONGLIVE", "/nonexistent"))


@pytest.fixture(params=["stand-in", "omegaconf"])
def config_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    is_installed = importlib.util.find_spec("omegaconf") is not None
    if request.param == "omegaconf" and not is_installed:
        pytest.skip("OmegaConf is not installed")
    if request.param == "stand-in":
        monkeypatch.syspath_prepend(str(DOUBLE / "stand_ins"))
    before = sys.modules.pop("omegaconf", None)
    yield request.param
    sys.modules.pop("omegaconf", None)
    if before is not None:
        sys.modules["omegaconf"] = before


def normalize_of(checkout: Path) -> Callable[[Any], Any]:
    found = importlib.util.spec_from_file_location("longlive_config", checkout / "utils/config.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    normalize: Callable[[Any], Any] = module.normalize_config
    return normalize


def check(config: Any, wanted: Configuration) -> None:
    assert config.inference.sampling_steps == config.sampling_steps == wanted["steps"]
    assert config.inference.local_attn_size == wanted["window"]
    assert config.inference.sink_size == wanted["sink"]
    assert config.kv_quant is (wanted["kv"] == "nvfp4")
    assert config.streaming_vae is config.inference.streaming_vae is (wanted["vae"] != "batch")
    assert config.async_vae is (wanted["vae"] == "async")
    assert (config.vae_device is not None) == (wanted["vae"] == "pipeline")
    assert config.torch_compile is (wanted["compile"] == "yes")
    assert dict(config.model_kwargs)["num_frame_per_block"] == config.num_frame_per_block == 8


@pytest.mark.parametrize(
    ("wanted", "file", "flags", "rule"),
    [
        (setting(vae="pipeline"), "model_bf16.pt", (False, False, False), "static_6"),
        (setting(weights="fp8", activations="fp8", compile="yes"), "model_bf16.pt", (False, False, True), "static_6"),
        (nvfp4(kv="nvfp4", vae="async"), "model_te.pt", (True, True, False), "static_6"),
        (nvfp4(block_rule="4over6", vae="batch"), "model_4o6.pt", (True, False, False), "mse"),
    ],
)
@pytest.mark.parametrize("checkout", [CHECKOUT, REAL], ids=["double", "real"])
def test_a_setting_is_where_longlive_reads_it(
    config_library: str,
    deployment_file: Path,
    checkout: Path,
    wanted: Configuration,
    file: str,
    flags: tuple[bool, bool, bool],
    rule: str,
) -> None:
    if checkout == REAL:
        if not REAL.is_dir():
            pytest.skip("CONTROLD_LONGLIVE names no checkout of LongLive-2.0")
        if config_library == "stand-in":
            pytest.skip("the real one needs OmegaConf")
        text = deployment_file.read_text().replace(str(CHECKOUT), str(REAL))
        deployment_file.write_text(text.replace("configs/inference.yaml", "configs/nvfp4/inference_nvfp4.yaml"))
    deployment, hardware = read_deployment(deployment_file), said_hardware()
    chosen = route_of(deployment, hardware, wanted)
    config = make_config(deployment, wanted, chosen, normalize=normalize_of(checkout))
    check(config, wanted)
    assert Path(config.generator_ckpt).name == file
    assert (config.model_quant, config.model_quant_use_transformer_engine, config.fp8_quant) == flags
    assert config.model_quant_scale_rule == config.model_quant_weight_scale_rule == rule
