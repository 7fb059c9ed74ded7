"""Contract double, not LongLive: loading writes down what was asked for."""

from __future__ import annotations

import torch

from utils.fault import fault


def load_generator_checkpoint(generator, checkpoint_path, *, use_ema=False, strict=None):
    fault("oom_at_load", checkpoint_path.rpartition("/")[2])
    generator.loaded = ("bf16", checkpoint_path)


def apply_and_merge_lora(pipeline, config, *, device=None, dtype=torch.bfloat16, verbose=False):
    pipeline.generator.merged = config.lora_ckpt
    return True


def place_vae_for_streaming(pipeline, config):
    return torch.device(config.vae_device) if config.streaming_vae and config.vae_device else None


def setup_nvfp4_pipeline(pipeline, config, device, *, verbose=False):
    assert config.model_quant
    fault("oom_at_load", config.generator_ckpt.rpartition("/")[2])
    backend = "te" if config.model_quant_use_transformer_engine else "fouroversix"
    pipeline.generator.loaded = (backend, config.generator_ckpt, config.model_quant_scale_rule)
    pipeline.to(dtype=torch.bfloat16)
    return pipeline
