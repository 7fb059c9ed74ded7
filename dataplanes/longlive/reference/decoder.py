"""Decodes one session's latents: all at the end, with each chunk, or in a thread beside the next chunk's denoising.

Frames are the same whichever, for the decoder's feature cache goes from chunk to chunk in order. The thread takes its
work from a bounded queue: a decoder that is slower than denoising holds the session back instead of collecting latents.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.reference.vae import FeatureCache, Vae, cache_bytes

_WAITING_CHUNKS = 1
"""In the queue, beside the one that is being decoded."""


class VaeMode(enum.Enum):
    """When latents are decoded."""

    BATCH = "batch"
    """At the end."""
    STREAM = "stream"
    """With their chunk."""
    ASYNC = "async"
    """In a thread, while the next chunk is denoised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A chunk's frames.

    Args:
        frames: uint8 `[frames, height, width, 3]`.
        begin: when decoding began, on `time.perf_counter`.
        end: when it ended.
        is_finite: whether every pixel was.
    """

    frames: Tensor
    begin: float
    end: float
    is_finite: bool


class SessionDecoder:
    """The decoder of one session. Used from one thread, like the engine.

    Args:
        vae: shared with other sessions.
        mode: the first one.
    """

    def __init__(self, vae: Vae, mode: VaeMode) -> None:
        self._vae = vae
        self._mode = mode
        self._cache: FeatureCache = {}
        self._held: list[Tensor] = []
        self._done: list[Decoded] = []
        self._thread: _DecodingThread | None = None
        self._failure: Exception | None = None

    @property
    def held_bytes(self) -> int:
        """Of the feature cache, waiting latents and frames that nobody has taken."""
        waiting = sum(latents.nbytes for latents in self._held)
        ready = sum(decoded.frames.nbytes for decoded in self._done)
        return cache_bytes(dict(self._cache)) + waiting + ready

    def submit(self, latents: Tensor) -> None:
        """Hand over the next chunk, float32 `[frames, channels, height, width]`; waits while the queue is full.

        Raises:
            EngineError: decoding of an earlier chunk has failed; the session cannot go on.
        """
        self._collect()
        if self._mode is VaeMode.ASYNC:
            if self._thread is None:
                self._thread = _DecodingThread(self._vae, self._cache)
            self._thread.submit(latents)
            return
        self._held.append(latents)
        if self._mode is VaeMode.STREAM:
            self._decode_held()

    def take(self) -> list[Decoded]:
        """What is ready, in order.

        Raises:
            EngineError: decoding has failed.
        """
        self._collect()
        done, self._done = self._done, []
        return done

    def switch(self, mode: VaeMode) -> None:
        """Change the mode; what the old one held is decoded first. A failure shows at the next call of another kind."""
        if mode is not self._mode:
            self._finish()
            self._mode = mode

    def close(self) -> list[Decoded]:
        """Decode what is left and end.

        Raises:
            EngineError: decoding has failed; the thread has ended all the same.
        """
        self._finish()
        return self.take()

    def abandon(self) -> None:
        """End without the rest."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self._held, self._done = [], []

    def _collect(self) -> None:
        if self._thread is not None:
            self._done += self._thread.take()
            self._failure = self._failure or self._thread.failure
        if self._failure is not None:
            raise EngineError(
                f"the decoder failed: {self._failure}", code="engine.decoder_failed", hint="the clip cannot go on"
            ) from self._failure

    def _finish(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.stop()
            self._done += thread.take()
            self._failure = self._failure or thread.failure
        self._decode_held()

    def _decode_held(self) -> None:
        held, self._held = self._held, []
        for latents in held:
            if self._failure is None:
                decoded, self._failure = _try_decode(self._vae, latents, self._cache)
                self._done += decoded


class _DecodingThread:
    """Takes latents from a bounded queue in order; the first failure ends decoding and is kept."""

    def __init__(self, vae: Vae, cache: FeatureCache) -> None:
        self.failure: Exception | None = None
        self._vae = vae
        self._cache = cache
        self._work: queue.Queue[Tensor | None] = queue.Queue(_WAITING_CHUNKS)
        self._lock = threading.Lock()
        self._done: list[Decoded] = []
        self._thread = threading.Thread(target=self._run, name="vae-decoder", daemon=True)
        self._thread.start()

    def submit(self, latents: Tensor) -> None:
        self._work.put(latents)

    def take(self) -> list[Decoded]:
        with self._lock:
            done, self._done = self._done, []
        return done

    def stop(self) -> None:
        """Decode what waits and end."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        # After a failure the queue is still emptied, so that nobody waits for ever to put something in.
        while (latents := self._work.get()) is not None:
            if self.failure is None:
                decoded, self.failure = _try_decode(self._vae, latents, self._cache)
                with self._lock:
                    self._done += decoded


def _try_decode(vae: Vae, latents: Tensor, cache: FeatureCache) -> tuple[list[Decoded], Exception | None]:
    """Decode, or say what went wrong: another thread asks for it later."""
    try:
        return [_decode(vae, latents, cache)], None
    except Exception as error:  # noqa: BLE001 - the thread's edge
        return [], error


@torch.no_grad()
def _decode(vae: Vae, latents: Tensor, cache: FeatureCache) -> Decoded:
    begin = time.perf_counter()
    pixels = vae.stream(latents, cache)
    is_finite = bool(pixels.isfinite().all())
    frames = (pixels.nan_to_num() * 255).round().to(torch.uint8).movedim(1, -1).contiguous()
    return Decoded(frames=frames, begin=begin, end=time.perf_counter(), is_finite=is_finite)
