"""Drives one pipeline of LongLive: begins and ends calls of its inference, and carries a clip from one to the next.

A call ends where a setting asks for it, or after `chunks_per_call`. The next one goes on from the same cache, whose
indices LongLive sets back and the hooks put in place again; or, where the cache was made anew, LongLive caches the
clip's first and last latents again, as it does to extend a given video.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.video import MemorySplit, Transition
from dataplanes.longlive import settings as names
from dataplanes.longlive.adapter import memory
from dataplanes.longlive.adapter.clip import Clip, KeptChunk
from dataplanes.longlive.adapter.deployment import Deployment
from dataplanes.longlive.adapter.hardware import Hardware
from dataplanes.longlive.adapter.hooks import ChunkRecord, Decoded, GivenChunk, KvPlace, PipelineHooks
from dataplanes.longlive.adapter.inference_call import InferenceCall
from dataplanes.longlive.adapter.kv_fidelity import KvFidelity
from dataplanes.longlive.adapter.loading import Checkout, collect
from dataplanes.longlive.adapter.timeline import CudaTimeline, HostTimeline
from dataplanes.longlive.engine import SessionSpec

POSITIONS: Final = 1024
"""Temporal positions in LongLive's rotary table; a clip that reaches the end is cached again from position 0."""


class PipelineDriver:
    """The pipeline with weights, at a setting.

    Args:
        checkout: where the pipeline comes from.
        clock: of the host.
        setting: that it is loaded at.

    Raises:
        torch.OutOfMemoryError, EngineError: it cannot be loaded; nothing of it is referred to any more.
    """

    def __init__(
        self, checkout: Checkout, deployment: Deployment, hardware: Hardware, clock: Clock, setting: Configuration
    ) -> None:
        self._checkout = checkout
        self._deployment = deployment
        self._device = hardware.device
        self._chunk = deployment.run.num_frame_per_block
        self.setting = setting
        self._use_device()
        with torch.no_grad():
            self.pipe, self._config = checkout.build(setting)
            self._config = checkout.load_weights(self.pipe, setting)
        self.host = HostTimeline(clock)
        is_cuda = self._device.startswith("cuda")
        self.timeline = CudaTimeline(clock, self._device) if is_cuda else self.host
        fidelity = KvFidelity(checkout.find_dequantise)
        self.hooks = PipelineHooks(self.pipe, timeline=self.timeline, host=self.host, fidelity=fidelity)
        self.hooks.attach_generator(compiled=setting[names.COMPILE] == "yes")
        checkout.set_between_calls(self.pipe, self._config, setting)
        self._warm_up(clock)

    def release(self) -> weakref.ref[Any]:
        """Let go of the pipeline; the reference is dead once garbage was collected."""
        alive = weakref.ref(self.pipe)
        self.hooks.remove()
        self.pipe.clear_cache()
        del self.pipe, self.hooks, self._config
        return alive

    def memory(self) -> MemorySplit:
        """What the pipeline holds."""
        return memory.split(self.pipe, self._device)

    def open(self, clip: Clip) -> None:
        """Begin a clip: the decoder forgets the one before. Its first call begins with its first chunk."""
        self.hooks.decoded.clear()
        self.hooks.keeps_decoder_state = False
        self.pipe.vae.model.clear_cache()
        self.hooks.keeps_decoder_state = True

    def begin_call(self, clip: Clip) -> None:
        """Begin a call that makes the clip's next chunks; returns when the first one waits to be made."""
        chunks = self._chunks_of_call(clip)
        history = self._history(clip) if clip.is_rebuilding else []
        latents = torch.cat([one.latents for one in history], dim=1) if history else None
        is_batch = self.setting[names.VAE] == "batch"
        prompts = [clip.prompt(chunk) for chunk in range(clip.chunk, clip.chunk + chunks)]
        noise = clip.noise(
            chunks, self._deployment.run.image_or_video_shape[2:], self._chunk, torch.device(self._device)
        )
        pipe = self.pipe

        def run() -> None:
            # The current device and gradient mode are a thread's own.
            self._use_device()
            with torch.no_grad():
                pipe.inference(noise=noise, text_prompts=[prompts], initial_latent=latents, return_latents=is_batch)

        call = InferenceCall(run)
        self.timeline.begin_call()
        self.hooks.begin_call(streams=not is_batch, history=[self._given(one, clip) for one in history])
        self.hooks.carry, self.hooks.tick = clip.place, call.tick
        clip.call, clip.call_begin, clip.call_chunks = call, clip.chunk, chunks
        call.start()

    def advance(self, clip: Clip) -> ChunkRecord:
        """Make the next chunk in the call under way."""
        number = clip.chunk
        if clip.is_cut(number):
            clip.shots += 1
        self.hooks.rope_offset = clip.shots * self._deployment.run.multi_shot_rope_offset
        memory.reset_peak(self._device)
        clip.call.advance()
        if clip.call.has_ended:
            self.hooks.end_chunk()
        self.hooks.raise_decoder_error()
        record = self.hooks.finished.popleft()
        assert record.latents is not None
        clip.chunk += 1
        clip.position += self._chunk
        pins = record.pinned
        if clip.is_cut(number) and not pins and number == clip.call_begin:
            # LongLive sees no shot begin with the first chunk of a call.
            pins = self.hooks.pin(self._chunk)
        clip.keep(record.latents, history=int(self.setting[names.WINDOW]) // self._chunk, pins=pins)
        if self.setting[names.VAE] == "batch":
            clip.undecoded.append(record.latents)
        clip.forget_old_prompts()
        if clip.call.has_ended:
            self._call_is_over(clip)
        return record

    def end_call(self, clip: Clip) -> None:
        """End the call under way before its next chunk; the clip can go on in another one."""
        if clip.call is None:
            return
        clip.call.cancel()
        self.hooks.end_decoder_thread()
        self._call_is_over(clip)

    def push_prompt(self, clip: Clip) -> None:
        """Give the call under way the prompts that the clip has now, for the chunks that have not begun."""
        if clip.call is None:
            return
        for number in range(clip.chunk, clip.call_begin + clip.call_chunks):
            index = number - clip.call_begin
            text = clip.prompt(number)
            if text != self.hooks.raw_prompts[index]:
                with torch.no_grad():
                    encoded = self.pipe.text_encoder(text_prompts=[text])["prompt_embeds"]
                # In place: the loop holds the next chunk's dictionary already.
                self.hooks.prompts[index]["prompt_embeds"] = encoded
                self.hooks.raw_prompts[index] = text

    def change(self, clip: Clip | None, wanted: Configuration, reach: Transition, *, rebuilds_cache: bool) -> None:
        """Take another setting, at a safe point; a clip's call is ended unless the change is a chunk's."""
        if reach is Transition.CHUNK:
            self._checkout.set_between_chunks(self.pipe, wanted)
        elif reach is not Transition.NONE:
            if clip is not None:
                self.end_call(clip)
                if wanted[names.VAE] != "batch":
                    self.decode_rest(clip)
            if rebuilds_cache:
                self._checkout.set_cache(self.pipe, wanted)
                if clip is not None:
                    clip.place, clip.is_rebuilding = None, clip.chunk > 0
            if reach is Transition.RELOAD:
                with torch.no_grad():
                    self._checkout.replace_generator(self.pipe, self._config)
                    self._config = self._checkout.load_weights(self.pipe, wanted)
                self.hooks.attach_generator(compiled=wanted[names.COMPILE] == "yes")
            self._checkout.set_between_calls(self.pipe, self._config, wanted)
        self.setting = wanted

    def decode_rest(self, clip: Clip) -> None:
        """Decode latents that were kept for the end."""
        vae = self.pipe.vae
        for latents in clip.undecoded:
            place = {"device": latents.device, "dtype": latents.dtype}
            scale = [vae.mean.to(**place), 1.0 / vae.std.to(**place)]
            with torch.no_grad():
                vae.model.cached_decode(latents.permute(0, 2, 1, 3, 4).contiguous(), scale)
        clip.undecoded.clear()

    def take_decoded(self, *, wait: bool) -> list[Decoded]:
        """Frames that came out since, in order; `wait`: also for those on their way."""
        taken = []
        decoded = self.hooks.decoded
        while decoded and (wait or decoded[0].is_ready()):
            one = decoded.popleft()
            one.wait()
            taken.append(one)
        return taken

    def forget_caches(self) -> None:
        """Drop the caches; the next call makes them again."""
        self.pipe.clear_cache()
        collect()

    def _chunks_of_call(self, clip: Clip) -> int:
        chunks = self._deployment.chunks_per_call
        if clip.spec.chunks:
            chunks = min(chunks, clip.spec.chunks - clip.chunk)
        left = (POSITIONS - clip.position) // self._chunk
        if left < 1:
            clip.is_rebuilding = True
            return chunks
        return min(chunks, left)

    def _call_is_over(self, clip: Clip) -> None:
        clip.call = None
        if self.pipe.kv_cache_pos is not None:
            clip.place = KvPlace.of(self.pipe, clip.position)

    def _history(self, clip: Clip) -> list[KeptChunk]:
        """What the cache that is made anew is filled with."""
        if not self.hooks.pins_shots:
            clip.pinned = None
        history = clip.history(int(self.setting[names.WINDOW]) // self._chunk - 1)
        clip.place, clip.position = None, len(history) * self._chunk
        clip.is_rebuilding = False
        return history

    def _given(self, kept: KeptChunk, clip: Clip) -> GivenChunk:
        offset = kept.shot * self._deployment.run.multi_shot_rope_offset
        return GivenChunk(frames=self._chunk, rope_offset=offset, pins=kept is clip.pinned)

    def _use_device(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)

    def _warm_up(self, clock: Clock) -> None:
        chunks = self._deployment.warm_up_chunks
        if self.setting[names.COMPILE] == "yes":
            # Each length of the history is compiled for; it grows until the window is full.
            chunks = max(chunks, int(self.setting[names.WINDOW]) // self._chunk + 1)
        spec = SessionSpec(session_id="warm-up", prompt="warm-up", chunks=chunks)
        clip = Clip(spec, opened_s=clock.monotonic_s(), scene_cut_prefix=self._deployment.run.scene_cut_prefix)
        self.open(clip)
        while not clip.is_done:
            if clip.call is None:
                self.begin_call(clip)
            self.advance(clip)
        self.decode_rest(clip)
        self.take_decoded(wait=True)
