"""One clip in the making: its prompts and shots, its decoder, and what its reports are made from."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from controld.contract.video import MAX_DRIFT, ChunkReport, MemorySplit
from dataplanes.longlive.engine import EngineError, SessionSpec
from dataplanes.longlive.reference.decoder import Decoded, SessionDecoder
from dataplanes.longlive.reference.generator import MadeChunk
from dataplanes.longlive.reference.rolling_cache import ChunkPlace
from dataplanes.longlive.reference.shapes import Prompt
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT

_RATE_CHUNKS = 8
"""Chunks over which frames per second end to end are counted."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PastChunk:
    """A chunk that later ones see: its history can be computed again from it."""

    place: ChunkPlace
    prompt: Prompt
    latents: Tensor


class Session:
    """State of an open session.

    Args:
        spec: as it was opened.
        prompt: parsed.
        decoder: its own.
    """

    def __init__(self, spec: SessionSpec, prompt: Prompt, decoder: SessionDecoder) -> None:
        self.spec = spec
        self.decoder = decoder
        self.next_chunk = 0
        self.past: list[PastChunk] = []
        self._prompt = prompt
        self._shot = 0
        self._coming: dict[int, tuple[Prompt, bool]] = {}
        self._opened_at = time.perf_counter()
        self._has_frames = False
        self._delivered = 0
        self._deliveries: deque[tuple[float, int]] = deque([(self._opened_at, 0)], maxlen=_RATE_CHUNKS + 1)
        self._last_frame: Tensor | None = None
        self._sink_statistics: tuple[Tensor, Tensor] | None = None

    @property
    def is_done(self) -> bool:
        """Whether all its chunks are made."""
        return 0 < self.spec.chunks <= self.next_chunk

    @property
    def past_bytes(self) -> int:
        """Of the latents that are kept."""
        return sum(chunk.latents.nbytes for chunk in self.past)

    def push_prompt(self, prompt: Prompt, *, scene_cut: bool, at_chunk: int | None) -> None:
        """Plan a change of prompt.

        Raises:
            EngineError: the chunk has begun, or the clip ends before it.
        """
        chunk = self.next_chunk if at_chunk is None else at_chunk
        if chunk < self.next_chunk:
            raise EngineError(
                f"at_chunk: chunk {chunk} of session {self.spec.session_id} has begun",
                hint=f"the next one is {self.next_chunk}",
            )
        if 0 < self.spec.chunks <= chunk:
            raise EngineError(f"at_chunk: session {self.spec.session_id} ends after {self.spec.chunks} chunks")
        self._coming[chunk] = (prompt, scene_cut)

    def begin_chunk(self) -> tuple[ChunkPlace, Prompt]:
        """Where the next chunk is, and what it shows; a planned change of prompt takes effect."""
        coming = self._coming.get(self.next_chunk)
        starts_shot = coming is not None and coming[1] and self.next_chunk > 0
        if coming is not None:
            self._prompt = coming[0]
        # The shot is counted when the chunk is done: one that fails changes nothing.
        place = ChunkPlace(chunk=self.next_chunk, shot=self._shot + int(starts_shot), starts_shot=starts_shot)
        return place, self._prompt

    def end_chunk(self, place: ChunkPlace, prompt: Prompt, latents: Tensor, kept: Sequence[int]) -> None:
        """Note a chunk that was made, and keep the latents of those that later ones see."""
        self._coming.pop(self.next_chunk, None)
        self._shot = place.shot
        self.next_chunk += 1
        self.past.append(PastChunk(place, prompt, latents))
        wanted = set(kept)
        self.past = [chunk for chunk in self.past if chunk.place.chunk in wanted]

    def report(
        self,
        place: ChunkPlace,
        made: MadeChunk,
        decoded: Sequence[Decoded],
        *,
        begin: float,
        denoising: Iterable[Interval],
        chunk: int,
        setting_id: str,
        memory: MemorySplit,
    ) -> ChunkReport:
        """What to say of the chunk that was just made.

        Args:
            place: of the chunk.
            made: the chunk.
            decoded: frames that came out with it.
            begin: when its step began, on `time.perf_counter`.
            denoising: when anything was denoised lately.
            chunk: its number over the engine's life.
            setting_id: in force.
            memory: held now.
        """
        now = time.perf_counter()
        frames = sum(len(one.frames) for one in decoded)
        first_frame_s = 0.0
        if frames and not self._has_frames:
            self._has_frames, first_frame_s = True, now - self._opened_at
        self._delivered += frames
        self._deliveries.append((now, self._delivered))
        since, before = self._deliveries[0]
        vae_s = sum(one.end - one.begin for one in decoded)
        generating_s = sum(made.denoise_s) + made.recache_s
        return ChunkReport(
            session_id=self.spec.session_id,
            service_class=self.spec.service_class,
            setting_id=setting_id,
            chunk=chunk,
            session_chunk=place.chunk,
            frames=frames,
            denoise_s=made.denoise_s,
            recache_s=made.recache_s,
            vae_s=vae_s,
            vae_overlap=min(1.0, _overlap(decoded, denoising) / vae_s) if vae_s else 0.0,
            total_s=now - begin,
            first_frame_s=first_frame_s,
            fps_denoise=_pixel_frames(place.chunk, len(made.latents)) / generating_s,
            fps_end_to_end=(self._delivered - before) / (now - since),
            memory=memory,
            communication_bytes=made.sent_bytes,
            kv_signal_to_noise_db=made.kv_signal_to_noise_db,
            latent_sd=float(made.latents.std()),
            drift=self._drift(place, made.latents),
            flicker=self._flicker(decoded),
            has_nan=not all(one.is_finite for one in decoded),
        )

    def _drift(self, place: ChunkPlace, latents: Tensor) -> float:
        """Against the first chunk of the shot, which a cut makes the sink."""
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        if self._sink_statistics is None or place.starts_shot:
            self._sink_statistics = mean, deviation
        sink_mean, sink_deviation = self._sink_statistics
        unit = sink_deviation.clamp_min(1e-6)
        moved = ((mean - sink_mean) / unit).square() + ((deviation - sink_deviation) / unit).square()
        return min(math.sqrt(float(moved.mean())), MAX_DRIFT)

    def _flicker(self, decoded: Sequence[Decoded]) -> float:
        frames = [one.frames for one in decoded if len(one.frames)]
        if not frames:
            return 0.0
        lead = [] if self._last_frame is None else [self._last_frame]
        run = torch.cat([*lead, *frames]).float() / 255
        self._last_frame = frames[-1][-1:].clone()
        return float(run.diff(dim=0).abs().mean()) if len(run) > 1 else 0.0


def _pixel_frames(session_chunk: int, latents: int) -> int:
    frames = latents * FRAMES_PER_LATENT
    return frames - (FRAMES_PER_LATENT - 1) if session_chunk == 0 else frames


def _overlap(decoded: Sequence[Decoded], denoising: Iterable[Interval]) -> float:
    """Seconds of decoding during which something was denoised."""
    spans = list(denoising)
    return sum(max(0.0, min(one.end, end) - max(one.begin, begin)) for one in decoded for begin, end in spans)
