"""The hooks on one LongLive pipeline: where a chunk begins, what each forward pass took, where frames come out.

All of them are set on the instance; nothing of the checkout is edited. LongLive's loop reads a chunk's prompt before
it makes the chunk's scheduler, and the scheduler is the tick: a prompt is therefore changed in place.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from dataplanes.longlive.adapter import signature
from dataplanes.longlive.adapter.kv_fidelity import KvFidelity, Pair
from dataplanes.longlive.adapter.timeline import HostTimeline, Timeline, event

KV_PLACE: Final = ("global_end_index", "local_end_index", "pinned_start", "pinned_len")
"""What of a layer's cache says where its contents are; LongLive sets it back at the begin of a call."""
_CHUNKS_IN_DECODER: Final = 1


@dataclass(slots=True)
class ChunkRecord:
    """What the hooks saw of one chunk; marks are of the timeline."""

    steps: int
    begin: Any
    forwards: list[tuple[Any, Any]] = field(default_factory=list)
    latents: torch.Tensor | None = None
    end: Any = None
    pinned: bool = False
    kv_pairs: list[Pair] = field(default_factory=list)
    kv_unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenChunk:
    """Latents that a call caches before it makes any.

    Args:
        frames: latent frames.
        rope_offset: the temporal offset of its shot; LongLive itself caches all that is given as of the first one.
        pins: it is the sink of its shot, which LongLive pins in chunks only that it makes.
    """

    frames: int
    rope_offset: float
    pins: bool


@dataclass(slots=True)
class Decoded:
    """What the decoder gave for one chunk; frames may still be on their way to the host."""

    frames: torch.Tensor
    span: tuple[Any, Any]
    flicker: torch.Tensor
    is_finite: torch.Tensor
    arrived: Any = None

    def is_ready(self) -> bool:
        """Whether the frames are on the host."""
        return self.arrived is None or bool(self.arrived.query())

    def wait(self) -> None:
        """Wait until they are."""
        if self.arrived is not None:
            self.arrived.synchronize()


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a clip's history lies in the caches, to go on from in another call."""

    position: int
    layers: Mapping[str, tuple[dict[str, torch.Tensor], ...]]

    @classmethod
    def of(cls, pipe: Any, position: int) -> KvPlace:
        """Read it after a call; `position` is the latent frame that comes next."""
        layers = {}
        for name in ("kv_cache_pos", "kv_cache_neg"):
            caches = getattr(pipe, name) or ()
            layers[name] = tuple({key: cache[key].clone() for key in KV_PLACE} for cache in caches)
        return cls(position, layers)

    def restore(self, pipe: Any) -> None:
        """Undo the setting back that a call begins with."""
        for name, layers in self.layers.items():
            for cache, place in zip(getattr(pipe, name) or (), layers, strict=bool(layers)):
                cache.update({key: value.clone() for key, value in place.items()})


def to_frames(pixels: torch.Tensor) -> torch.Tensor:
    """`[1, 3, frames, height, width]` in [-1, 1] to uint8 `[frames, height, width, 3]`; NaN becomes black."""
    unit = (pixels[0].float().clamp(-1, 1) * 0.5 + 0.5).nan_to_num(0.0)
    return (unit * 255.0).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


class PipelineHooks:
    """Set on a pipeline that was built; taken off by `remove`.

    Args:
        pipe: LongLive's pipeline.
        timeline: of the generator's device.
        host: for what another thread decodes.
        fidelity: looks at what the clean passes write.

    Raises:
        EngineError: a hooked method is missing or has other parameters.
    """

    def __init__(self, pipe: Any, *, timeline: Timeline, host: HostTimeline, fidelity: KvFidelity) -> None:
        signature.require_methods(pipe, signature.pipeline_methods())
        signature.require_methods(pipe.vae.model, {"cached_decode": "z, scale", "clear_cache": ""})
        self.pipe = pipe
        self.timeline = timeline
        self._host = host
        self._fidelity = fidelity
        self.tick: Callable[[], None] = lambda: None
        self.carry: KvPlace | None = None
        self.keeps_decoder_state = False
        self.rope_offset = 0.0
        self.prompts: list[dict[str, torch.Tensor]] = []
        self.raw_prompts: list[str] = []
        self.record: ChunkRecord | None = None
        self.finished: deque[ChunkRecord] = deque()
        self.decoded: deque[Decoded] = deque()
        self.streams = False
        self._given: deque[GivenChunk] = deque()
        self._given_passes = 0
        self._decoding = threading.Condition()
        self._submitted = 0
        self._decoded_count = 0
        self._decoder_error: BaseException | None = None
        self._undo: list[Callable[[], None]] = []
        self._inference_thread = 0
        self._wrap(pipe, "_inference_inner", self._on_inner)
        self._wrap(pipe, "_initialize_sample_scheduler", self._on_scheduler)
        self._wrap(pipe, "_initialize_kv_cache", self._on_kv_cache)
        self._wrap(pipe, "_pin_current_chunk", self._on_pin)
        self._wrap(pipe.vae.model, "cached_decode", self._on_decode)
        self._wrap(pipe.vae.model, "clear_cache", self._on_clear_decoder)

    def attach_generator(self, *, compiled: bool) -> None:
        """Hook the generator that the pipeline has now; again after it was replaced.

        Args:
            compiled: then the cache's updates are part of the compiled code and are not looked at.

        Raises:
            EngineError: a hooked method is missing or has other parameters.
        """
        generator = self.pipe.generator
        if not compiled:
            self._undo.append(self._fidelity.attach(generator.model))
        for handle in (
            generator.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            generator.register_forward_hook(self._after_forward),
        ):
            self._undo.append(handle.remove)

    def remove(self) -> None:
        """Leave the pipeline as it was built."""
        while self._undo:
            self._undo.pop()()

    @property
    def pins_shots(self) -> bool:
        """Whether the first chunk of a shot is pinned as a further sink."""
        return bool(self.pipe.multi_shot_sink and self.pipe.sink_size)

    def pin(self, frames: int) -> bool:
        """Pin the chunk that was cached last where shots are pinned; whether they are."""
        if self.pins_shots:
            for caches in (self.pipe.kv_cache_pos, self.pipe.kv_cache_neg):
                if caches is not None:
                    self.pipe._pin_current_chunk(caches, frames)
        return self.pins_shots

    def begin_call(self, *, streams: bool, history: Sequence[GivenChunk] = ()) -> None:
        """Forget the call before.

        Args:
            streams: this one decodes as it goes.
            history: of the latents that it is given.
        """
        self._given, self._given_passes = deque(history), 0
        self.record = None
        self.streams = streams
        self.prompts, self.raw_prompts = [], []
        self._submitted = self._decoded_count = 0
        self._decoder_error = None
        # A pass that failed in the call before left what it saw: the first pass of this one would end with it.
        self._fidelity.end()
        self.finished.clear()

    def end_chunk(self) -> None:
        """Close the record of the chunk that ran."""
        if self.record is not None:
            self.record.end = self.timeline.mark()
            self.finished.append(self.record)
            self.record = None
            self._submitted += 1

    def end_decoder_thread(self) -> None:
        """End LongLive's decoding thread, which a call that is cancelled leaves waiting for ever, holding the pipeline.

        It ends by an empty entry in its queue, and only its own closure knows the queue.
        """
        for thread in threading.enumerate():
            target: Any = getattr(thread, "_target", None)
            if getattr(target, "__name__", "") != signature.DECODER_THREAD:
                continue
            cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
            lock, work, ready = (cells[name].cell_contents for name in signature.DECODER_QUEUE)
            with lock:
                work.append(None)
            ready.set()
            thread.join()

    def raise_decoder_error(self) -> None:
        """What decoding raised in another thread."""
        if self._decoder_error is not None:
            error, self._decoder_error = self._decoder_error, None
            raise error

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, functools.partial(replacement, original))
        self._undo.append(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))

    def _on_inner(self, original: Callable[..., Any], **arguments: Any) -> Any:
        self.prompts, self.raw_prompts = arguments["conditional_dict_list"], arguments["raw_prompts"]
        # Given latents are cached under all blocks' prompts at once; under one, a block is as long as it is here.
        arguments["conditional_dict"] = self.prompts[0]
        if self.carry is not None:
            self.carry.restore(self.pipe)
            arguments["current_start_frame"] = self.carry.position
        self._inference_thread = threading.get_ident()
        return original(**arguments)

    def _on_scheduler(self, original: Callable[..., Any], noise: torch.Tensor) -> Any:
        self.end_chunk()
        self._wait_for_decoder()
        self.tick()
        # The loop counts shots from the call's begin, a clip from its own.
        self.pipe._dit_model.rope_temporal_offset = self.rope_offset
        scheduler = original(noise)
        self.record = ChunkRecord(steps=len(scheduler.timesteps), begin=self.timeline.mark())
        return scheduler

    def _wait_for_decoder(self) -> None:
        # In its own thread LongLive decodes from a queue without an end.
        with self._decoding:
            self._decoding.wait_for(
                lambda: (
                    not self.streams
                    or self._decoder_error is not None
                    or self._submitted - self._decoded_count <= _CHUNKS_IN_DECODER
                )
            )
        self.raise_decoder_error()

    def _on_kv_cache(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        if self.pipe.guidance_scale == 1.0:
            # Made by LongLive in any case, read with guidance only: half of the caches' memory.
            self.pipe.kv_cache_neg = None

    def _on_pin(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        if self.record is not None:
            self.record.pinned = True

    def _on_clear_decoder(self, original: Callable[[], None]) -> None:
        if not self.keeps_decoder_state:
            original()

    def _before_forward(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        record = self.record
        if record is None:
            if self._given:
                self.pipe._dit_model.rope_temporal_offset = self._given[0].rope_offset
            return
        if len(record.forwards) == record.steps * self._passes:
            # Behind the denoising steps comes the pass that caches the clean chunk.
            record.latents = keywords["noisy_image_or_video"]
            self._fidelity.begin(keywords["kv_cache"])
        record.forwards.append((self.timeline.mark(), None))

    def _after_forward(self, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        if self.record is not None:
            begin, _ = self.record.forwards[-1]
            self.record.forwards[-1] = (begin, self.timeline.mark())
            self.record.kv_unreadable |= self._fidelity.was_unreadable
            self.record.kv_pairs += self._fidelity.end()
        elif self._given:
            self._given_passes += 1
            if self._given_passes == self._passes:
                self._given_passes, given = 0, self._given.popleft()
                if given.pins:
                    self.pin(given.frames)

    @property
    def _passes(self) -> int:
        """Forward passes for each one of a clip without guidance."""
        return 1 if self.pipe.guidance_scale == 1.0 else 2

    def _on_decode(self, original: Callable[..., torch.Tensor], z: torch.Tensor, scale: Any) -> torch.Tensor:
        try:
            timeline = self.timeline if threading.get_ident() == self._inference_thread else self._host
            begin = timeline.mark()
            with torch.no_grad():
                pixels = original(z, scale)
                if pixels.is_cuda and timeline is self._host:
                    torch.cuda.current_stream(pixels.device).synchronize()
                end = timeline.mark()
                decoded = _hand_over(pixels, (begin, end))
        except BaseException as error:
            with self._decoding:
                self._decoder_error = error
                self._decoding.notify_all()
            raise
        with self._decoding:
            self.decoded.append(decoded)
            self._decoded_count += 1
            self._decoding.notify_all()
        # The loop collects what it gets until the call ends, on the GPU even; it gets no frames to collect.
        return pixels[:, :, :0].clone()


def _hand_over(pixels: torch.Tensor, span: tuple[Any, Any]) -> Decoded:
    unit = pixels.float().clamp(-1, 1) * 0.5
    steps = (unit[:, :, 1:] - unit[:, :, :-1]).abs()
    flicker = steps.mean() if steps.numel() else steps.new_zeros(())
    frames, is_finite = to_frames(pixels), torch.isfinite(pixels).all()
    if not frames.is_cuda:
        return Decoded(frames, span, flicker, is_finite)
    host = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True)
    host.copy_(frames, non_blocking=True)
    arrived = event(timed=False)
    arrived.record(torch.cuda.current_stream(frames.device))
    return Decoded(host, span, flicker, is_finite, arrived)
