"""The engine's process: opens and closes sessions by the plan, makes chunks in turn, and writes down what happened.

Run as `python -m dataplanes.longlive.demo.stage PLAN OUT`. A line `ending NAME` on standard output says that a phase is
about to end; the log has one JSON line for each chunk.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from controld.contract.video import Applied
from dataplanes.agent import AgentTiming, VideoAgent
from dataplanes.longlive.agent import SteeredEngine, engine_identity
from dataplanes.longlive.demo.plan import AGENT_ID, DEPLOYMENT, SERVICE_CLASS, DemoPlan, Phase
from dataplanes.longlive.engine import ChunkResult, LoadSpec, SessionSpec
from dataplanes.longlive.profiler.identity import MODEL_NAME, model_fingerprint
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.video_file import write_video

PROMPTS = {"a": "a red square moves sideways", "b": "a green ring moves around"}
FRAMES_KEPT = 96
"""Of each phase, of the first stream, for the video file."""
WELCOME_S = 20.0


class Stage:
    """One run.

    Args:
        out: folder of the log and the video.
    """

    def __init__(self, plan: DemoPlan, out: Path) -> None:
        self._plan = plan
        self._out = out
        engine = ReferenceEngine()
        identity = engine_identity(
            engine.capabilities(),
            deployment=DEPLOYMENT,
            agent_id=AGENT_ID,
            model_name=MODEL_NAME,
            model_fingerprint=model_fingerprint(plan.checkpoint),
        )
        self._agent = VideoAgent(identity, plan.address, initial=FULL, timing=AgentTiming(telemetry_interval_s=0.5))
        self._engine = SteeredEngine(engine, self._agent)
        self._open: list[str] = []
        self._kept: list[torch.Tensor] = []

    def run(self) -> None:
        """Every phase. Raises: EngineError, TimeoutError: no daemon."""
        self._engine.load(LoadSpec(checkpoint=self._plan.checkpoint, setting=FULL))
        self._agent.start()
        self._agent.attached()
        deadline_s = time.monotonic() + WELCOME_S
        while not self._agent.snapshot().connected:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no daemon at {self._plan.address} within {WELCOME_S:g} s")
            time.sleep(0.02)
        begin_s = time.monotonic()
        try:
            with (self._out / "chunks.jsonl").open("w") as log:
                for phase in self._plan.phases:
                    self._phase(phase, log, begin_s)
        finally:
            self._agent.close()
        try:
            write_video(self._out / "video.mp4", torch.cat(self._kept))
        except OSError as error:
            # The verdicts are from the log; a film of it is not worth losing them.
            print(f"no video: {error}", flush=True)

    def _phase(self, phase: Phase, log: TextIO, begin_s: float) -> None:
        for name in [name for name in self._open if name not in phase.sessions]:
            self._engine.close(name)
            self._open.remove(name)
        self._engine.limit_memory(phase.memory_limit_bytes)
        for number, name in enumerate(phase.sessions):
            if name not in self._open:
                spec = SessionSpec(session_id=name, prompt=PROMPTS[name], service_class=SERVICE_CLASS, seed=number)
                self._engine.open(spec)
                self._open.append(name)
        phase_s, kept = time.monotonic(), 0
        while time.monotonic() < phase_s + phase.seconds:
            for name in self._open:
                result = self._engine.step(name)
                print(json.dumps(self._row(phase, name, result, phase_s, begin_s)), file=log, flush=True)
                if name == "a" and kept < FRAMES_KEPT:
                    self._kept.append(result.frames[: FRAMES_KEPT - kept])
                    kept += len(self._kept[-1])
        print(f"ending {phase.name}", flush=True)
        time.sleep(0.5)  # the daemon is asked why meanwhile

    def _row(self, phase: Phase, name: str, result: ChunkResult, phase_s: float, begin_s: float) -> dict[str, Any]:
        now_s, report = time.monotonic(), result.report
        return {
            "phase": phase.name,
            "phase_s": now_s - phase_s,
            "at_s": now_s - begin_s,
            "session": name,
            "frames": len(result.frames),
            "setting_id": report.setting_id,
            "dit_s": report.dit_s,
            "vae_s": report.vae_s,
            "total_s": report.total_s,
            "drift": report.drift,
            "memory_bytes": report.memory.weights_bytes + report.memory.kv_bytes + report.memory.activation_bytes,
            "applied": [_answer(one) for one in result.applied],
        }


def _answer(applied: Applied) -> dict[str, Any]:
    return {
        "version": applied.version,
        "setting_id": applied.setting_id,
        "chunk": applied.chunk,
        "transition": applied.transition.name.lower(),
        "seconds": applied.seconds,
        "refused": dict(applied.refused),
    }


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    plan = DemoPlan.from_json(Path(sys.argv[1]).read_text())
    Stage(plan, Path(sys.argv[2])).run()


if __name__ == "__main__":
    main()
