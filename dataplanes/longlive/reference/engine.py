"""The reference engine: `VideoEngine` on the CPU, with real numerics and measured times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from controld.contract.configuration import Configuration
from controld.contract.video import Applied, MemorySplit, Transition, TransitionPlan
from dataplanes.longlive import settings
from dataplanes.longlive.engine import ChunkResult, EngineCapabilities, EngineError, LoadSpec, SessionSpec
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.longlive.reference.checkpoint import build_transformer, build_vae
from dataplanes.longlive.reference.decoder import SessionDecoder, VaeMode
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.memory import (
    block_weight_bytes,
    history_bytes,
    latent_bytes,
    measure_activations,
    measure_decoder,
    module_bytes,
)
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.offer import find_offer
from dataplanes.longlive.reference.parallel import RankGroup, RankModel
from dataplanes.longlive.reference.session import Interval, Session
from dataplanes.longlive.reference.setting import TRANSITIONS, Setting, reach
from dataplanes.longlive.reference.shapes import SIZE, parse_prompt
from dataplanes.longlive.reference.stored_linear import variant_of
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, Vae
from dataplanes.numerics.nvfp4 import BlockRule

MOST_SESSIONS: Final = 8
RESIDENT: Final = "resident"
"""Option of `load`: `all` keeps the weights in every precision, so that switching takes no reload."""

_ESTIMATED_S: Final = {
    Transition.NONE: 0.0,
    Transition.CHUNK: 0.01,
    Transition.NEXT_CALL: 0.01,
    Transition.KV_REBUILD: 0.05,
    Transition.RELOAD: 0.3,
    Transition.RESTART: 10.0,
}
"""Until a switch of the kind has been measured."""

_ALL_PRECISIONS: Final = (
    LinearPrecision(),
    LinearPrecision(weights=Precision.FP8),
    LinearPrecision(weights=Precision.NVFP4),
    LinearPrecision(weights=Precision.NVFP4, block_rule=BlockRule.FOUR_OVER_SIX),
)


@dataclass(slots=True, kw_only=True)
class _Loaded:
    """What `load` made.

    Args:
        spec: as it was given.
        setting: in force.
        version: of the setting.
        keeps_all: whether weights in every precision are resident.
        generator: transformer and histories.
        vae: without its encoder.
        activation_bytes: measured, by what decides them.
        decoding_bytes: held while a chunk is decoded, measured.
        session_bytes: what a decoder keeps between chunks, measured.
    """

    spec: LoadSpec
    setting: Setting
    version: int
    keeps_all: bool
    generator: Generator | RankGroup
    vae: Vae
    activation_bytes: int
    decoding_bytes: int
    session_bytes: int


class ReferenceEngine:
    """Makes clips of the toy world. Used from one thread; asynchronous decoding has threads of its own.

    Args:
        shape: of the transformer; only the default one has trained weights.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        self._shape = ModelShape() if shape is None else shape
        self._loaded: _Loaded | None = None
        self._sessions: dict[str, Session] = {}
        self._pending: tuple[Setting, int] | None = None
        self._denoising: deque[Interval] = deque(maxlen=64)
        self._measured_s: dict[Transition, float] = {}
        self._chunks = 0
        self._peak_bytes = 0

    def capabilities(self) -> EngineCapabilities:
        """See `VideoEngine`."""
        offer = find_offer()
        return EngineCapabilities(
            engine="reference",
            device="cpu",
            compute_capability=None,
            space=offer.space,
            transitions=TRANSITIONS,
            backends=offer.backends,
            left_out=offer.left_out,
            chunk_latents=self._shape.chunk_latents,
            frames_per_chunk=self._shape.chunk_latents * FRAMES_PER_LATENT,
            sessions=MOST_SESSIONS,
        )

    def load(self, spec: LoadSpec) -> MemorySplit:
        """See `VideoEngine`. `spec.checkpoint` is `trained`, `untrained` or a folder; the option is `resident`."""
        if self._loaded is not None:
            raise EngineError("load: something is loaded already", code="engine.already_loaded", hint="unload it first")
        setting = find_offer().require(spec.setting)
        keeps_all = _keeps_all(spec.options)
        generator = self._build(spec.checkpoint, setting, keeps_all)
        vae = build_vae(spec.checkpoint)
        del vae.encoder
        decoding_bytes, session_bytes = measure_decoder(vae, self._shape)
        try:
            activation_bytes = measure_activations(generator, setting.limits, setting.kv)
        except EngineError:
            _stop(generator)
            raise
        loaded = _Loaded(
            spec=spec,
            setting=setting,
            version=0,
            keeps_all=keeps_all,
            generator=generator,
            vae=vae,
            activation_bytes=activation_bytes,
            decoding_bytes=decoding_bytes,
            session_bytes=session_bytes,
        )
        try:
            self._refuse_beyond_limit(loaded, setting, sessions=1)
        except EngineError:
            _stop(generator)
            raise
        self._loaded, self._peak_bytes = loaded, 0
        return self.memory()

    def unload(self) -> MemorySplit:
        """See `VideoEngine`; open sessions end without their last frames."""
        for session_id in list(self._sessions):
            self._end(session_id)
        if self._loaded is not None:
            _stop(self._loaded.generator)
        self._loaded, self._pending = None, None
        return self.memory()

    def memory(self) -> MemorySplit:
        """The tensors that are held now; activations as measured at the last warm-up."""
        if self._loaded is None:
            return MemorySplit(peak_bytes=self._peak_bytes)
        loaded = self._loaded
        sessions = self._sessions.values()
        held = sum(session.decoder.held_bytes + session.past_bytes for session in sessions)
        weights = loaded.generator.weight_bytes() + module_bytes(loaded.vae)
        history = loaded.generator.cache_bytes()
        activations = max(loaded.activation_bytes, loaded.decoding_bytes) + held
        self._peak_bytes = max(self._peak_bytes, weights + history + activations)
        return MemorySplit(
            weights_bytes=weights,
            kv_bytes=history,
            activation_bytes=activations,
            peak_bytes=self._peak_bytes,
            reserved_bytes=self._forecast(loaded, loaded.setting, len(self._sessions)),
        )

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        """See `VideoEngine`."""
        loaded = self._require_loaded()
        old, new = Setting.of(current), find_offer().require(wanted)
        endless = [session_id for session_id, session in self._sessions.items() if not session.spec.chunks]
        if new.vae is VaeMode.BATCH and endless:
            raise EngineError(
                f"{settings.VAE}: decoding at the end keeps all latents, and session {endless[0]} has no end",
                hint=f"close it first, or {settings.VAE}: stream",
            )
        self._refuse_beyond_limit(loaded, new, sessions=max(1, len(self._sessions)))
        transition = reach(old, new, is_resident=_is_resident(loaded, old, new))
        peak = self._forecast(loaded, new, len(self._sessions))
        if transition is Transition.KV_REBUILD:
            peak += history_bytes(self._shape, old.limits, old.kv)
        elif transition >= Transition.RELOAD:
            peak += loaded.generator.weight_bytes()
        return TransitionPlan(
            transition=transition,
            seconds=self._measured_s.get(transition, _ESTIMATED_S[transition]),
            peak_bytes=peak,
            keeps_kv=True,
        )

    def apply(self, wanted: Configuration, version: int) -> None:
        """See `VideoEngine`."""
        loaded = self._require_loaded()
        newest = loaded.version if self._pending is None else self._pending[1]
        if version < newest:
            raise EngineError(f"setting: version {version} is older than {newest}", code="engine.stale")
        self.plan(loaded.setting.configuration, wanted)
        self._pending = (Setting.of(wanted), version)

    def open(self, spec: SessionSpec) -> None:
        """See `VideoEngine`."""
        loaded = self._require_loaded()
        prompt = parse_prompt(spec.prompt)
        if spec.session_id in self._sessions:
            raise EngineError(f"session {spec.session_id}: is open already", hint="close it first")
        if len(self._sessions) >= MOST_SESSIONS:
            raise EngineError(f"sessions: {MOST_SESSIONS} are open, which is the most", hint="close one")
        newest = loaded.setting if self._pending is None else self._pending[0]
        if not spec.chunks and VaeMode.BATCH in (loaded.setting.vae, newest.vae):
            raise EngineError(
                "session.chunks: decoding at the end keeps all latents, so the clip must have an end",
                hint="give it a number of chunks, or set vae: stream",
            )
        for setting in (loaded.setting, newest):
            self._refuse_beyond_limit(loaded, setting, sessions=len(self._sessions) + 1, opening=spec)
        self._sessions[spec.session_id] = Session(spec, prompt, SessionDecoder(loaded.vae, loaded.setting.vae))
        loaded.generator.open(spec.session_id, loaded.setting.limits, loaded.setting.kv)

    def step(self, session_id: str) -> ChunkResult:
        """See `VideoEngine`."""
        loaded = self._require_loaded()
        session = self._require_session(session_id)
        if session.is_done:
            raise EngineError(f"session {session_id}: all its {session.spec.chunks} chunks are made", hint="close it")
        applied = self._apply_pending(loaded)
        begin = time.perf_counter()
        place, prompt = session.begin_chunk()
        try:
            made = loaded.generator.make(session_id, place, prompt, session.spec.seed, loaded.setting.steps)
            self._denoising.append((begin, time.perf_counter()))
            session.decoder.submit(made.latents)
            decoded = session.decoder.take()
        except EngineError as error:
            if error.code == "engine.worker_died":
                self.unload()
                raise
            self._end(session_id)
            error.applied = applied
            error.hint = error.hint or "the session is closed, others go on"
            raise
        session.end_chunk(place, prompt, made.latents, loaded.generator.kept(session_id))
        report = session.report(
            place,
            made,
            decoded,
            begin=begin,
            denoising=self._denoising,
            chunk=self._chunks,
            setting_id=loaded.setting.configuration.config_id,
            memory=self.memory(),
        )
        self._chunks += 1
        return ChunkResult(_joined([one.frames for one in decoded]), report, applied, session.is_done)

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        """See `VideoEngine`."""
        self._require_session(session_id).push_prompt(parse_prompt(prompt), scene_cut=scene_cut, at_chunk=at_chunk)

    def close(self, session_id: str) -> Tensor:
        """See `VideoEngine`."""
        session = self._require_session(session_id)
        try:
            return _joined([one.frames for one in session.decoder.close()])
        finally:
            self._end(session_id)

    def sessions(self) -> frozenset[str]:
        """See `VideoEngine`; none once a rank ended, though nobody called it since."""
        loaded = self._loaded
        if loaded is not None and isinstance(loaded.generator, RankGroup) and not loaded.generator.is_whole():
            return frozenset()
        return frozenset(self._sessions)

    def _apply_pending(self, loaded: _Loaded) -> tuple[Applied, ...]:
        """Put the waiting setting in force; where that fails the old one stays and the reason is told."""
        if self._pending is None:
            return ()
        wanted, version = self._pending
        self._pending = None
        transition = reach(loaded.setting, wanted, is_resident=_is_resident(loaded, loaded.setting, wanted))
        begin = time.perf_counter()
        refused: dict[str, str] = {}
        try:
            self._change(loaded, wanted, transition)
            loaded.setting = wanted
        except EngineError as error:
            if error.code == "engine.worker_died":
                self.unload()
                raise
            refused = {settings.RANKS if transition is Transition.RESTART else settings.WEIGHTS: str(error)}
        loaded.version = version
        seconds = time.perf_counter() - begin
        if not refused:
            self._measured_s[transition] = seconds
        applied = Applied(
            version=version,
            setting_id=loaded.setting.configuration.config_id,
            chunk=self._chunks,
            transition=transition,
            seconds=seconds,
            keeps_kv=True,
            refused=refused,
        )
        return (applied,)

    def _change(self, loaded: _Loaded, wanted: Setting, transition: Transition) -> None:
        old = loaded.setting
        if transition is Transition.RESTART:
            self._restart(loaded, wanted)
        else:
            if not _is_resident(loaded, old, wanted):
                loaded.generator.reload(loaded.spec.checkpoint, _stored(wanted, loaded.keeps_all))
            loaded.generator.set_precision(wanted.precision)
            if old.kv != wanted.kv:
                loaded.generator.convert(wanted.kv)
            if old.limits != wanted.limits:
                loaded.generator.limit(wanted.limits)
        for session in self._sessions.values():
            session.decoder.switch(wanted.vae)
        if (old.precision, old.kv, old.limits) != (wanted.precision, wanted.kv, wanted.limits):
            loaded.activation_bytes = measure_activations(loaded.generator, wanted.limits, wanted.kv)

    def _restart(self, loaded: _Loaded, wanted: Setting) -> None:
        """Start other ranks and compute the sessions' histories again from the latents that were kept."""
        started = self._build(loaded.spec.checkpoint, wanted, loaded.keeps_all)
        _stop(loaded.generator)
        loaded.generator = started
        for session_id, session in self._sessions.items():
            started.open(session_id, wanted.limits, wanted.kv)
            for past in session.past:
                started.remember(session_id, past.place, past.prompt, past.latents)

    def _build(self, checkpoint: str, setting: Setting, keeps_all: bool) -> Generator | RankGroup:
        precisions = _stored(setting, keeps_all)
        if setting.ranks > 1:
            model = RankModel(checkpoint=checkpoint, shape=self._shape, precisions=precisions)
            return RankGroup(model, setting.ranks)
        return Generator(build_transformer(checkpoint, self._shape, precisions), NoExchange())

    def _forecast(self, loaded: _Loaded, setting: Setting, sessions: int) -> int:
        """Bytes with `sessions` whose windows are full."""
        weights = loaded.generator.weight_bytes() + module_bytes(loaded.vae)
        if not _is_resident(loaded, loaded.setting, setting):
            weights += block_weight_bytes(self._shape, setting.precision)
            weights -= block_weight_bytes(self._shape, loaded.setting.precision)
        each = history_bytes(self._shape, setting.limits, setting.kv) + loaded.session_bytes
        return weights + max(loaded.activation_bytes, loaded.decoding_bytes) + sessions * each + self._waiting(setting)

    def _waiting(self, setting: Setting) -> int:
        """Bytes of the latents that the open sessions hold before their ends, where they are decoded only then."""
        if setting.vae is not VaeMode.BATCH:
            return 0
        return sum(session.spec.chunks for session in self._sessions.values()) * latent_bytes(self._shape)

    def _refuse_beyond_limit(
        self, loaded: _Loaded, setting: Setting, *, sessions: int, opening: SessionSpec | None = None
    ) -> None:
        limit = loaded.spec.memory_limit_bytes
        needed = self._forecast(loaded, setting, sessions)
        if opening is not None and setting.vae is VaeMode.BATCH:
            needed += opening.chunks * latent_bytes(self._shape)
        if 0 < limit < needed:
            raise EngineError(
                f"memory: {sessions} sessions take {needed} bytes with this setting, the limit is {limit}",
                code="engine.out_of_memory",
                hint="a smaller window, or weights or kv of less precision",
            )

    def _end(self, session_id: str) -> None:
        """Forget a session, whatever state it is in."""
        session = self._sessions.pop(session_id)
        session.decoder.abandon()
        if self._loaded is not None:
            with suppress(EngineError):
                # Of a group whose rank died; the error that told so is on its way already.
                self._loaded.generator.close(session_id)

    def _require_loaded(self) -> _Loaded:
        if self._loaded is None:
            raise EngineError("the engine has nothing loaded", code="engine.not_loaded", hint="load first")
        return self._loaded

    def _require_session(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise EngineError(f"session {session_id}: is not open", code="engine.unknown_session")
        return session


def _is_resident(loaded: _Loaded, current: Setting, wanted: Setting) -> bool:
    """Whether weights as `wanted` needs them are there while `current` is in force."""
    return loaded.keeps_all or variant_of(wanted.precision) == variant_of(current.precision)


def _stop(generator: Generator | RankGroup) -> None:
    if isinstance(generator, RankGroup):
        generator.stop()


def _keeps_all(options: Mapping[str, str]) -> bool:
    for name, value in options.items():
        if name != RESIDENT or value not in ("all", "in_force"):
            raise EngineError(f"options.{name}: {value!r} is not known", hint=f"{RESIDENT}: all or in_force")
    return options.get(RESIDENT) == "all"


def _stored(setting: Setting, keeps_all: bool) -> tuple[LinearPrecision, ...]:
    """Precisions of which the weights are kept, the one in force first."""
    return (setting.precision, *_ALL_PRECISIONS) if keeps_all else (setting.precision,)


def _joined(frames: list[Tensor]) -> Tensor:
    return torch.cat(frames) if frames else torch.empty(0, SIZE, SIZE, 3, dtype=torch.uint8)
