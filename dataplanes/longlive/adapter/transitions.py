"""How far a change of setting reaches, and what it takes: as measured before, else an estimate that is called one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from controld.contract.configuration import Value
from controld.contract.video import Transition, TransitionPlan
from dataplanes.longlive import settings as names
from dataplanes.longlive.adapter.deployment import Deployment, Format
from dataplanes.longlive.adapter.hardware import Hardware
from dataplanes.longlive.adapter.offer import Offer, Route, route_of

# Wan2.2-TI2V-5B, the only model that LongLive 2.0 takes.
_LAYERS: Final = 30
_HEADS: Final = 24
_HEAD_DIM: Final = 128
_BF16_BYTES: Final = 2.0
_NVFP4_BYTES: Final = 0.5625
"""Of a value: four bits, and a byte of scale for sixteen."""

# Estimates, for as long as nothing was measured: published figures and plain guesses, all in seconds.
_NEXT_CALL_S: Final = 0.5
_FORWARD_S: Final = 0.22
"""32 frames at 29.7 a second are five forward passes (LongLive 2.0, table 3)."""
_READ_BYTES_PER_S: Final = 1e9
_RESTART_S: Final = 120.0

Setting = Mapping[str, Value]
Kind = tuple[Transition, tuple[str, ...]]


def changed(current: Setting, wanted: Setting) -> tuple[str, ...]:
    """Names of the parameters that differ."""
    return tuple(sorted(name for name in {*current, *wanted} if current.get(name) != wanted.get(name)))


def kv_bytes(deployment: Deployment, setting: Setting) -> int:
    """The key and value cache of one clip at a setting, scales included."""
    _, _, _, height, width = deployment.run.image_or_video_shape
    tokens = int(setting[names.WINDOW]) * (height * width // 4)
    each = _NVFP4_BYTES if setting[names.KV] == "nvfp4" else _BF16_BYTES
    return round(2 * _LAYERS * tokens * _HEADS * _HEAD_DIM * each)


class Transitions:
    """Plans changes and remembers what they took.

    Args:
        deployment, hardware, offer: what can be run.
    """

    def __init__(self, deployment: Deployment, hardware: Hardware, offer: Offer) -> None:
        self._deployment = deployment
        self._hardware = hardware
        self._offer = offer
        self._measured_s: dict[Kind, float] = {}

    def plan(self, current: Setting, wanted: Setting, *, held_bytes: int) -> TransitionPlan:
        """What the change would take; `held_bytes`: device memory in use now."""
        kind = self._kind(current, wanted)
        reach = kind[0]
        measured = self._measured_s.get(kind)
        return TransitionPlan(
            transition=reach,
            seconds=self._estimate_s(reach, wanted) if measured is None else measured,
            peak_bytes=held_bytes + self._more_bytes(reach, current, wanted),
            keeps_kv=not self.rebuilds_cache(current, wanted) and reach is not Transition.RESTART,
            is_measured=measured is not None,
        )

    def learn(self, current: Setting, wanted: Setting, seconds: float) -> None:
        """Remember what a change took."""
        self._measured_s[self._kind(current, wanted)] = seconds

    def rebuilds_cache(self, current: Setting, wanted: Setting) -> bool:
        """Whether the cache is made anew."""
        return any(self._reach(name, current, wanted) is Transition.KV_REBUILD for name in changed(current, wanted))

    def _kind(self, current: Setting, wanted: Setting) -> Kind:
        names_changed = changed(current, wanted)
        reach = max((self._reach(name, current, wanted) for name in names_changed), default=Transition.NONE)
        return reach, tuple(name for name in names_changed if self._reach(name, current, wanted) is reach)

    def _reach(self, name: str, current: Setting, wanted: Setting) -> Transition:
        if name == names.STEPS:
            same = self._route(current).checkpoint == self._route(wanted).checkpoint
            return Transition.CHUNK if same else Transition.RELOAD
        return self._offer.transitions[name]

    def _route(self, setting: Setting) -> Route:
        return route_of(self._deployment, self._hardware, setting)

    def _estimate_s(self, reach: Transition, wanted: Setting) -> float:
        if reach in (Transition.NONE, Transition.CHUNK):
            return 0.0
        chunks = int(wanted[names.WINDOW]) // self._deployment.run.num_frame_per_block
        rebuild = _NEXT_CALL_S + (chunks - 1) * _FORWARD_S
        reload_s = rebuild + self._route(wanted).checkpoint.file_bytes / _READ_BYTES_PER_S
        return {
            Transition.NEXT_CALL: _NEXT_CALL_S,
            Transition.KV_REBUILD: rebuild,
            Transition.RELOAD: reload_s,
            Transition.RESTART: _RESTART_S + reload_s,
        }[reach]

    def _more_bytes(self, reach: Transition, current: Setting, wanted: Setting) -> int:
        """Beyond what is held now. Old weights and caches are freed before new ones are made."""
        more = 0
        if reach in (Transition.KV_REBUILD, Transition.RELOAD, Transition.RESTART):
            # LongLive makes the caches of guidance, too; they are dropped as soon as they are there.
            more += max(0, 2 * kv_bytes(self._deployment, wanted) - kv_bytes(self._deployment, current))
        if reach in (Transition.RELOAD, Transition.RESTART):
            now, then = self._route(current), self._route(wanted)
            # While it is quantised the generator is there in bf16.
            quantised = 0 if then.backend == "torch" or then.checkpoint.format is Format.FOUROVERSIX else 1
            more += max(0, then.checkpoint.file_bytes * (1 + quantised) - now.checkpoint.file_bytes)
        return more
