"""The adapter on a contract double of LongLive (`double/README.md`): nothing here was run on the real engine."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from dataplanes.longlive.adapter.deployment import read_deployment
from dataplanes.longlive.adapter.hardware import Hardware
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine
from dataplanes.longlive.adapter.worker_engine import WorkerEngine
from dataplanes.longlive.adapter.worker_process import WorkerSettings
from dataplanes.longlive.engine import ChunkResult, LoadSpec, SessionSpec

DOUBLE = Path(__file__).parent / "double"
CHECKOUT = DOUBLE / "checkout"
_PACKAGES = ("pipeline", "utils", "wan_5b", "omegaconf")
BASE = {
    "weights": "bf16",
    "activations": "bf16",
    "kv": "bf16",
    "steps": 4,
    "window": 32,
    "sink": 8,
    "multi_shot": "no",
    "vae": "stream",
    "ranks": 1,
    "compile": "no",
}


def setting(**changes: Any) -> Configuration:
    """The base setting with changes; None takes a parameter out."""
    merged = {**BASE, **changes}
    return Configuration({name: value for name, value in merged.items() if value is not None})


def nvfp4(**changes: Any) -> Configuration:
    """W4A4 by Transformer Engine."""
    return setting(**{"weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain", **changes})


def loaded(make_engine: Callable[..., LongLiveEngine], first: Configuration | None = None) -> LongLiveEngine:
    """An engine under the base setting, or another one."""
    engine = make_engine()
    engine.load(LoadSpec(checkpoint="", setting=first or setting()))
    return engine


def clip(
    engine: LongLiveEngine, chunks: int, name: str = "a", **more: object
) -> tuple[torch.Tensor, list[ChunkResult]]:
    """All frames of a clip from begin to end, and what each step gave."""
    engine.open(SessionSpec(session_id=name, prompt="a cat", seed=3, chunks=chunks, **more))  # type: ignore[arg-type]
    results = [engine.step(name) for _ in range(chunks)]
    rest = engine.close(name)
    parts = [one.frames for one in results if len(one.frames)] + ([rest] if len(rest) else [])
    return torch.cat(parts), results


def said_hardware(
    capability: tuple[int, int] | None = (10, 0),
    libraries: tuple[str, ...] = ("transformer_engine", "fouroversix", "torchao"),
) -> Hardware:
    """A device that the double accepts: torch's CPU under the name of no product."""
    return Hardware(
        device="cpu" if capability else "",
        name="contract double" if capability else "no CUDA device",
        compute_capability=capability,
        memory_bytes=0,
        libraries=frozenset(libraries),
    )


@pytest.fixture
def deployment_file(tmp_path: Path) -> Path:
    """A deployment on the double: bf16 and TE weights for four steps, others for two."""
    for name in ("model_bf16.pt", "model_te.pt", "model_s2.pt", "model_4o6.pt"):
        (tmp_path / name).write_bytes(b"weights")
    file = tmp_path / "longlive.toml"
    file.write_text(
        f"""
checkout = "{CHECKOUT}"
config = "configs/inference.yaml"
windows = [16, 24, 32]
sinks = [8, 16]
chunks_per_call = 3
[[checkpoints]]
file = "model_bf16.pt"
format = "bf16"
steps = [4, 8]
[[checkpoints]]
file = "model_te.pt"
format = "te"
steps = [4]
[[checkpoints]]
file = "model_4o6.pt"
format = "fouroversix"
steps = [4]
[[checkpoints]]
file = "model_s2.pt"
format = "te"
steps = [2]
"""
    )
    return file


@pytest.fixture
def make_engine(deployment_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LongLiveEngine]]:
    """Makes the adapter's engine on the double in this process; its packages are forgotten afterwards."""
    before, path = dict(sys.modules), list(sys.path)
    # The engine collects garbage whenever it frees; what pytest and torch hold is no part of it.
    gc.freeze()
    monkeypatch.chdir(Path.cwd())
    if importlib.util.find_spec("omegaconf") is None:
        sys.path.append(str(DOUBLE / "stand_ins"))
    engines: list[LongLiveEngine] = []

    def make(hardware: Hardware | None = None, file: Path = deployment_file) -> LongLiveEngine:
        # One checkout a process: the packages of the one before are forgotten.
        sys.path[:] = [entry for entry in sys.path if not entry.endswith("/checkout")]
        forget()
        engine = LongLiveEngine(read_deployment(file), hardware or said_hardware())
        engines.append(engine)
        return engine

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
            if name not in before:
                del sys.modules[name]

    yield make
    for engine in engines:
        engine.unload()
    gc.unfreeze()
    sys.path[:] = path
    forget()


@pytest.fixture
def worker_settings(deployment_file: Path) -> Callable[..., WorkerSettings]:
    """Settings of a worker with the adapter's engine on the double, or with another factory of `double/engines`."""

    def make(factory: str = "double_engine:make", environment: dict[str, str] | None = None, **more: Any) -> Any:
        path = [str(DOUBLE / "engines")]
        if importlib.util.find_spec("omegaconf") is None:
            path.append(str(DOUBLE / "stand_ins"))
        keywords = more.pop("keywords", {"deployment": str(deployment_file)})
        whole = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **(environment or {})}
        return WorkerSettings(factory=factory, keywords=keywords, environment=whole, **more)

    return make


@pytest.fixture
def make_worker(worker_settings: Callable[..., WorkerSettings]) -> Iterator[Callable[..., WorkerEngine]]:
    """Makes worker engines that are shut down afterwards."""
    engines: list[WorkerEngine] = []

    def make(**more: Any) -> WorkerEngine:
        engine = WorkerEngine(worker_settings(**more))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shut_down()


@pytest.fixture
def clock() -> ManualClock:
    """Time that moves when it is told to."""
    return ManualClock()
