"""The typed reading of a configuration, and the one place that decides whether a layout can carry it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import lcm

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec.coders import CODERS, SPLITZIP
from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.layout import KVLayout, Plane, PlaneRole
from dataplanes.numerics import hadamard

MAX_SINK_TOKENS = 1024


class Transform(enum.Enum):
    """First stage."""

    NONE = "none"
    HADAMARD = "hadamard"


class Quantise(enum.Enum):
    """Second stage: what decides the loss."""

    NONE = "none"
    LEVELS = "levels"
    FP8_E4M3 = "fp8_e4m3"
    NVFP4 = "nvfp4"


class Axis(enum.Enum):
    """What a group of integer levels spans: tokens of one channel, or channels of one token."""

    CHANNEL = "channel"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsParameters:
    """Integer levels of keys (and latents) or of values.

    Args:
        levels: number of levels, 2..256.
        axis: what a group spans.
        group: tokens per group on the channel axis; channels per group within a head on the token axis (a head
            shorter than that is one group).
    """

    levels: int
    axis: Axis
    group: int

    def channels_per_group(self, head_dim: int) -> int:
        """On the token axis: channels that share a scale."""
        return min(self.group, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecParameters:
    """A configuration that was checked against a layout.

    Args:
        transform: first stage.
        hadamard_seed: of its random signs.
        sink_tokens: tokens at the start of a request that are kept bit for bit, outside all groups. Attention leans on
            the first token far more than on any other, and its values are unlike theirs.
        quantise: number format of all other tokens.
        key: levels of keys and latents, where `quantise` is `LEVELS`.
        value: levels of values.
        code: name of the lossless coder.
    """

    transform: Transform
    hadamard_seed: int
    sink_tokens: int
    quantise: Quantise
    key: LevelsParameters | None
    value: LevelsParameters | None
    code: str

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        return self.quantise is Quantise.NONE

    def levels_of(self, plane: Plane) -> LevelsParameters:
        """The level parameters that apply to a plane; only where `quantise` is `LEVELS`."""
        found = self.value if plane.role is PlaneRole.VALUE else self.key
        assert found is not None
        return found

    @property
    def group_tokens(self) -> int:
        """Chunks that start at multiples of this decode to the same bytes however a transfer is cut."""
        return lcm(*(part.group for part in (self.key, self.value) if part and part.axis is Axis.CHANNEL))


def parse_parameters(configuration: Configuration, layout: KVLayout) -> CodecParameters:
    """Read and check a configuration.

    Raises:
        CodecError: a parameter is unknown, missing, inactive, of the wrong type or out of range, or does not fit
            the layout.
    """
    reader = _Reader(configuration)
    quantise = Quantise(reader.choice("quantise", [member.value for member in Quantise]))
    transform = Transform(reader.choice("transform", [member.value for member in Transform]))
    code = reader.choice("code", list(CODERS))
    seed = hadamard.DEFAULT_SEED
    if transform is Transform.HADAMARD and "hadamard_seed" in configuration:
        seed = reader.integer("hadamard_seed", 0, 2**63 - 1)
    sink_tokens = 0
    if quantise is not Quantise.NONE and "sink_tokens" in configuration:
        sink_tokens = reader.integer("sink_tokens", 0, MAX_SINK_TOKENS)
    key = value = None
    if quantise is Quantise.LEVELS:
        if layout.roles & {PlaneRole.KEY, PlaneRole.LATENT}:
            key = _levels(reader, "key", layout, {PlaneRole.KEY, PlaneRole.LATENT})
        if PlaneRole.VALUE in layout.roles:
            value = _levels(reader, "value", layout, {PlaneRole.VALUE})
    reader.finish()
    if quantise is Quantise.NONE and transform is not Transform.NONE:
        raise _invalid("transform", "a transform without quantisation would lose bits for nothing")
    if code == "bitpack" and quantise in (Quantise.NONE, Quantise.FP8_E4M3):
        raise _invalid("code", "whole bytes cannot be bit-packed")
    if code == SPLITZIP and quantise not in (Quantise.NONE, Quantise.FP8_E4M3):
        raise _invalid("code", "SplitZip codes exponents, which integer symbols do not have")
    return CodecParameters(
        transform=transform,
        hadamard_seed=seed,
        sink_tokens=sink_tokens,
        quantise=quantise,
        key=key,
        value=value,
        code=code,
    )


def _levels(reader: _Reader, part: str, layout: KVLayout, roles: set[PlaneRole]) -> LevelsParameters:
    levels = reader.integer(f"{part}_levels", 2, 256)
    axis = Axis(reader.choice(f"{part}_axis", [member.value for member in Axis]))
    group = reader.integer(f"{part}_group", 1, 4096)
    if axis is Axis.CHANNEL:
        if group % layout.page_tokens and layout.page_tokens % group:
            raise _invalid(f"{part}_group", f"{group} tokens neither divide nor fill pages of {layout.page_tokens}")
    else:
        for plane in layout.planes:
            if plane.role in roles and plane.head_dim % min(group, plane.head_dim):
                raise _invalid(f"{part}_group", f"{group} channels do not divide a head of {plane.head_dim}")
    return LevelsParameters(levels=levels, axis=axis, group=group)


def _invalid(name: str, problem: str) -> CodecError:
    return CodecError(f"configuration.{name}: {problem}", code="codec.configuration")


class _Reader:
    """Takes parameters out one by one; what is left at the end was not expected."""

    def __init__(self, configuration: Configuration) -> None:
        self._left: dict[str, Value] = dict(configuration)

    def choice(self, name: str, allowed: list[str]) -> str:
        value = self._take(name)
        if not isinstance(value, str) or value not in allowed:
            raise _invalid(name, f"{value!r} is none of {allowed}")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise _invalid(name, f"{value!r} is not an integer in {low}..{high}")
        return value

    def finish(self) -> None:
        for name in self._left:
            raise _invalid(name, "unknown, or inactive here")

    def _take(self, name: str) -> Value:
        if name not in self._left:
            raise _invalid(name, "is missing")
        return self._left.pop(name)
