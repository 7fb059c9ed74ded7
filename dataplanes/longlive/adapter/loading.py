"""Building LongLive's pipeline from a checkout and getting weights into it, in the worker's process."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from controld.contract.configuration import Value
from dataplanes.longlive import settings as names
from dataplanes.longlive.adapter import signature
from dataplanes.longlive.adapter.deployment import Deployment
from dataplanes.longlive.adapter.hardware import Hardware
from dataplanes.longlive.adapter.offer import Route, route_of
from dataplanes.longlive.adapter.streaming_decode import add_cached_decode, move_decoder_state
from dataplanes.longlive.engine import EngineError

Setting = Mapping[str, Value]


class Checkout:
    """The checkout's packages in this process. Their names (`utils`, `model`) are anybody's: one checkout a process.

    Raises:
        EngineError: the checkout is another LongLive, or its packages are already imported from somewhere else.
    """

    def __init__(self, deployment: Deployment, hardware: Hardware) -> None:
        signature.require_fit(deployment.checkout)
        self._deployment = deployment
        self._hardware = hardware
        # LongLive opens `wan_models/...` relative to where it runs.
        os.chdir(deployment.models)
        if str(deployment.checkout) not in sys.path:
            sys.path.insert(0, str(deployment.checkout))
        pipeline = self._module("pipeline")
        self._normalize = self._module("utils.config").normalize_config
        self._inference = self._module("utils.inference_utils")
        self._pipeline_class = pipeline.CausalDiffusionInferencePipeline

    def build(self, setting: Setting) -> tuple[Any, Any]:
        """The pipeline without weights of the generator, and its configuration."""
        config = self._config(setting)
        pipe = self._pipeline_class(config, device=torch.device(self._hardware.device))
        vae_module = self._module("wan_5b.modules.vae2_2")
        add_cached_decode(pipe.vae.model, vae_module.unpatchify)
        return pipe, config

    def load_weights(self, pipe: Any, setting: Setting) -> Any:
        """Load, quantise, move and compile the generator of `build`; the configuration that it has now."""
        config = self._config(setting)
        chosen = route_of(self._deployment, self._hardware, setting)
        device = torch.device(self._hardware.device)
        if chosen.backend in ("te", "fouroversix"):
            self._inference.setup_nvfp4_pipeline(pipe, config, device)
        else:
            self._inference.load_generator_checkpoint(
                pipe.generator, str(chosen.checkpoint.file), use_ema=bool(getattr(config, "use_ema", False))
            )
            if self._deployment.run.lora_ckpt:
                self._inference.apply_and_merge_lora(pipe, config, device=device)
            pipe.to(device=device, dtype=torch.bfloat16)
        pipe.generator.model.eval().requires_grad_(False)
        if chosen.backend == "torchao_fp8":
            self._module("utils.fp8").quantize_model_fp8(pipe.generator.model)
        if setting[names.COMPILE] == "yes":
            self._compile(pipe, config)
        self._inference.place_vae_for_streaming(pipe, config)
        return config

    def replace_generator(self, pipe: Any, config: Any) -> None:
        """Drop the generator, then make one anew without weights; text encoder, VAE and caches stay."""
        wrapper = type(pipe.generator)
        pipe.generator.model = None
        pipe.generator = None
        collect()
        pipe.generator = wrapper(**dict(config.model_kwargs), is_causal=True)
        if pipe.num_frame_per_block > 1:
            pipe.generator.model.num_frame_per_block = pipe.num_frame_per_block
        pipe._dit_model.kv_quant_config = pipe.kv_quant_config

    def set_between_calls(self, pipe: Any, config: Any, setting: Setting) -> None:
        """What LongLive reads at the begin of a call: sinks and the way of decoding."""
        pipe.sink_size = int(setting[names.SINK])
        self.set_between_chunks(pipe, setting)
        for section, key, value in _overrides(self._deployment, setting, None):
            _set(config, section, key, value)
        device = torch.device(self._deployment.run.vae_device or self._hardware.device)
        is_elsewhere = setting[names.VAE] == "pipeline"
        target = device if is_elsewhere else torch.device(self._hardware.device)
        if is_elsewhere or pipe.vae_device is not None:
            pipe.vae.to(device=target)
            pipe.vae.mean, pipe.vae.std = pipe.vae.mean.to(target), pipe.vae.std.to(target)
            move_decoder_state(pipe.vae.model, target)
        pipe.streaming_vae = setting[names.VAE] != "batch"
        pipe.async_vae = setting[names.VAE] == "async"
        pipe.vae_device = device if is_elsewhere else None

    def set_between_chunks(self, pipe: Any, setting: Setting) -> None:
        """What LongLive reads at the begin of a chunk."""
        pipe.sampling_steps = int(setting[names.STEPS])
        pipe.multi_shot_sink = setting[names.MULTI_SHOT] == "yes"
        pipe.global_sink_size = pipe.sink_size if pipe.multi_shot_sink else 0
        pipe._set_all_modules_global_sink_size(pipe.global_sink_size)

    def set_cache(self, pipe: Any, setting: Setting) -> None:
        """Drop the caches and set how the next ones are made: their precision and their length."""
        pipe.clear_cache()
        collect()
        pipe.local_attn_size = int(setting[names.WINDOW])
        pipe.quantize_kv = setting[names.KV] == "nvfp4"
        pipe.kv_quant_config = None
        if pipe.quantize_kv:
            pipe.kv_quant_config = self._module("utils.quant").LongLiveQuantizationConfig(
                scale_rule=pipe.kv_quant_scale_rule, backend=pipe.kv_quant_backend, type="kv"
            )
        pipe._dit_model.kv_quant_config = pipe.kv_quant_config

    def find_dequantise(self) -> Callable[..., torch.Tensor]:
        """LongLive's own function that reads a quantised cache."""
        found: Callable[..., torch.Tensor] = self._module("utils.quant").dequantize_kv_cache
        return found

    def _compile(self, pipe: Any, config: Any) -> None:
        compiled = pipe.generator.configure_torch_compile(
            backend=str(getattr(config, "torch_compile_backend", "inductor")),
            mode=getattr(config, "torch_compile_mode", "max-autotune-no-cudagraphs"),
            fullgraph=bool(getattr(config, "torch_compile_fullgraph", False)),
            dynamic=bool(getattr(config, "torch_compile_dynamic", False)),
            suppress_errors=bool(getattr(config, "torch_compile_suppress_errors", True)),
        )
        if not compiled:
            raise EngineError(f"{names.COMPILE}=yes: LongLive did not compile the generator")

    def _config(self, setting: Setting) -> Any:
        return make_config(
            self._deployment, setting, route_of(self._deployment, self._hardware, setting), normalize=self._normalize
        )

    def _module(self, name: str) -> Any:
        module = importlib.import_module(name)
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        if not any(place.startswith(str(self._deployment.checkout)) for place in places):
            raise EngineError(
                f"{name} was imported from {places[0]}, not from the checkout",
                hint="run the engine in a worker process of its own",
            )
        return module


def make_config(deployment: Deployment, setting: Setting, chosen: Route, *, normalize: Callable[[Any], Any]) -> Any:
    """LongLive's YAML with what a setting says, as its own code wants it.

    Args:
        normalize: LongLive's `normalize_config`.
    """
    omega = importlib.import_module("omegaconf").OmegaConf
    config = normalize(omega.load(str(deployment.config)))
    for section, key, value in _overrides(deployment, setting, chosen):
        _set(config, section, key, value)
    return config


def _set(config: Any, section: str, key: str, value: Any) -> None:
    # Some keys LongLive reads in their section, some at the root, where its normalisation has put a copy.
    if section and config.get(section) is not None:
        config[section][key] = value
    config[key] = value


def _overrides(deployment: Deployment, setting: Setting, chosen: Route | None) -> Iterator[tuple[str, str, Any]]:
    vae = setting[names.VAE]
    yield "inference", "sampling_steps", int(setting[names.STEPS])
    yield "inference", "local_attn_size", int(setting[names.WINDOW])
    yield "inference", "sink_size", int(setting[names.SINK])
    yield "inference", "multi_shot_sink", setting[names.MULTI_SHOT] == "yes"
    yield "inference", "kv_quant", setting[names.KV] == "nvfp4"
    yield "inference", "streaming_vae", vae != "batch"
    yield "inference", "async_vae", vae == "async"
    yield "inference", "vae_device", deployment.run.vae_device if vae == "pipeline" else None
    if chosen is None:
        return
    yield "checkpoints", "generator_ckpt", str(chosen.checkpoint.file)
    yield "", "model_quant", setting[names.WEIGHTS] == "nvfp4"
    yield "", "model_quant_use_transformer_engine", chosen.backend == "te"
    yield "", "fp8_quant", chosen.backend == "torchao_fp8"
    yield "", "torch_compile", setting[names.COMPILE] == "yes"
    for of in ("", "activation_", "weight_", "gradient_"):
        yield "", f"model_quant_{of}scale_rule", chosen.scale_rule


def collect() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
