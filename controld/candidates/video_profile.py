"""A video engine's setting with what is known of it: measured on this engine, or published by others; never mixed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from controld.candidates.document import fields_of, read_json_object
from controld.candidates.statistics import upper_bound_95
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import (
    LEAST_ENGINE_SECONDS,
    MAX_CLIP_LOSS,
    MAX_ENGINE_BYTES,
    MAX_ENGINE_SECONDS,
    MAX_FRAMES,
)

_FORMAT = 1
KIND = "video"
"""`kind` of the documents; a KV profile's has none."""

STEPS = "steps"
"""The parameter that every video engine has: denoising steps of a chunk."""

MAX_STEPS = 1024

_TEXTS = ("workload", "model_fingerprint", "hardware", "provenance")
_OPTIONAL = ("loss_mean", "drift", "motion")
_MAX_TEXT = 1024
_MAX_CONFIGURATION = 4096


def _check_text(field: str, text: str) -> None:
    if type(text) is not str or len(text) > _MAX_TEXT or not text.isprintable():
        raise FieldError(field, f"is no printable text of at most {_MAX_TEXT} characters")


class Source(StrEnum):
    """Where a profile's numbers come from."""

    MEASURED = "measured"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoMemory:
    """Device memory in bytes: weights once, a KV window for each session, and the activations of one step.

    `session_bytes` is what each session beyond the first holds beside its KV, such as a decoder's state; the first
    one's is in the activations.
    """

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    session_bytes: int = 0

    def total(self, sessions: int) -> int:
        """Of an engine with so many sessions."""
        each = self.kv_bytes + self.session_bytes
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + (sessions - 1) * each


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoProfile:
    """A setting.

    Args:
        workload, model_fingerprint, hardware: what it was measured with.
        forward_s: seconds of one forward pass over a chunk; a chunk of S steps takes S + 1 of them.
        vae_s: seconds of decoding a chunk.
        frames_per_chunk: pixel frames.
        loss_mean: by how much the error rises against the reference setting, mean over segments: the reference engine's
            is the complement of Dice's coefficient with the nearest valid frame. None: never measured.
            Of a published profile in the publication's own unit, named in `provenance`.
        loss_se, loss_samples: standard error over segments, and how many there were.
        memory: None: not known.
        drift: of latents from the sink's at the end of a clip, in the sink's deviations; None: not measured.
        motion: mean absolute difference of neighbouring frames (published: dynamic degree); None: not measured.
        provenance: study and trial, or the publication.

    Raises:
        FieldError: a number is out of range; the field is named.
    """

    configuration: Configuration
    source: Source
    forward_s: float
    vae_s: float
    frames_per_chunk: int
    workload: str = ""
    model_fingerprint: str = ""
    hardware: str = ""
    loss_mean: float | None = None
    loss_se: float = 0.0
    loss_samples: int = 0
    memory: VideoMemory | None = None
    drift: float | None = None
    motion: float | None = None
    measured_unix_s: float = 0.0
    provenance: str = ""

    def __post_init__(self) -> None:
        steps = self.configuration.get(STEPS)
        if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
            raise FieldError("video_profile.configuration.steps", f"{steps!s:.40} is not in 1..{MAX_STEPS}")
        if len(self.configuration.canonical_json) > _MAX_CONFIGURATION:
            raise FieldError("video_profile.configuration", f"is longer than {_MAX_CONFIGURATION} characters")
        for name in _TEXTS:
            _check_text(f"video_profile.{name}", getattr(self, name))
        for name, value in self.configuration.items():
            if isinstance(value, str):
                _check_text(f"video_profile.configuration.{name}", value)
        for name, low, high in (
            ("forward_s", LEAST_ENGINE_SECONDS, MAX_ENGINE_SECONDS),
            ("vae_s", 0.0, MAX_ENGINE_SECONDS),
            ("loss_mean", -MAX_CLIP_LOSS, MAX_CLIP_LOSS),
            ("loss_se", 0.0, MAX_CLIP_LOSS),
            ("drift", 0.0, MAX_CLIP_LOSS),
            ("motion", 0.0, MAX_CLIP_LOSS),
            ("measured_unix_s", 0.0, 253_402_300_799.0),
        ):
            self._check_number(name, low, high, (int, float))
        for name in ("frames_per_chunk", "loss_samples"):
            self._check_number(name, 1 if name == "frames_per_chunk" else 0, MAX_FRAMES, (int,))
        for name, size in asdict(self.memory).items() if self.memory is not None else ():
            if type(size) is not int or not 0 <= size <= MAX_ENGINE_BYTES:
                raise FieldError(f"video_profile.memory.{name}", f"{size!s:.40} is not a size in bytes")

    def _check_number(self, name: str, low: float, high: float, kinds: tuple[type, ...]) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        # A truth value is no number, and NaN is in no range.
        if type(value) not in kinds or not low <= value <= high:
            what = "whole number" if kinds == (int,) else "number"
            raise FieldError(f"video_profile.{name}", f"{value!s:.40} is no {what} in {low:g}..{high:g}")

    @property
    def setting_id(self) -> str:
        """Id of the configuration."""
        return self.configuration.config_id

    @property
    def steps(self) -> int:
        """Denoising steps of a chunk."""
        return int(self.configuration[STEPS])

    @property
    def loss_upper(self) -> float:
        """One-sided 95 % upper bound of the loss; infinite where it was not measured.

        A publication gives no standard error, so its mean stands for it.
        """
        if self.loss_mean is None:
            return math.inf
        if self.source is Source.PUBLISHED:
            return self.loss_mean
        return upper_bound_95(self.loss_mean, self.loss_se, self.loss_samples)

    def to_document(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {**asdict(self), "kind": KIND, "format": _FORMAT, "configuration": dict(self.configuration)}

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> VideoProfile:
        """Raises: FieldError: another kind or format, a missing, unknown or impossible field."""
        values = dict(document)
        if values.pop("kind", None) != KIND or values.pop("format", None) != _FORMAT:
            raise FieldError("video_profile.format", f"is not {KIND} {_FORMAT}")
        with fields_of("video_profile"):
            memory = values.pop("memory", None)
            return cls(
                **{
                    **values,
                    "configuration": Configuration(values["configuration"]),
                    "source": Source(values["source"]),
                    "memory": None if memory is None else VideoMemory(**memory),
                }
            )

    @classmethod
    def from_json(cls, text: str) -> VideoProfile:
        """Parse what `to_json` wrote. Raises: FieldError."""
        return cls.from_document(read_json_object(text, "video_profile"))


def is_video_document(text: str) -> bool:
    """Whether a stored profile is a video engine's."""
    # Documents are canonical JSON, so no KV profile's text can hold this outside of a string.
    return f'"kind":"{KIND}"' in text
