"""What calibration leaves behind for one model: means, predictors, bases and coder tables, named by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.layout import KVLayout, PlaneRole
from dataplanes.kvcodec.predictive.place import ORDINARY
from dataplanes.kvcodec.predictive.predictor import largest_factor
from dataplanes.kvcodec.predictive.tables import CLASSES, PROBABILITY_TOTAL, TABLE_SYMBOLS

FORMAT: Final = 2
GRANULE: Final = 32
"""Widths, ranks and bottlenecks are multiples of this: columns of a panel of weights."""

FILE_SUFFIX: Final = ".safetensors"
MOST_DEPTH: Final = 8
"""The most layers that a prediction may see."""

_ID_DIGITS: Final = 16
METADATA_KEY: Final = "controld"


class ArtefactError(CodecError):
    """An artefact is damaged, foreign or of another format."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding with its two halves paired (as in Llama, Qwen and most others).

    Args:
        theta: base of the angles.
        dim: leading elements of each key head that are rotated.
    """

    theta: float
    dim: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictiveArtefact:
    """Calibrated data: L layers, joint vectors of width W, P layers to predict from, bottleneck B, S steps.

    Position classes (C of them) are those of `place`: first token, next three, ordinary ones, bands at the end.

    Args:
        model_fingerprint: of the model whose KV was calibrated on.
        texts: names and hashes of the texts.
        layers, heads, key_dim, value_dim: shape of the model's KV.
        rotary: how keys are rotated.
        steps: the quantiser steps that coder tables exist for, ascending.
        bands: sizes of the bands at a request's end, in tokens, descending.
        refinements: by position class, how much finer the step is there.
        dead_zone: added before rounding down; 0.5 is plain rounding.
        shrink: how much nearer to zero a symbol is reconstructed, in steps.
        mean: float32 `[C, L, W]`, by position class.
        gain: float32 `[L, W]`: a decoded layer less its mean, times this, rounded and kept within `largest`, is what
            predictions see.
        narrow, narrow_scale: int16 `[L, P, W, B]`, oldest layer first, and float32 `[L, B]`: sums of products, times
            the scale, rounded and kept within `largest`, are the bottleneck.
        widen, widen_scale: int16 `[L, B, W]` and float32 `[L, W]`: sums of products with the bottleneck, times the
            scale, are the prediction.
        analysis, synthesis: bfloat16 `[L, W, R]` and `[L, R, W]`.
        classes: uint8 `[S, C, L, R]`: the coder table of each coefficient.
        ranks: int32 `[S, C, L]`: coefficients that are coded at all.
        frequencies: int32 `[classes, 256]`: of each table's symbols, summing to 2**12; zero beyond its symbols.

    Raises:
        ArtefactError: shapes, dtypes or values do not fit together.
    """

    model_fingerprint: str
    texts: tuple[str, ...]
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    rotary: Rotary
    steps: tuple[float, ...]
    bands: tuple[int, ...]
    refinements: tuple[float, ...]
    dead_zone: float
    shrink: float
    mean: Tensor
    gain: Tensor
    narrow: Tensor
    narrow_scale: Tensor
    widen: Tensor
    widen_scale: Tensor
    analysis: Tensor
    synthesis: Tensor
    classes: Tensor
    ranks: Tensor
    frequencies: Tensor

    def __post_init__(self) -> None:
        width, rank, bottleneck = self.width, self.analysis.shape[-1], self.widen.shape[1]
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "mean": ((self.position_classes, self.layers, width), torch.float32),
            "gain": ((self.layers, width), torch.float32),
            "narrow": ((self.layers, self.depth, width, bottleneck), torch.int16),
            "narrow_scale": ((self.layers, bottleneck), torch.float32),
            "widen": ((self.layers, bottleneck, width), torch.int16),
            "widen_scale": ((self.layers, width), torch.float32),
            "analysis": ((self.layers, width, rank), torch.bfloat16),
            "synthesis": ((self.layers, rank, width), torch.bfloat16),
            "classes": ((len(self.steps), self.position_classes, self.layers, rank), torch.uint8),
            "ranks": ((len(self.steps), self.position_classes, self.layers), torch.int32),
            "frequencies": ((CLASSES, TABLE_SYMBOLS), torch.int32),
        }
        for name, (shape, dtype) in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
                raise _invalid(name, f"{tensor.dtype} {tuple(tensor.shape)} where {dtype} {shape} belongs")
            if dtype.is_floating_point and not bool(tensor.isfinite().all()):
                raise _invalid(name, "not finite")
        if any(int(x.abs().max()) > self.largest for x in (self.narrow, self.widen) if x.numel()):
            raise _invalid("narrow", f"integers beyond {self.largest:.0f}")
        if self.depth > MOST_DEPTH:
            raise _invalid("narrow", f"{self.depth} layers to predict from, at most {MOST_DEPTH}")
        if rank % GRANULE or bottleneck % GRANULE:
            raise _invalid("analysis", f"rank {rank} or bottleneck {bottleneck} is no multiple of {GRANULE}")
        if list(self.steps) != sorted(set(self.steps)) or not self.steps or not self.steps[0] > 0:
            raise _invalid("steps", "positive and ascending, at least one")
        if int(self.classes.max()) >= CLASSES:
            raise _invalid("classes", f"a table beyond the {CLASSES}")
        if bool((self.ranks % GRANULE).any()) or int(self.ranks.min()) < 0 or int(self.ranks.max()) > rank:
            raise _invalid("ranks", f"multiples of {GRANULE} up to {rank}")
        if not bool((self.frequencies.sum(1) == PROBABILITY_TOTAL).all()) or int(self.frequencies.min()) < 0:
            raise _invalid("frequencies", f"a table does not sum to {PROBABILITY_TOTAL}")
        if self.rotary.dim % 2 or not 0 <= self.rotary.dim <= self.key_dim:
            raise _invalid("rotary", f"{self.rotary.dim} of {self.key_dim} elements")
        if not (0 < self.dead_zone <= 0.5 and 0 <= self.shrink < 0.5):
            raise _invalid("dead_zone", "quantiser constants out of range")
        if len(self.refinements) != self.position_classes or not all(factor >= 1 for factor in self.refinements):
            raise _invalid("refinements", f"{self.position_classes} factors of at least 1")
        if list(self.bands) != sorted(set(self.bands), reverse=True) or not all(band > 0 for band in self.bands):
            raise _invalid("bands", "positive and descending")

    @property
    def width(self) -> int:
        """Elements of a joint vector, padded to a multiple of 32."""
        return -(-self.heads * (self.key_dim + self.value_dim) // GRANULE) * GRANULE

    @property
    def position_classes(self) -> int:
        """How many classes of positions there are."""
        return ORDINARY + 1 + len(self.bands)

    @property
    def depth(self) -> int:
        """Previous layers that a prediction sees."""
        return int(self.narrow.shape[1])

    @property
    def largest(self) -> float:
        """Of the integers of predictions: sums of their products fit into 32 bits."""
        return largest_factor(max(self.depth * self.width, self.widen.shape[1]))

    @cached_property
    def artefact_id(self) -> str:
        """First 16 hex digits of the SHA-256 of everything in it: what configurations and frames name."""
        digest = hashlib.sha256(_canonical(self._description()))
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:_ID_DIGITS]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def fits(self, layout: KVLayout) -> str:
        """Why the layout is not this artefact's; empty where it is."""
        roles = {role: [p for p in layout.planes if p.role is role] for role in PlaneRole}
        if roles[PlaneRole.LATENT]:
            return "latent planes have no keys and values to join"
        wanted = {PlaneRole.KEY: self.key_dim, PlaneRole.VALUE: self.value_dim}
        for role, head_dim in wanted.items():
            shapes = {(plane.heads, plane.head_dim) for plane in roles[role]}
            if len(roles[role]) != self.layers or shapes != {(self.heads, head_dim)}:
                return f"{len(roles[role])} {role.value} planes of {sorted(shapes)}, not {self.layers} of {self.heads}"
        return ""

    def save(self, folder: Path) -> Path:
        """Write `<folder>/<id>.safetensors`, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{self.artefact_id}{FILE_SUFFIX}"
        unfinished = target.with_suffix(".partial")
        save_file(self._tensors(), unfinished, metadata={METADATA_KEY: _canonical(self._description()).decode()})
        unfinished.replace(target)
        return target

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> PredictiveArtefact:
        """What `save` wrote, from anywhere.

        Args:
            source: where it comes from, for messages.

        Raises:
            ArtefactError: damaged, or of another format.
        """
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            parameters = _described(json.loads(header["__metadata__"][METADATA_KEY])) | load(content)
            return cls(**parameters)
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArtefactError(f"{source} is no codec artefact: {error!r}", code="codec.artefact_damaged") from error

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.contiguous() for name, value in tensors.items() if isinstance(value, Tensor)}

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model_fingerprint": self.model_fingerprint,
            "texts": list(self.texts),
            "layers": self.layers,
            "heads": self.heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "rotary_theta": self.rotary.theta,
            "rotary_dim": self.rotary.dim,
            "steps": list(self.steps),
            "bands": list(self.bands),
            "refinements": list(self.refinements),
            "dead_zone": self.dead_zone,
            "shrink": self.shrink,
        }


def find_predictive(artefacts: Mapping[str, object], artefact_id: str) -> PredictiveArtefact:
    """The artefact that a configuration names.

    Raises:
        CodecError: it is not there, or is something else.
    """
    artefact = artefacts.get(artefact_id)
    if not isinstance(artefact, PredictiveArtefact):
        raise CodecError(
            f"the artefact {artefact_id} is not here",
            code="codec.artefact_unknown",
            hint="calibrate the model, or copy the artefact to this machine",
        )
    return artefact


def _described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    described = dict(metadata)
    if described.pop("format") != FORMAT:
        raise ValueError("another format version")
    described["rotary"] = Rotary(described.pop("rotary_theta"), described.pop("rotary_dim"))
    for name in ("texts", "steps", "bands", "refinements"):
        described[name] = tuple(described[name])
    return described


def _canonical(description: Mapping[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def _invalid(name: str, problem: str) -> ArtefactError:
    return ArtefactError(f"artefact.{name}: {problem}", code="codec.artefact_invalid")
