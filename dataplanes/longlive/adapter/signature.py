"""Whether a checkout is the LongLive that this adapter was written for.

The hooked functions are private and move between versions. They are compared twice: in the source, before anything of
the checkout runs (its import needs a GPU), and on the objects that were really built.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dataplanes.longlive.engine import EngineError

WRITTEN_FOR: Final = "NVlabs/LongLive 7860ad9"

_PIPELINE: Final = "pipeline/causal_diffusion_inference.py:CausalDiffusionInferencePipeline."
_EXPECTED: Final[Mapping[str, str]] = {
    _PIPELINE + "__init__": "self, args, device, generator=, text_encoder=, vae=",
    _PIPELINE + "inference": "self, noise, text_prompts, initial_latent=, return_latents=, start_frame_index=",
    _PIPELINE + "_inference_inner": (
        "self, noise, batch_size, num_frames, num_channels, height, width, num_blocks, num_input_frames, "
        "num_output_frames, output, conditional_dict, conditional_dict_list, unconditional_dict, use_cfg, "
        "initial_latent, clamp_i2v_first_chunk, return_latents, current_start_frame, cache_start_frame, raw_prompts="
    ),
    _PIPELINE + "_initialize_kv_cache": "self, batch_size, dtype, device",
    _PIPELINE + "_initialize_sample_scheduler": "self, noise",
    _PIPELINE + "_set_all_modules_global_sink_size": "self, value",
    _PIPELINE + "_pin_current_chunk": "self, kv_cache, current_num_frames",
    _PIPELINE + "clear_cache": "self",
    "utils/wan_5b_wrapper.py:WanDiffusionWrapper.forward": (
        "self, noisy_image_or_video, conditional_dict, timestep, kv_cache=, crossattn_cache=, current_start=, "
        "classify_mode=, concat_time_embeddings=, clean_x=, aug_t=, cache_start=, rope_temporal_offset="
    ),
    "utils/wan_5b_wrapper.py:WanDiffusionWrapper.configure_torch_compile": (
        "self, *, backend=, mode=, fullgraph=, dynamic=, options=, suppress_errors="
    ),
    "utils/wan_5b_wrapper.py:WanTextEncoder.forward": "self, text_prompts",
    "utils/config.py:normalize_config": "config",
    "utils/fp8.py:quantize_model_fp8": "model, *, verbose=",
    "utils/inference_utils.py:load_generator_checkpoint": "generator, checkpoint_path, *, use_ema=, strict=",
    "utils/inference_utils.py:apply_and_merge_lora": "pipeline, config, *, device=, dtype=, verbose=",
    "utils/inference_utils.py:setup_nvfp4_pipeline": "pipeline, config, device, *, verbose=",
    "utils/inference_utils.py:place_vae_for_streaming": "pipeline, config",
    "utils/quant.py:dequantize_kv_cache": "kv_list, max_blocks, num_heads, block_token_size, dtype, device",
    "wan_5b/modules/causal_model.py:CausalWanModel._apply_cache_updates": "self, kv_cache, cache_update_infos",
    "wan_5b/modules/vae2_2.py:WanVAE_.clear_cache": "self",
    "wan_5b/modules/vae2_2.py:Decoder3d.forward": "self, x, feat_cache=, feat_idx=, first_chunk=",
    "wan_5b/modules/vae2_2.py:unpatchify": "x, patch_size",
}


DECODER_THREAD: Final = "_vae_thread_fn"
"""The function that decodes in a thread of its own, made inside a call."""
DECODER_QUEUE: Final = ("vae_queue_lock", "vae_work_queue", "vae_work_ready")
"""The variables around it by which it is ended: the queue's lock, the queue, the event that it has something."""
_PREFIXES: Final[Mapping[Any, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def source_drift(checkout: Path) -> tuple[str, ...]:
    """What differs between the checkout's source and the one that this adapter was written for; empty where it fits."""
    problems = []
    trees: dict[str, ast.Module | None] = {}
    for place, expected in _EXPECTED.items():
        file, _, name = place.partition(":")
        if file not in trees:
            trees[file] = _parse(checkout / file)
        found = _in_source(trees[file], name)
        if found != expected:
            problems.append(f"{place}({found}), written for ({expected})")
    pipeline, _, _ = _PIPELINE.partition(":")
    tree = trees[pipeline]
    threads = [] if tree is None else [one for one in ast.walk(tree) if _is_function(one, DECODER_THREAD)]
    used = {name.id for thread in threads for name in ast.walk(thread) if isinstance(name, ast.Name)}
    problems += [f"{pipeline}:{DECODER_THREAD} has no {name}" for name in DECODER_QUEUE if name not in used]
    return tuple(problems)


def require_fit(checkout: Path) -> None:
    """Refuse a checkout whose hooked functions are others.

    Raises:
        EngineError: names the first function that differs.
    """
    problems = source_drift(checkout)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise EngineError(f"{checkout} is another LongLive: {problems[0]}{more}", hint=f"take {WRITTEN_FOR}")


def require_methods(owner: Any, names: Mapping[str, str]) -> None:
    """Compare the bound methods of an object that was built with what is expected, `self` left out.

    Raises:
        EngineError: names the method.
    """
    for name, expected in names.items():
        method = getattr(owner, name, None)
        found = "missing" if method is None else ", ".join(_words(inspect.signature(method)))
        if found != expected:
            raise EngineError(
                f"another LongLive: {type(owner).__name__}.{name}({found}), written for ({expected})",
                hint=f"take {WRITTEN_FOR}",
            )


def pipeline_methods() -> dict[str, str]:
    """The pipeline's hooked methods as `require_methods` takes them."""
    return {
        place.removeprefix(_PIPELINE): expected.removeprefix("self").removeprefix(", ")
        for place, expected in _EXPECTED.items()
        if place.startswith(_PIPELINE) and not place.endswith("__init__")
    }


def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _in_source(tree: ast.Module | None, name: str) -> str:
    if tree is None:
        return "file missing"
    body: list[ast.stmt] = tree.body
    *owners, last = name.split(".")
    for owner in owners:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == last:
            return ", ".join(_source_words(node.args))
    return "missing"


def _source_words(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for place, one in enumerate(positional):
        yield one.arg + ("=" if place >= without else "")
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}"
    elif arguments.kwonlyargs:
        yield "*"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield one.arg + ("" if default is None else "=")
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}"


def _words(signature: inspect.Signature) -> Iterator[str]:
    keyword_only = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        prefix = _PREFIXES.get(parameter.kind, "")
        yield prefix + name + ("" if parameter.default is inspect.Parameter.empty else "=")
