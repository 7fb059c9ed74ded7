"""The one interface of a video engine: the CPU reference engine and the adapter of the real LongLive-2.0 have it.

An engine is used from one thread. `apply` only queues a setting; it takes effect at the next safe point, which is the
begin of a `step`. Errors are `EngineError`s and leave the engine usable unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError
from controld.contract.space import StrategySpace
from controld.contract.video import Applied, ChunkReport, MemorySplit, Transition, TransitionPlan


class EngineError(ControldError):
    """The engine cannot do what was asked.

    Args:
        message: what and why, naming the parameter.
        code: `engine.refused`, `engine.already_loaded`, `engine.out_of_memory`, `engine.not_finite`,
            `engine.worker_died`, `engine.stale`, `engine.unknown_session`, `engine.not_loaded`,
            `engine.decoder_failed`, `engine.failed` (its own code or a library raised).
        hint: what can be done.
        applied: settings that took effect at the begin of the step that failed, oldest first; they stay in force.
    """

    def __init__(
        self, message: str, *, code: str = "engine.refused", hint: str = "", applied: tuple[Applied, ...] = ()
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.applied = applied


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What this engine can do on this machine.

    Args:
        engine: "reference" or "longlive".
        device: as torch names it, with the product's name.
        compute_capability: (major, minor) of a CUDA device, None on a CPU.
        space: settings that it takes; what hardware or checkpoints rule out is not in it.
        transitions: how far a change of each parameter reaches.
        backends: linear back ends that passed their self-test, with what they are offered for: "speed", or "memory"
            for an emulated one.
        left_out: parameter values that are not offered, `parameter=value`, with the reason.
        chunk_latents: latent frames of a chunk; windows and sinks are multiples of it.
        frames_per_chunk: pixel frames of a chunk but the first.
        sessions: how many may be open at a time.
    """

    engine: str
    device: str
    compute_capability: tuple[int, int] | None
    space: StrategySpace
    transitions: Mapping[str, Transition]
    backends: Mapping[str, str]
    left_out: Mapping[str, str]
    chunk_latents: int
    frames_per_chunk: int
    sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What to load.

    Args:
        checkpoint: folder or file of the weights.
        setting: the first one in force.
        memory_limit_bytes: loading and running stay below it; 0: no limit.
        options: engine-specific, by name.

    Raises:
        EngineError: a number is negative.
    """

    checkpoint: str
    setting: Configuration
    memory_limit_bytes: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.memory_limit_bytes < 0:
            raise EngineError(f"load.memory_limit_bytes: {self.memory_limit_bytes} is negative", hint="0: no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """A clip to be made.

    Args:
        session_id: unique among the open ones.
        service_class: whose targets it has.
        prompt: what to show.
        seed: of the noise: the same seed, prompts and settings give the same clip.
        chunks: at most so many; 0: until closed.

    Raises:
        EngineError: the number of chunks is negative.
    """

    session_id: str
    prompt: str
    service_class: str = "default"
    seed: int = 0
    chunks: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 0:
            raise EngineError(f"session.chunks: {self.chunks} is negative", hint="0: until closed")


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one `step` gave.

    Args:
        frames: uint8 `[frames, height, width, 3]` that are ready now, in order; with asynchronous decoding those of
            earlier chunks, maybe none.
        report: this chunk's.
        applied: settings that took effect at its begin, oldest first.
        is_last: the session has made all its chunks; `close` gives the frames still in the decoder.
        kv_unreadable: the chunk's KV signal-to-noise is missing because the quantised cache could not be read back.
    """

    frames: torch.Tensor
    report: ChunkReport
    applied: tuple[Applied, ...] = ()
    is_last: bool = False
    kv_unreadable: bool = False


class VideoEngine(Protocol):
    """A causal video generator that is steered between chunks."""

    def capabilities(self) -> EngineCapabilities:
        """What it can do here; needs nothing loaded."""
        ...

    def load(self, spec: LoadSpec) -> MemorySplit:
        """Load weights and warm up.

        Raises:
            EngineError: something is loaded, which stays (`engine.already_loaded`: unload it first); the setting is
                refused, or memory does not suffice (the engine can load a smaller one then).
        """
        ...

    def unload(self) -> MemorySplit:
        """Free everything; what is still held afterwards."""
        ...

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        """What changing would take.

        Raises:
            EngineError: `wanted` is refused here; says which parameter and why.
        """
        ...

    def apply(self, wanted: Configuration, version: int) -> None:
        """Queue a setting for the next safe point; one that waits already is replaced if `version` is not older.

        Raises:
            EngineError: refused (see `plan`), or older than what is in force or waits (`engine.stale`).
        """
        ...

    def open(self, spec: SessionSpec) -> None:
        """Begin a clip.

        Raises:
            EngineError: too many sessions, or no memory for another cache.
        """
        ...

    def step(self, session_id: str) -> ChunkResult:
        """Make the next chunk.

        Raises:
            EngineError: NaN in the latents (the session is closed, others go on), the worker died, unknown session.
                What was put in force before it failed is in `EngineError.applied`.
        """
        ...

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        """Change the prompt from a chunk that has not begun: the next one, or `at_chunk` of the session.

        Args:
            scene_cut: a new shot begins: its first chunk is pinned as a further sink.
        """
        ...

    def close(self, session_id: str) -> torch.Tensor:
        """End a clip; the frames that its decoder still held, uint8 `[frames, height, width, 3]`."""
        ...

    def sessions(self) -> frozenset[str]:
        """Ids of the open sessions, without those that a fault or a change took along, whoever was told of it.

        From any thread, while another call is under way, too; waits for nothing.
        """
        ...
