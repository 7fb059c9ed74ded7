"""What is offered on which hardware with which checkpoints, and how each refusal reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Transition
from dataplanes.longlive.adapter.deployment import read_deployment, read_run_config
from dataplanes.longlive.adapter.hardware import W4A4, W4A4_FOUR_OVER_SIX, W8A8, find_unfit, probe
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine, make_engine
from dataplanes.longlive.adapter.offer import make_offer, require, route_of
from dataplanes.longlive.adapter.transitions import Transitions, kv_bytes
from dataplanes.longlive.engine import EngineError, LoadSpec
from dataplanes.longlive.linear.emulated import EmulatedBackend
from dataplanes.longlive.linear.probing import ProbeSize
from dataplanes.longlive.linear.te import TransformerEngineBackend

from .conftest import CHECKOUT, nvfp4, said_hardware, setting

GB200, H100, A100 = (10, 0), (9, 0), (8, 0)


def test_without_a_device_nothing_is_offered_and_each_value_says_why(deployment_file: Path) -> None:
    engine = LongLiveEngine(read_deployment(deployment_file), said_hardware(None))
    found = engine.capabilities()
    assert found.space.parameters == ()
    assert found.compute_capability is None
    assert found.device == "no CUDA device"
    for value in ("weights=bf16", "weights=nvfp4", "kv=bf16", "steps=4", "window=32", "vae=stream", "ranks=1"):
        assert found.left_out[value] == "no CUDA device: LongLive runs on CUDA only"
    with pytest.raises(EngineError, match="no CUDA device") as caught:
        engine.load(LoadSpec(checkpoint="", setting=setting()))
    assert caught.value.code == "engine.refused"


def test_the_factory_looks_at_this_machine(deployment_file: Path) -> None:
    found = make_engine(str(deployment_file)).capabilities()
    assert (found.compute_capability is None) == (probe().device == "")


@pytest.mark.parametrize(
    ("capability", "wanted", "said"),
    [
        (H100, nvfp4(), r"NVFP4 needs compute capability 10\.0, contract double has 9\.0"),
        (H100, setting(kv="nvfp4"), r"kv=nvfp4: NVFP4 needs compute capability 10\.0"),
        (A100, setting(weights="fp8", activations="fp8"), r"FP8 needs compute capability 8\.9, .* has 8\.0"),
        (GB200, setting(kv="fp8"), "LongLive has no FP8 cache"),
        (GB200, setting(ranks=2, kv="nvfp4"), "LongLive refuses a quantised cache in it"),
        (GB200, setting(ranks=3), r"not one of the degrees \[1, 2, 4, 8\]"),
        (GB200, setting(steps=3), "no checkpoint is distilled for 3 steps"),
        (GB200, setting(steps=2), "no bf16 checkpoint for 2 steps"),
        (GB200, setting(window=20), "window=20: not a multiple of the chunk's 8"),
        (GB200, setting(sink=4), "sink=4: not a multiple of the chunk's 8"),
        (GB200, setting(window=16, sink=16), "no room for a sink of 16"),
        (GB200, setting(weights="fp8"), "take fp8 inputs with fp8 weights"),
        (GB200, setting(kv_smooth="token_mean"), "its own mean"),
        (GB200, setting(window=40), "window: 40 is not allowed"),
        (GB200, setting(window="32"), "window: '32' is not allowed"),
        (GB200, setting(steps=True), "steps: True is not allowed"),
        (GB200, setting(vae="later"), "vae: 'later' is not allowed"),
        (GB200, setting(vae=None), "vae: is missing"),
        (GB200, setting(block_rule="plain"), "block_rule: does not exist"),
        (GB200, setting(speed="high"), "speed: unknown parameter"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name_and_reason(
    deployment_file: Path, capability: tuple[int, int], wanted: Configuration, said: str
) -> None:
    deployment = read_deployment(deployment_file)
    offer = make_offer(deployment, said_hardware(capability))
    with pytest.raises(EngineError, match=said):
        require(deployment, offer, wanted)


def test_every_setting_of_the_space_is_accepted_and_has_a_route(deployment_file: Path) -> None:
    deployment, hardware = read_deployment(deployment_file), said_hardware()
    offer = make_offer(deployment, hardware)
    settings = list(offer.space.enumerate())
    assert len(settings) == offer.space.count() > 100
    for one in settings:
        require(deployment, offer, one)
        assert one["steps"] in route_of(deployment, hardware, one).checkpoint.steps
    assert set(offer.backends) == {"torch", "torchao_fp8", "te", "fouroversix"}


@pytest.mark.parametrize(
    ("libraries", "rule", "backend", "file", "scale_rule"),
    [
        (("transformer_engine", "fouroversix"), "plain", "te", "model_te.pt", "static_6"),
        (("transformer_engine", "fouroversix"), "4over6", "fouroversix", "model_4o6.pt", "mse"),
        (("fouroversix",), "plain", "fouroversix", "model_te.pt", "static_6"),
    ],
)
def test_the_block_rule_decides_the_back_end_and_the_file(
    deployment_file: Path, libraries: tuple[str, ...], rule: str, backend: str, file: str, scale_rule: str
) -> None:
    found = route_of(read_deployment(deployment_file), said_hardware(libraries=libraries), nvfp4(block_rule=rule))
    assert (found.backend, found.checkpoint.file.name, found.scale_rule) == (backend, file, scale_rule)


def test_a_missing_library_takes_its_precision_out(deployment_file: Path) -> None:
    deployment = read_deployment(deployment_file)
    none = make_offer(deployment, said_hardware(libraries=()))
    assert none.left_out["weights=fp8"] == "torchao is not installed"
    assert none.left_out["weights=nvfp4"] == "neither transformer_engine nor fouroversix is installed"
    assert none.left_out["block_rule=4over6"].startswith("the 4over6 rule needs fouroversix")
    assert {one["weights"] for one in none.space.enumerate()} == {"bf16"}
    te_only = make_offer(deployment, said_hardware(libraries=("transformer_engine",)))
    assert "weights=nvfp4" not in te_only.left_out
    with pytest.raises(EngineError, match="4over6 rule needs fouroversix"):
        require(deployment, te_only, nvfp4(block_rule="4over6"))


def test_a_library_that_fails_its_probe_takes_its_precision_out_with_the_reason(deployment_file: Path) -> None:
    deployment, whole = read_deployment(deployment_file), said_hardware()
    unfit = {("torchao_fp8", W8A8): "slower than bf16: 0.60 of its speed", ("te", W4A4): "self-test: 0.3 off"}
    hardware = replace(whole, unfit=unfit)
    offer = make_offer(deployment, hardware)
    assert offer.left_out["weights=fp8"] == "torchao_fp8: slower than bf16: 0.60 of its speed"
    assert route_of(deployment, hardware, nvfp4()).backend == "fouroversix", "the other one carries plain NVFP4, too"
    assert set(offer.backends) == {"torch", "fouroversix"}
    with pytest.raises(EngineError, match="=fp8: torchao_fp8: slower than bf16"):
        require(deployment, offer, setting(weights="fp8", activations="fp8"))
    unfit |= {("fouroversix", W4A4): "failed: no kernel", ("fouroversix", W4A4_FOUR_OVER_SIX): "failed: no kernel"}
    none = make_offer(deployment, replace(whole, unfit=unfit))
    assert none.left_out["weights=nvfp4"] == "te: self-test: 0.3 off; fouroversix: failed: no kernel"
    assert none.left_out["block_rule=4over6"] == "fouroversix: failed: no kernel"
    assert {one["weights"] for one in none.space.enumerate()} == {"bf16"}


def test_probing_says_what_is_unfit_on_a_device() -> None:
    """On this CPU; on a GPU the same probes run with LongLive's layer."""
    size = ProbeSize(rows=16, inputs=64, outputs=32, repeats=1)
    found = find_unfit(torch.device("cpu"), backends=(TransformerEngineBackend(), EmulatedBackend()), size=size)
    assert set(found) == {("te", W4A4), ("te", W4A4_FOUR_OVER_SIX)}
    assert all(reason for reason in found.values())


def test_steps_of_another_checkpoint_are_a_reload_and_of_the_same_one_a_chunk_s(deployment_file: Path) -> None:
    deployment, hardware = read_deployment(deployment_file), said_hardware()
    transitions = Transitions(deployment, hardware, make_offer(deployment, hardware))
    same = transitions.plan(setting(), setting(steps=8), held_bytes=0)
    other = transitions.plan(nvfp4(), nvfp4(steps=2), held_bytes=0)
    assert same.transition is Transition.CHUNK and same.seconds == 0.0
    assert other.transition is Transition.RELOAD and other.keeps_kv and not other.is_measured


def test_cache_bytes_are_the_published_ones(deployment_file: Path, tmp_path: Path) -> None:
    text = (CHECKOUT / "configs/inference.yaml").read_text().replace("[1, 16, 4, 4, 4]", "[1, 128, 48, 44, 80]")
    real = tmp_path / "real.yaml"
    real.write_text(text)
    deployment_file.write_text(deployment_file.read_text().replace("configs/inference.yaml", str(real)))
    deployment = read_deployment(deployment_file)
    assert kv_bytes(deployment, setting()) / 1e9 == pytest.approx(10.38, abs=0.01)
    assert kv_bytes(deployment, setting(kv="nvfp4")) / 1e9 == pytest.approx(2.92, abs=0.01)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("windows = [16, 24, 32]", "windows = [20]", "longlive.toml.windows: 20 latent frames are not a multiple"),
        ("windows = [16, 24, 32]", "windows = []", "longlive.toml.windows"),
        ("windows = [16, 24, 32]", "windows = [16, 16]", "a value twice"),
        ("windows = [16, 24, 32]", "windows = ['16']", "not a list of whole numbers"),
        ("chunks_per_call = 3", "chunks_per_call = 0", "chunks_per_call: 0 is below 1"),
        ("chunks_per_call = 3", "chunks_per_call = true", "chunks_per_call: True is not of type int"),
        ("chunks_per_call = 3", "chunk_per_call = 3", "chunk_per_call: unknown key"),
        ('format = "te"', 'format = "te2"', "'te2' is no format"),
        ('format = "te"', 'format = "te"\nsize = 3', r"checkpoints\[1\].size: unknown key"),
        ("steps = [2]", "steps = [0]", r"checkpoints\[3\].steps"),
        ('config = "configs/inference.yaml"', 'config = "configs/none.yaml"', "cannot be read"),
        ("windows", "windows = [8]\nwindows", "cannot be read"),
        ('checkout = "', 'checkout = "/nowhere', "is no folder"),
    ],
)
def test_a_broken_deployment_names_the_key(deployment_file: Path, old: str, new: str, said: str) -> None:
    text = deployment_file.read_text()
    assert old in text
    deployment_file.write_text(text.replace(old, new, 1))
    with pytest.raises(EngineError, match=said):
        read_deployment(deployment_file)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_samples: 1", "num_samples: 2", "num_samples: a batch of 2: the quantised KV cache holds one clip"),
        ("[1, 16, 4, 4, 4]", "[2, 16, 4, 4, 4]", r"image_or_video_shape\[0\]: a batch of 2"),
        ("[1, 16, 4, 4, 4]", "[1, 15, 4, 4, 4]", "15 latent frames are not a multiple of the chunk's 8"),
        ("[1, 16, 4, 4, 4]", "[1, 16, 4]", "image_or_video_shape"),
        ("num_samples: 1", "num_samples: 1\nnum_output_frames: 12", "num_output_frames: 12 latent frames"),
        ("num_samples: 1", "num_samples: 1\ni2v: true", "begin with an image"),
        (
            "num_samples: 1",
            "num_samples: 1\ncheckpoints: {lora_ckpt: x.pt}",
            "LoRA that is not merged",
        ),
        ("num_frame_per_block: 8", "num_frame_per_block: 0", "num_frame_per_block: 0 is below 1"),
        ("num_frame_per_block: 8", "num_frame_per_block: eight", "'eight' is not of type int"),
        ("guidance_scale: 1.0", "guidance_scale: [1]", "guidance_scale"),
        ("model_kwargs:", "model_kwargs: [", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_steered_names_the_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (CHECKOUT / "configs/inference.yaml").read_text()
    assert old in text
    file = tmp_path / "inference.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(EngineError, match=said):
        read_run_config(file)
