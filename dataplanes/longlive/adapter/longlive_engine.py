"""The real LongLive-2.0 behind the interface of a video engine, in the process that it is called in.

Use it through `WorkerEngine`, which gives it a process of its own: its packages are called `utils` and `model`, it has
process-wide state, and what a GPU library does when it fails is seldom an exception. One clip at a time.

Not run on a GPU yet: the hooks are compared with the checkout's source and tried against a contract double.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, Final

import torch

from controld.contract.clock import Clock, SystemClock
from controld.contract.configuration import Configuration
from controld.contract.video import Applied, MemorySplit, Transition, TransitionPlan
from dataplanes.longlive import settings as names
from dataplanes.longlive.adapter import hardware as machine
from dataplanes.longlive.adapter import memory
from dataplanes.longlive.adapter.chunk_report import make_report, pixel_frames
from dataplanes.longlive.adapter.clip import Clip
from dataplanes.longlive.adapter.deployment import Deployment, read_deployment
from dataplanes.longlive.adapter.driver import PipelineDriver
from dataplanes.longlive.adapter.hooks import ChunkRecord
from dataplanes.longlive.adapter.loading import Checkout, collect
from dataplanes.longlive.adapter.offer import make_offer, require
from dataplanes.longlive.adapter.transitions import Transitions, changed
from dataplanes.longlive.engine import (
    ChunkResult,
    EngineCapabilities,
    EngineError,
    LoadSpec,
    SessionSpec,
)

_LEFT_BYTES: Final = 256 << 20
"""What libraries' workspaces may go on holding after everything was freed."""
_DEVICE_FAULTS: Final[tuple[type[Exception], ...]] = (torch.AcceleratorError,)
"""A fault of this kind stays: every later call in the process raises it again."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    setting: Configuration
    version: int


def make_engine(deployment: str, device: int = 0) -> LongLiveEngine:
    """The factory for `WorkerSettings`: `dataplanes.longlive.adapter.longlive_engine:make_engine`.

    Args:
        deployment: the operator's TOML file.
        device: index of the CUDA device.
    """
    return LongLiveEngine(read_deployment(deployment), machine.probe(device))


class LongLiveEngine:
    """A `VideoEngine` on a checkout of LongLive-2.0.

    Args:
        deployment: what the operator has.
        hardware: what the machine has.
        clock: of the host.
    """

    def __init__(self, deployment: Deployment, hardware: machine.Hardware, *, clock: Clock | None = None) -> None:
        self._deployment = deployment
        self._hardware = hardware
        self._clock = clock or SystemClock()
        self._offer = make_offer(deployment, hardware)
        self._transitions = Transitions(deployment, hardware, self._offer)
        self._checkout: Checkout | None = None
        self._driver: PipelineDriver | None = None
        self._clip: Clip | None = None
        self._waiting: _Waiting | None = None
        self._version = 0
        self._chunk = 0

    def capabilities(self) -> EngineCapabilities:
        """What it can do here; without a CUDA device nothing, with the reason for each value."""
        return EngineCapabilities(
            engine="longlive",
            device=f"{self._hardware.device} {self._hardware.name}".strip(),
            compute_capability=self._hardware.compute_capability,
            space=self._offer.space,
            transitions=self._offer.transitions,
            backends=self._offer.backends,
            left_out=self._offer.left_out,
            chunk_latents=self._deployment.run.num_frame_per_block,
            frames_per_chunk=pixel_frames(self._deployment.run.num_frame_per_block, 1),
            sessions=1,
        )

    def load(self, spec: LoadSpec) -> MemorySplit:
        """Load weights and warm up. See `VideoEngine.load`."""
        if self._driver is not None:
            raise EngineError("load: something is loaded already", code="engine.already_loaded", hint="unload it first")
        require(self._deployment, self._offer, spec.setting)
        folders = {str(one.file.parent) for one in self._deployment.checkpoints}
        if spec.checkpoint and spec.checkpoint not in folders | {str(one.file) for one in self._deployment.checkpoints}:
            raise EngineError(f"load.checkpoint: {spec.checkpoint} is not in the deployment", hint=f"one of {folders}")
        if spec.options:
            raise EngineError(f"load.options: {sorted(spec.options)} are unknown here")
        memory.limit(self._hardware.device, spec.memory_limit_bytes, self._hardware.memory_bytes)
        self._load(spec.setting)
        self._waiting, self._version = None, 0
        return self._loaded().memory()

    def unload(self) -> MemorySplit:
        """Free everything; what is still held afterwards."""
        held = self._free()
        return MemorySplit(reserved_bytes=held)

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        """What changing would take. See `VideoEngine.plan`."""
        require(self._deployment, self._offer, current)
        require(self._deployment, self._offer, wanted)
        held = 0
        if self._driver is not None:
            split = self._driver.memory()
            held = split.weights_bytes + split.kv_bytes + split.activation_bytes
        return self._transitions.plan(current, wanted, held_bytes=held)

    def apply(self, wanted: Configuration, version: int) -> None:
        """Queue a setting for the begin of the next step. See `VideoEngine.apply`."""
        self._loaded()
        newest = self._version if self._waiting is None else self._waiting.version
        if version < newest:
            raise EngineError(
                f"version {version} is older than {newest}, which is in force or waits", code="engine.stale"
            )
        require(self._deployment, self._offer, wanted)
        self._waiting = _Waiting(wanted, version)

    def open(self, spec: SessionSpec) -> None:
        """Begin a clip. See `VideoEngine.open`."""
        driver = self._loaded()
        if self._clip is not None:
            raise EngineError(
                f"session {self._clip.spec.session_id} is open, and LongLive makes one clip at a time",
                hint="close it first",
            )
        if not spec.prompt.strip():
            raise EngineError("session.prompt: is empty")
        if not spec.chunks and driver.setting[names.VAE] == "batch":
            raise EngineError("session.chunks: decoding at the end keeps all latents, so the clip must have an end")
        clip = Clip(spec, opened_s=self._clock.monotonic_s(), scene_cut_prefix=self._deployment.run.scene_cut_prefix)
        driver.open(clip)
        self._clip = clip

    def step(self, session_id: str) -> ChunkResult:
        """Make the next chunk. See `VideoEngine.step`."""
        clip = self._session(session_id)
        if clip.is_done:
            raise EngineError(f"session {session_id} has made its {clip.spec.chunks} chunks", hint="close it")
        begun_s = self._clock.monotonic_s()
        applied = self._take_waiting(clip)
        failure: EngineError | None = None
        try:
            record = self._make_chunk(clip)
        # Whatever it raises ends this clip, not the engine.
        except Exception as error:  # noqa: BLE001 - the edge to the checkout's code
            failure = _as_engine_error(error)
        if failure is not None:
            self._drop_clip()
            failure.applied = applied
            raise failure
        return self._result(clip, record, applied, begun_s)

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        """Change the prompt of a chunk that has not begun. See `VideoEngine.push_prompt`."""
        clip = self._session(session_id)
        if not prompt.strip():
            raise EngineError("prompt: is empty")
        clip.push(prompt, scene_cut=scene_cut, at_chunk=at_chunk)
        self._loaded().push_prompt(clip)

    def close(self, session_id: str) -> torch.Tensor:
        """End a clip; the frames that its decoder still held. See `VideoEngine.close`."""
        clip = self._session(session_id)
        driver = self._loaded()
        failure: EngineError | None = None
        try:
            driver.end_call(clip)
            driver.hooks.raise_decoder_error()
            driver.decode_rest(clip)
            frames = [one.frames for one in driver.take_decoded(wait=True)]
        except Exception as error:  # noqa: BLE001 - the edge to the checkout's code
            failure = _as_engine_error(error)
        if failure is not None:
            self._drop_clip()
            raise failure
        self._clip = None
        return torch.cat(frames) if frames else self._no_frames()

    def sessions(self) -> frozenset[str]:
        """The one clip, if one is open."""
        clip = self._clip
        return frozenset() if clip is None else frozenset({clip.spec.session_id})

    def _make_chunk(self, clip: Clip) -> ChunkRecord:
        driver = self._loaded()
        if clip.call is None:
            driver.begin_call(clip)
        return driver.advance(clip)

    def _result(self, clip: Clip, record: ChunkRecord, applied: tuple[Applied, ...], begun_s: float) -> ChunkResult:
        driver = self._loaded()
        assert record.latents is not None
        if not bool(torch.isfinite(record.latents).all()):
            self._drop_clip()
            raise EngineError(
                f"chunk {clip.chunk - 1} of session {clip.spec.session_id} has latents that are not finite",
                code="engine.not_finite",
                hint="the session is closed; take a setting of more precision",
                applied=applied,
            )
        taken = driver.take_decoded(wait=driver.setting[names.VAE] in ("batch", "stream"))
        report = make_report(
            clip,
            record,
            taken,
            driver.timeline,
            setting_id=driver.setting.config_id,
            chunk=self._chunk,
            memory=driver.memory(),
            begun_s=begun_s,
            now_s=self._clock.monotonic_s(),
        )
        self._chunk += 1
        frames = torch.cat([one.frames for one in taken]) if taken else self._no_frames()
        return ChunkResult(
            frames=frames,
            report=report,
            applied=applied,
            is_last=clip.is_done,
            kv_unreadable=record.kv_unreadable,
        )

    def _take_waiting(self, clip: Clip) -> tuple[Applied, ...]:
        if self._waiting is None:
            return ()
        waiting, self._waiting = self._waiting, None
        driver = self._loaded()
        before = driver.setting
        plan = self._transitions.plan(before, waiting.setting, held_bytes=0)
        rebuilds = self._transitions.rebuilds_cache(before, waiting.setting)
        if not clip.spec.chunks and waiting.setting[names.VAE] == "batch":
            reason = "decoding at the end keeps all latents, and this clip has no end"
            return (self._applied(waiting, Transition.NONE, 0.0, refused={names.VAE: reason}),)
        started_s = self._clock.monotonic_s()
        failure: EngineError | None = None
        try:
            driver.change(clip, waiting.setting, plan.transition, rebuilds_cache=rebuilds)
            if clip.call is None:
                driver.begin_call(clip)
        except Exception as error:  # noqa: BLE001 - the edge to the checkout's code
            failure = _as_engine_error(error)
        del driver
        if failure is None:
            seconds = self._clock.monotonic_s() - started_s
            self._transitions.learn(before, waiting.setting, seconds)
            return (self._applied(waiting, plan.transition, seconds, keeps_kv=plan.keeps_kv),)
        lost: EngineError | None = None
        try:
            self._return_to(before, clip)
        except Exception as error:  # noqa: BLE001 - the edge to the checkout's code
            lost = _as_engine_error(error)
        seconds = self._clock.monotonic_s() - started_s
        reasons = dict.fromkeys(changed(before, waiting.setting), str(failure))
        answer = self._applied(waiting, plan.transition, seconds, keeps_kv=False, refused=reasons, in_force=before)
        if lost is not None:
            self._free()
            # The owner loads again and must not be led into the same setting at once, so it is answered.
            raise EngineError(
                f"neither the setting that was asked for ({failure}) nor the one before ({lost}) can be loaded",
                code="engine.worker_died",
                hint="load a smaller setting",
                applied=(answer,),
            )
        return (answer,)

    def _applied(
        self,
        waiting: _Waiting,
        transition: Transition,
        seconds: float,
        *,
        keeps_kv: bool = True,
        refused: dict[str, str] | None = None,
        in_force: Configuration | None = None,
    ) -> Applied:
        self._version = waiting.version
        setting = self._loaded().setting if in_force is None else in_force
        return Applied(
            version=waiting.version,
            setting_id=setting.config_id,
            chunk=self._chunk,
            transition=transition,
            seconds=seconds,
            keeps_kv=keeps_kv,
            refused=refused or {},
        )

    def _return_to(self, setting: Configuration, clip: Clip) -> None:
        """A change failed half way: everything is made anew at the setting before; the clip goes on from latents."""
        clip.call, clip.place = None, None
        # Frames that wait in the decoder are the clip's.
        driver = self._loaded()
        kept = driver.take_decoded(wait=True)
        del driver
        self._free(keep_clip=True)
        self._load(setting)
        driver = self._loaded()
        driver.open(clip)
        driver.hooks.decoded.extend(kept)
        clip.is_rebuilding = clip.chunk > 0

    def _load(self, setting: Configuration) -> None:
        failure: EngineError | None = None
        try:
            if self._checkout is None:
                self._checkout = Checkout(self._deployment, self._hardware)
            self._driver = PipelineDriver(self._checkout, self._deployment, self._hardware, self._clock, setting)
        except Exception as error:  # noqa: BLE001 - the edge to the checkout's code
            failure = _as_engine_error(error)
        if failure is not None:
            # Out of the handler, where the error no longer keeps what was built so far alive.
            held = self._free()
            if held > _LEFT_BYTES:
                failure.hint = f"{held} bytes could not be freed: start the worker again"
            raise failure

    def _free(self, *, keep_clip: bool = False) -> int:
        alive: Any = None
        if self._driver is not None:
            if self._clip is not None and self._clip.call is not None:
                self._driver.end_call(self._clip)
            alive, self._driver = self._driver.release(), None
        if not keep_clip:
            self._clip = None
        collect()
        if alive is not None and alive() is not None:
            return max(memory.held_bytes(self._hardware.device), memory.module_bytes(alive()))
        return memory.held_bytes(self._hardware.device)

    def _drop_clip(self) -> None:
        """After a fault: the call is over or ends here, and nothing that it left in the caches is used again."""
        driver, clip, self._clip = self._loaded(), self._clip, None
        if clip is not None and clip.call is not None and not clip.call.has_ended:
            clip.call.cancel()
        driver.hooks.end_decoder_thread()
        driver.hooks.decoded.clear()
        driver.forget_caches()

    def _session(self, session_id: str) -> Clip:
        if self._clip is None or self._clip.spec.session_id != session_id:
            raise EngineError(f"unknown session {session_id!r}", code="engine.unknown_session")
        return self._clip

    def _loaded(self) -> PipelineDriver:
        if self._driver is None:
            raise EngineError("nothing is loaded", code="engine.not_loaded", hint="load first")
        return self._driver

    def _no_frames(self) -> torch.Tensor:
        return torch.empty((0, 0, 0, 3), dtype=torch.uint8)


def _as_engine_error(error: Exception) -> EngineError:
    """What to tell of an error. A new one: the old one refers to the frames, and these to the tensors, that it met."""
    if isinstance(error, EngineError):
        told = error
    elif isinstance(error, torch.OutOfMemoryError):
        told = EngineError(f"out of memory: {error}", code="engine.out_of_memory", hint="take a smaller setting")
    elif isinstance(error, _DEVICE_FAULTS):
        traceback.print_exception(error)
        told = EngineError(f"the device failed: {error}", code="engine.worker_died", hint="start the worker again")
    else:
        traceback.print_exception(error)
        told = EngineError(f"{type(error).__name__}: {error}", code="engine.failed", hint="see the worker's log")
    return EngineError(told.message, code=told.code, hint=told.hint)
