"""A double of the engine's interface: it keeps every rule of `VideoEngine` and has no quality or speed of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.space import Parameter, StrategySpace
from controld.contract.video import Applied, ChunkReport, MemorySplit, Transition, TransitionPlan
from dataplanes.longlive.engine import ChunkResult, EngineCapabilities, EngineError, LoadSpec, SessionSpec

SPACE = StrategySpace(
    parameters=(
        Parameter(name="kv", values=("bf16", "nvfp4")),
        Parameter(name="steps", values=(2, 4), ordered=True),
        Parameter(name="vae", values=("stream", "async"), lossy=False),
    )
)
TRANSITIONS = {"kv": Transition.KV_REBUILD, "steps": Transition.CHUNK, "vae": Transition.NEXT_CALL}


class DoubleEngine:
    """Says which setting each chunk ran under; how long things take is for the test to say.

    Attributes:
        pass_s, vae_s: seconds that each forward pass and each decoding is said to take.
        refuse: why the next settings are refused; empty: they are taken.
        makes_nan: settings under which chunks are not finite, so that the step fails and its session is closed.
        dies: the next step finds the worker dead, and what waited is lost with it.
        memory: what chunks say that they need, by setting; nothing where it is not among them.
        unreadable: the KV cache of the next chunks cannot be read back.
    """

    def __init__(self) -> None:
        self.setting = Configuration({})
        self.asked: list[tuple[str, int]] = []
        self.refuse = ""
        self.pass_s = 1.0
        self.vae_s = 1.0
        self.makes_nan: set[str] = set()
        self.dies = False
        self.memory: dict[str, MemorySplit] = {}
        self.unreadable = False
        self._waiting: tuple[Configuration, int] | None = None
        self._version = 0
        self._chunk = 0
        self._sessions: dict[str, SessionSpec] = {}
        self._made: dict[str, int] = {}

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="reference", device="cpu", compute_capability=None, space=SPACE, transitions=TRANSITIONS,
            backends={"torch_emulated": "memory"}, left_out={"weights=fp8": "the double has no weights"},
            chunk_latents=2, frames_per_chunk=8, sessions=4,
        )  # fmt: skip

    def load(self, spec: LoadSpec) -> MemorySplit:
        self.setting, self._version, self._sessions = spec.setting, 0, {}
        return MemorySplit()

    def unload(self) -> MemorySplit:
        return MemorySplit()

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        return TransitionPlan(transition=Transition.CHUNK, seconds=0.0, peak_bytes=0, keeps_kv=True)

    def apply(self, wanted: Configuration, version: int) -> None:
        self.asked.append((wanted.config_id, version))
        if self.refuse:
            raise EngineError(self.refuse)
        if version < self._version:
            raise EngineError(f"version {version} is older than {self._version}", code="engine.stale")
        self._waiting = (wanted, version)

    def open(self, spec: SessionSpec) -> None:
        self._sessions[spec.session_id] = spec
        self._made[spec.session_id] = 0

    def step(self, session_id: str) -> ChunkResult:
        if self.dies:
            self._sessions, self._waiting = {}, None
            raise EngineError("the worker died", code="engine.worker_died")
        if session_id not in self._sessions:
            raise EngineError(f"no session {session_id}", code="engine.unknown_session")
        applied: tuple[Applied, ...] = ()
        if self._waiting is not None:
            self.setting, self._version = self._waiting
            self._waiting = None
            applied = (
                Applied(
                    version=self._version, setting_id=self.setting.config_id, chunk=self._chunk,
                    transition=Transition.CHUNK, seconds=0.0, keeps_kv=True,
                ),
            )  # fmt: skip
        if self.setting.config_id in self.makes_nan:
            del self._sessions[session_id]
            raise EngineError(f"session {session_id}: is not finite", code="engine.not_finite", applied=applied)
        steps = int(self.setting.get("steps", 1))
        dit_s = self.pass_s * (steps + 1)
        overlaps = self.setting.get("vae") == "async"
        report = make_report(
            denoise_s=(self.pass_s,) * steps, recache_s=self.pass_s, vae_s=self.vae_s,
            total_s=max(dit_s, self.vae_s) if overlaps else dit_s + self.vae_s,
            session_id=session_id, service_class=self._sessions[session_id].service_class,
            setting_id=self.setting.config_id, chunk=self._chunk, session_chunk=self._made[session_id],
            memory=self.memory.get(self.setting.config_id, MemorySplit()),
        )  # fmt: skip
        self._chunk += 1
        self._made[session_id] += 1
        wanted = self._sessions[session_id].chunks
        is_last = bool(wanted) and self._made[session_id] >= wanted
        frames = torch.zeros(8, 2, 2, 3, dtype=torch.uint8)
        return ChunkResult(frames, report, applied, is_last, kv_unreadable=self.unreadable)

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        return None

    def close(self, session_id: str) -> torch.Tensor:
        del self._sessions[session_id]
        return torch.zeros(0, 2, 2, 3, dtype=torch.uint8)

    def lose(self, session_id: str) -> None:
        """The session is gone, and nobody is told."""
        del self._sessions[session_id]

    def sessions(self) -> frozenset[str]:
        return frozenset(self._sessions)


def make_report(**changes: object) -> ChunkReport:
    values: dict[str, object] = {
        "session_id": "s", "service_class": "default", "setting_id": "0" * 16, "chunk": 0, "session_chunk": 0,
        "frames": 8, "denoise_s": (1.0,), "recache_s": 1.0, "vae_s": 1.0, "vae_overlap": 0.0, "total_s": 1.0,
        "first_frame_s": 0.0, "fps_denoise": 1.0, "fps_end_to_end": 1.0, "memory": MemorySplit(),
    }  # fmt: skip
    return ChunkReport(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def double() -> DoubleEngine:
    return DoubleEngine()


@pytest.fixture
def report() -> Callable[..., ChunkReport]:
    return make_report
