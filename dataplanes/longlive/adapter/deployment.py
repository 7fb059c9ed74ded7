"""What the operator has: a checkout of LongLive-2.0, its configuration, and checkpoints with their steps.

A TOML file (`docs/longlive.md` has one). The configuration is LongLive's own YAML; the few values that decide what can
be offered are read here without importing the checkout, whose import needs a GPU.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import yaml

from dataplanes.longlive.engine import EngineError

_SECTIONS: Final = ("infra", "algorithm", "training", "data", "evaluation", "inference", "logging", "checkpoints")
LIGHT_VAES: Final = ("mg_lightvae", "mg_lightvae_v2")


class Format(StrEnum):
    """How a checkpoint holds the generator."""

    BF16 = "bf16"
    """Merged weights in bf16."""
    TE = "te"
    """Merged weights in bf16, made for Transformer Engine, which quantises them at load."""
    FOUROVERSIX = "fouroversix"
    """NVFP4 already, with the 4over6 rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One file of generator weights and the denoising steps that it was distilled for."""

    file: Path
    format: Format
    steps: tuple[int, ...]

    @property
    def file_bytes(self) -> int:
        """Its size; 0 where it is missing."""
        return self.file.stat().st_size if self.file.is_file() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What LongLive's YAML says about what can be offered. Field names are the YAML's keys."""

    num_frame_per_block: int = 1
    image_or_video_shape: tuple[int, ...] = ()
    num_output_frames: int = 0
    num_samples: int = 1
    guidance_scale: float = 1.0
    vae_type: str = "wan"
    vae_device: str | None = None
    i2v: bool = False
    independent_first_frame: bool = False
    lora_ckpt: str | None = None
    merge_lora: bool = False
    scene_cut_prefix: str = "The scene transitions. "
    multi_shot_rope_offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A checkout with its checkpoints.

    Args:
        checkout: root of the repository; its packages are imported from there.
        models: folder that holds `wan_models`; the worker works in it.
        config: LongLive's YAML.
        checkpoints: at least one.
        windows, sinks: latent frames to offer, multiples of the chunk.
        chunks_per_call: one run of LongLive's inference makes so many chunks; longer clips are several runs.
        warm_up_chunks: made and thrown away after each load.
    """

    checkout: Path
    models: Path
    config: Path
    run: RunConfig
    checkpoints: tuple[Checkpoint, ...]
    windows: tuple[int, ...]
    sinks: tuple[int, ...]
    chunks_per_call: int = 16
    warm_up_chunks: int = 1


def _refuse(field: str, problem: str, *, hint: str = "") -> EngineError:
    return EngineError(f"{field}: {problem}", hint=hint)


def _take(table: Mapping[str, Any], name: str, kind: type, where: str, default: Any = None) -> Any:
    value = table.get(name, default)
    if value is None:
        raise _refuse(f"{where}.{name}", "is missing")
    if type(value) is not kind:
        raise _refuse(f"{where}.{name}", f"{value!r} is not of type {kind.__name__}")
    return value


def _whole_numbers(table: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    values = _take(table, name, list, where)
    if not values or any(type(value) is not int or value < 1 for value in values):
        raise _refuse(f"{where}.{name}", f"{values!r} is not a list of whole numbers above 0")
    if len(set(values)) != len(values):
        raise _refuse(f"{where}.{name}", f"{values!r} has a value twice")
    return tuple(values)


def _known(table: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in table:
        if name not in names:
            raise _refuse(f"{where}.{name}", "unknown key", hint=f"one of {sorted(names)}")


def _checkpoint(table: Any, where: str, folder: Path) -> Checkpoint:
    if not isinstance(table, dict):
        raise _refuse(where, "is no table")
    _known(table, {"file", "format", "steps"}, where)
    name = _take(table, "format", str, where)
    if name not in list(Format):
        raise _refuse(f"{where}.format", f"{name!r} is no format", hint=f"one of {[one.value for one in Format]}")
    return Checkpoint(
        file=folder / _take(table, "file", str, where),
        format=Format(name),
        steps=_whole_numbers(table, "steps", where),
    )


def read_deployment(file: str | Path) -> Deployment:
    """Read and check the operator's file; relative paths are relative to it.

    Raises:
        EngineError: names the key and what is wrong with it.
    """
    file = Path(file)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refuse(str(file), f"cannot be read: {error}") from error
    where = file.name
    _known(
        data,
        {"checkout", "models", "config", "checkpoints", "windows", "sinks", "chunks_per_call", "warm_up_chunks"},
        where,
    )
    checkout = file.parent / _take(data, "checkout", str, where)
    if not checkout.is_dir():
        raise _refuse(f"{where}.checkout", f"{checkout} is no folder")
    tables = _take(data, "checkpoints", list, where)
    if not tables:
        raise _refuse(f"{where}.checkpoints", "is empty")
    config = checkout / _take(data, "config", str, where)
    run = read_run_config(config)
    numbers = {name: _take(data, name, int, where, default) for name, default in _NUMBERS.items()}
    for name, value in numbers.items():
        if value < 1:
            raise _refuse(f"{where}.{name}", f"{value} is below 1")
    windows, sinks = _whole_numbers(data, "windows", where), _whole_numbers(data, "sinks", where)
    for name, values in (("windows", windows), ("sinks", sinks)):
        for value in values:
            if value % run.num_frame_per_block:
                raise _refuse(f"{where}.{name}", _no_multiple(value, run.num_frame_per_block))
    return Deployment(
        checkout=checkout.resolve(),
        models=(file.parent / data["models"]).resolve() if "models" in data else checkout.resolve(),
        config=config.resolve(),
        run=run,
        checkpoints=tuple(
            _checkpoint(table, f"{where}.checkpoints[{i}]", file.parent.resolve()) for i, table in enumerate(tables)
        ),
        windows=tuple(sorted(windows)),
        sinks=tuple(sorted(sinks)),
        **numbers,
    )


_NUMBERS: Final = {"chunks_per_call": 16, "warm_up_chunks": 1}


def _no_multiple(value: int, chunk: int) -> str:
    return f"{value} latent frames are not a multiple of the chunk's {chunk}"


def read_run_config(file: Path) -> RunConfig:
    """The values of LongLive's YAML that matter here; a key inside a section counts before one at the root.

    Raises:
        EngineError: names the key; what this adapter cannot steer is refused, too.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _refuse(str(file), f"cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise _refuse(str(file), "is no mapping")
    places = [data[name] for name in (*_SECTIONS, "model_kwargs") if isinstance(data.get(name), dict)]
    found: dict[str, Any] = {}
    for item in fields(RunConfig):
        value = next((place[item.name] for place in [*places, data] if place.get(item.name) is not None), item.default)
        found[item.name] = tuple(value) if isinstance(value, list) else value
    run = RunConfig(**found)
    _check_run(run, file.name)
    return run


def _check_run(run: RunConfig, where: str) -> None:
    for name, kinds in (
        ("num_frame_per_block", (int,)),
        ("num_samples", (int,)),
        ("num_output_frames", (int,)),
        ("guidance_scale", (int, float)),
        ("multi_shot_rope_offset", (int, float)),
        ("vae_type", (str,)),
        ("scene_cut_prefix", (str,)),
    ):
        if type(getattr(run, name)) not in kinds:
            raise _refuse(f"{where}.{name}", f"{getattr(run, name)!r} is not of type {kinds[0].__name__}")
    if run.num_frame_per_block < 1:
        raise _refuse(f"{where}.num_frame_per_block", f"{run.num_frame_per_block} is below 1")
    shape = run.image_or_video_shape
    if len(shape) != 5 or any(type(size) is not int or size < 1 for size in shape):
        raise _refuse(f"{where}.image_or_video_shape", f"{list(shape)} is not [batch, frames, channels, height, width]")
    for name, batch in (("image_or_video_shape[0]", shape[0]), ("num_samples", run.num_samples)):
        if batch != 1:
            raise _refuse(
                f"{where}.{name}",
                f"a batch of {batch}: the quantised KV cache holds one clip, and this adapter steers one at a time",
                hint="write 1",
            )
    for name, count in (("image_or_video_shape[1]", shape[1]), ("num_output_frames", run.num_output_frames)):
        if count % run.num_frame_per_block:
            raise _refuse(f"{where}.{name}", _no_multiple(count, run.num_frame_per_block))
    if run.i2v or run.independent_first_frame:
        raise _refuse(f"{where}.i2v", "clips that begin with an image are not steered", hint="use a text-to-video YAML")
    if run.lora_ckpt and not run.merge_lora:
        raise _refuse(
            f"{where}.merge_lora",
            "a LoRA that is not merged cannot be quantised",
            hint="set merge_lora: true, or take lora_ckpt out and name a merged checkpoint",
        )
