"""A video engine of plain arithmetic for tests of the worker process: it makes no video and needs no checkout."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import torch

from controld.contract.configuration import Configuration
from controld.contract.space import Parameter, StrategySpace
from controld.contract.video import Applied, ChunkReport, MemorySplit, Transition, TransitionPlan
from dataplanes.longlive.engine import ChunkResult, EngineCapabilities, EngineError, LoadSpec, SessionSpec

_SPACE = StrategySpace(
    parameters=(Parameter(name="steps", values=(2, 4)), Parameter(name="ranks", values=(1, 2, 4), lossy=False))
)


class SmallEngine:
    """Frames carry the process, so that a test sees who made them.

    Args:
        fault: what goes wrong: exit, hang, child, oom, raise, device, chunk (the session is closed by itself),
            hang_load (loading two ranks does not end), no_way_back (only the first process loads),
            full (two ranks have room for no session called a), close (closing a session called a fails).
        touches: file that says that it has begun to.
        keeps: not empty: it restarts its ranks by itself.
    """

    def __init__(self, fault: str = "", touches: str = "", keeps: str = "") -> None:
        self._fault = fault
        self._touches = touches
        self._keeps = bool(keeps)
        self._setting = Configuration({"steps": 4, "ranks": 1})
        self._waiting: tuple[Configuration, int] | None = None
        self._sessions: dict[str, list[object]] = {}
        self._chunk = 0

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="small",
            device="cpu",
            compute_capability=None,
            space=_SPACE,
            transitions={"steps": Transition.CHUNK, "ranks": Transition.RESTART},
            backends={"torch": "speed"},
            left_out={"ranks=8": "too many"},
            chunk_latents=1,
            frames_per_chunk=2,
            sessions=4,
        )

    def load(self, spec: LoadSpec) -> MemorySplit:
        if spec.setting["ranks"] == 4 or self._fault == "oom":
            raise EngineError(f"no memory for {spec.setting['ranks']} ranks", code="engine.out_of_memory")
        if self._fault == "hang_load" and spec.setting["ranks"] == 2:
            self._hang([])
        if self._fault == "no_way_back":
            if Path(self._touches).exists():
                raise EngineError("somebody else took the memory", code="engine.out_of_memory")
            Path(self._touches).touch()
        self._setting = spec.setting
        return MemorySplit(weights_bytes=100 * int(spec.setting["ranks"]))

    def unload(self) -> MemorySplit:
        return MemorySplit()

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        reach = Transition.RESTART if current["ranks"] != wanted["ranks"] else Transition.CHUNK
        return TransitionPlan(
            transition=reach, seconds=1.0, peak_bytes=1, keeps_kv=self._keeps or reach is Transition.CHUNK
        )

    def apply(self, wanted: Configuration, version: int) -> None:
        self._waiting = (wanted, version)

    def open(self, spec: SessionSpec) -> None:
        if spec.session_id in self._sessions:
            raise EngineError(f"session {spec.session_id}: is open already")
        if self._fault == "full" and self._setting["ranks"] == 2 and spec.session_id == "a":
            raise EngineError("no memory for another cache", code="engine.out_of_memory")
        self._sessions[spec.session_id] = [spec, spec.prompt, 0]

    def step(self, session_id: str) -> ChunkResult:
        applied: tuple[Applied, ...] = ()
        if self._waiting is not None:
            self._setting, version = self._waiting
            self._waiting = None
            applied = (
                Applied(
                    version=version,
                    setting_id=self._setting.config_id,
                    chunk=self._chunk,
                    transition=Transition.CHUNK,
                    seconds=0.0,
                    keeps_kv=True,
                ),
            )
        self._fail()
        spec, prompt, made = self._sessions[session_id]
        if self._fault == "chunk" and prompt == "bad":
            del self._sessions[session_id]
            raise EngineError("the decoder failed", code="engine.decoder_failed")
        assert isinstance(spec, SessionSpec) and isinstance(made, int) and isinstance(prompt, str)
        report = ChunkReport(
            session_id=session_id,
            service_class=spec.service_class,
            setting_id=self._setting.config_id,
            chunk=self._chunk,
            session_chunk=made,
            frames=2,
            denoise_s=(0.5,) * int(self._setting["steps"]),
            recache_s=0.5,
            vae_s=0.25,
            vae_overlap=0.0,
            total_s=1.0,
            first_frame_s=1.0 if made == 0 else 0.0,
            fps_denoise=2.0,
            fps_end_to_end=2.0,
            memory=MemorySplit(),
        )
        self._chunk += 1
        self._sessions[session_id][2] = made + 1
        frames = torch.full((2, 1, 1, 3), len(prompt), dtype=torch.uint8)
        return ChunkResult(frames=frames, report=report, applied=applied, is_last=made + 1 == spec.chunks)

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        self._sessions[session_id][1] = prompt

    def close(self, session_id: str) -> torch.Tensor:
        del self._sessions[session_id]
        if self._fault == "close" and session_id == "a":
            raise EngineError("the decoder failed", code="engine.decoder_failed")
        return torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)

    def sessions(self) -> frozenset[str]:
        return frozenset(self._sessions)

    def _fail(self) -> None:
        if self._fault == "raise":
            raise ValueError("a bug in the engine's own code")
        if self._fault == "device":
            raise EngineError("the device failed", code="engine.worker_died")
        if self._fault == "exit":
            print("last words", flush=True)
            os._exit(3)
        if self._fault in ("hang", "child"):
            self._hang([subprocess.Popen(["sleep", "600"]).pid] if self._fault == "child" else [])

    def _hang(self, held: list[int]) -> None:
        Path(self._touches + ".part").write_text(" ".join(map(str, [os.getpid(), *held])))
        Path(self._touches + ".part").rename(self._touches)
        time.sleep(600)


def make(**keywords: str) -> SmallEngine:
    """For `WorkerSettings.factory`."""
    return SmallEngine(**keywords)


def refuse() -> SmallEngine:
    """A factory that cannot."""
    raise EngineError("longlive.toml.checkout: is no folder")
