"""One clip under way: its prompts by chunk, its noise, and what must outlive a call of LongLive's inference."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataplanes.longlive.adapter.hooks import Decoded, KvPlace
from dataplanes.longlive.engine import EngineError, SessionSpec


@dataclass(frozen=True, slots=True, eq=False)
class KeptChunk:
    """A chunk's latents, for a cache that is made anew, and the shot that it is of."""

    latents: torch.Tensor
    shot: int


class Clip:
    """State of a session between and during calls.

    Args:
        spec: what was opened.
        opened_s: when, by the engine's clock.
        scene_cut_prefix: what a prompt begins with where a new shot does; LongLive looks for it.
    """

    def __init__(self, spec: SessionSpec, *, opened_s: float, scene_cut_prefix: str) -> None:
        self.spec = spec
        self.opened_s = opened_s
        self._prefix = scene_cut_prefix
        self._pushed: dict[int, tuple[str, bool]] = {0: (spec.prompt, False)}
        self.chunk = 0
        """Chunks made, which is the number of the next one."""
        self.call: Any = None
        self.call_begin = 0
        self.call_chunks = 0
        self.place: KvPlace | None = None
        self.position = 0
        """Latent frame that comes next, as positions are counted in the cache."""
        self.first: KeptChunk | None = None
        self.pinned: KeptChunk | None = None
        """The chunk that the cache holds as the newest shot's sink."""
        self.recent: deque[KeptChunk] = deque()
        self.undecoded: list[torch.Tensor] = []
        self.shots = 0
        self.sink_moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self.ready: deque[Decoded] = deque()
        self.has_frames = False
        self.is_rebuilding = False
        self.finished: deque[tuple[float, int]] = deque(maxlen=9)
        """When each of the last chunks was ready, and its pixel frames."""
        self.busy: deque[list[tuple[float, float]]] = deque(maxlen=4)
        """Spans of the forward passes, of each of the last chunks."""

    @property
    def is_done(self) -> bool:
        """Whether all its chunks are made."""
        return bool(self.spec.chunks) and self.chunk >= self.spec.chunks

    def push(self, prompt: str, *, scene_cut: bool, at_chunk: int | None) -> int:
        """Change the prompt from a chunk on; which one.

        Raises:
            EngineError: that chunk has begun, or the clip ends before it.
        """
        at = self.chunk if at_chunk is None else at_chunk
        if at < self.chunk:
            raise EngineError(
                f"at_chunk: chunk {at} of session {self.spec.session_id} has begun", hint=f"{self.chunk} is the next"
            )
        if self.spec.chunks and at >= self.spec.chunks:
            raise EngineError(f"at_chunk: session {self.spec.session_id} has {self.spec.chunks} chunks only")
        if scene_cut and at == 0:
            raise EngineError("scene_cut: the first chunk of a clip begins no further shot")
        self._pushed[at] = (prompt, scene_cut)
        return at

    def prompt(self, chunk: int) -> str:
        """What LongLive is given for a chunk: the prefix stands before the first prompt of a new shot only."""
        at = max(begin for begin in self._pushed if begin <= chunk)
        text, scene_cut = self._pushed[at]
        return self._prefix + text if scene_cut and at == chunk else text

    def is_cut(self, chunk: int) -> bool:
        """Whether a new shot begins with a chunk."""
        return chunk in self._pushed and self._pushed[chunk][1]

    def forget_old_prompts(self) -> None:
        """Prompts before the one in force are of no use any more."""
        at = max(begin for begin in self._pushed if begin <= self.chunk)
        self._pushed = {begin: value for begin, value in self._pushed.items() if begin >= at}

    def noise(self, chunks: int, shape: Sequence[int], frames: int, device: torch.device) -> torch.Tensor:
        """bf16 `[1, chunks * frames, *shape]`; each chunk's own depends on the seed and its number only."""
        parts = []
        for chunk in range(self.chunk, self.chunk + chunks):
            digest = hashlib.sha256(f"{self.spec.seed}/{chunk}".encode()).digest()
            generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            parts.append(torch.randn([1, frames, *shape], generator=generator, device=device, dtype=torch.bfloat16))
        return torch.cat(parts, dim=1)

    def keep(self, latents: torch.Tensor, *, history: int, pins: bool) -> None:
        """Keep a chunk's latents as far as a cache that is made anew takes them: the first, the pinned, the last ones.

        Args:
            history: chunks of a window.
            pins: the cache holds this one as its shot's sink from now on.
        """
        chunk = KeptChunk(latents, self.shots)
        if pins:
            self.pinned = chunk
        if self.first is None:
            self.first = chunk
            return
        self.recent.append(chunk)
        while len(self.recent) > max(history - 1, 0):
            self.recent.popleft()

    def history(self, chunks: int) -> list[KeptChunk]:
        """At most `chunks` chunks, oldest first: the first one, the pinned one and the last ones, as in a cache."""
        if self.first is None or chunks < 1:
            return []
        room = chunks - 1
        recent = list(self.recent)[-room:] if room else []
        if room and self.pinned is not None and self.pinned not in recent:
            recent = [self.pinned, *recent[max(len(recent) - room + 1, 0) :]]
        return [self.first, *recent]
