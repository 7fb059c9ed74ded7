"""The typed reading of a configuration, and the one place that decides whether a layout can carry it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec.bit_allocation import FEWEST_BITS, MOST_BITS
from dataplanes.kvcodec.coders import CODERS, SPLITZIP, CalibratedCoder
from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.head_profile import NO_ARTEFACTS
from dataplanes.kvcodec.layout import KVLayout, Plane, PlaneRole
from dataplanes.kvcodec.native.library import has_calibrated_codec
from dataplanes.kvcodec.predictive.artefact import PredictiveArtefact, find_predictive
from dataplanes.numerics import absmax, hadamard
from dataplanes.numerics.nvfp4 import BlockRule

MAX_SINK_TOKENS = 1024
MAX_WINDOW_TOKENS = 1024


class Transform(enum.Enum):
    """First stage."""

    NONE = "none"
    HADAMARD = "hadamard"
    KLT = "klt"


class Quantise(enum.Enum):
    """Second stage: what decides the loss."""

    NONE = "none"
    LEVELS = "levels"
    FP8_E4M3 = "fp8_e4m3"
    NVFP4 = "nvfp4"
    UNIFORM = "uniform"
    """One step with a dead zone for the coefficients of the calibrated transform."""
    LAYER_LEVELS = "layer_levels"
    """Integer levels, fewer in the last layers."""
    HEAD_LEVELS = "head_levels"
    """Integer levels, fewer for the heads that matter least."""
    ALLOCATED_LEVELS = "allocated_levels"
    """Integer levels, a whole number of bits for each head by its importance."""
    ABSMAX_LEVELS = "absmax_levels"
    """Symmetric levels with one step for all heads of a token, fewer in the last layers."""
    LLOYD_MAX = "lloyd_max"
    """A Gaussian codebook and a scale per rotated head vector."""


SPLIT_FORMATS = frozenset({Quantise.LAYER_LEVELS, Quantise.HEAD_LEVELS, Quantise.ABSMAX_LEVELS})
"""Formats with two numbers of levels."""

PROFILED_FORMATS = frozenset({Quantise.HEAD_LEVELS, Quantise.ALLOCATED_LEVELS})
"""Formats that read a head profile."""

GROUPED_FORMATS = frozenset({Quantise.LEVELS, Quantise.LAYER_LEVELS, Quantise.HEAD_LEVELS, Quantise.ALLOCATED_LEVELS})
"""Formats with an axis and a group."""

COUNTED_FORMATS = (GROUPED_FORMATS | SPLIT_FORMATS | {Quantise.LLOYD_MAX}) - {Quantise.ALLOCATED_LEVELS}
"""Formats whose levels are a parameter."""


class Axis(enum.Enum):
    """What a group of integer levels spans: tokens of one channel, channels of one token within one head, or all
    channels that one token has in heads of as many levels."""

    CHANNEL = "channel"
    TOKEN = "token"
    ALL_HEADS = "all_heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsParameters:
    """Levels of keys (and latents) or of values.

    Args:
        levels: number of levels, 2..256; the higher of two. For absmax it counts CacheGen's bins, one of which is idle.
            0 where a profile decides.
        axis: what a group spans; None where the format leaves no choice.
        group: tokens per group on the channel axis; channels per group within a head on the token axis (a head
            shorter than that is one group); 0 on the axis of all heads and where there is no axis.
        low_levels: the lower of two; None where there is one.
        low_percent: share of the layers, or of all heads of all layers, that get `low_levels`.
        bits: mean bits that a profile hands out; None where it does not.
    """

    levels: int
    axis: Axis | None
    group: int
    low_levels: int | None = None
    low_percent: int = 0
    bits: float | None = None

    def channels_per_group(self, plane: Plane) -> int:
        """Off the channel axis: channels that share a scale."""
        return plane.heads * plane.head_dim if self.axis is Axis.ALL_HEADS else min(self.group, plane.head_dim)

    def share_of(self, count: int) -> int:
        """How many of `count` layers or heads are low: half a percent rounds up."""
        return (self.low_percent * count + 50) // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformParameters:
    """The layer-predictive transform codec.

    Args:
        artefact: calibrated for the model.
        step: of the quantiser, one that the artefact has tables for.
    """

    artefact: PredictiveArtefact
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecParameters:
    """A configuration that was checked against a layout.

    Args:
        transform: first stage.
        hadamard_seed: of its random signs.
        sink_tokens: tokens at the start of a request that are kept bit for bit, outside all groups. Attention leans on
            the first token far more than on any other, and its values are unlike theirs.
        window_tokens: tokens at the end of a request that are kept bit for bit; a sender says how long the request is.
        quantise: number format of all other tokens.
        key: levels of keys and latents, where the format has levels.
        value: levels of values.
        uniform: where `quantise` is `UNIFORM`.
        head_profile: id of the `HeadProfile` that decides which head gets what.
        bit_decay: by what a bit divides the quantiser's error, where a profile hands out bits.
        block_rule: where NVFP4 puts a block's peak; `PLAIN` where it is not named and in all other formats.
        code: name of the lossless coder.
    """

    transform: Transform
    hadamard_seed: int
    sink_tokens: int
    window_tokens: int
    quantise: Quantise
    key: LevelsParameters | None
    value: LevelsParameters | None
    uniform: UniformParameters | None
    head_profile: str | None
    bit_decay: float
    block_rule: BlockRule
    code: str

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        return self.quantise is Quantise.NONE

    def levels_of(self, plane: Plane) -> LevelsParameters:
        """The level parameters that apply to a plane; only where the format has levels."""
        found = self.value if plane.role is PlaneRole.VALUE else self.key
        assert found is not None
        return found

    @property
    def group_tokens(self) -> int:
        """Chunks that start at multiples of this decode to the same bytes however a transfer is cut."""
        return lcm(*(part.group for part in (self.key, self.value) if part and part.axis is Axis.CHANNEL))


def parse_parameters(
    configuration: Configuration, layout: KVLayout, artefacts: Mapping[str, object] = NO_ARTEFACTS
) -> CodecParameters:
    """Read and check a configuration.

    Args:
        configuration: what to read.
        layout: what it must fit.
        artefacts: where those that it names are looked up.

    Raises:
        CodecError: a parameter is unknown, missing, inactive, of the wrong type or out of range, or does not fit
            the layout; or an artefact is not here.
    """
    reader = _Reader(configuration)
    quantise = Quantise(reader.choice("quantise", [member.value for member in Quantise]))
    transform = Transform(reader.choice("transform", [member.value for member in Transform]))
    code = reader.choice("code", list(CODERS))
    seed = hadamard.DEFAULT_SEED
    if transform is Transform.HADAMARD and "hadamard_seed" in configuration:
        seed = reader.integer("hadamard_seed", 0, 2**63 - 1)
    sink_tokens = window_tokens = 0
    if quantise not in (Quantise.NONE, Quantise.UNIFORM):
        if "sink_tokens" in configuration:
            sink_tokens = reader.integer("sink_tokens", 0, MAX_SINK_TOKENS)
        if "window_tokens" in configuration:
            window_tokens = reader.integer("window_tokens", 0, MAX_WINDOW_TOKENS)
    key = value = None
    if quantise in GROUPED_FORMATS | COUNTED_FORMATS:
        if layout.roles & {PlaneRole.KEY, PlaneRole.LATENT}:
            key = _levels(reader, "key", layout, {PlaneRole.KEY, PlaneRole.LATENT}, quantise)
        if PlaneRole.VALUE in layout.roles:
            value = _levels(reader, "value", layout, {PlaneRole.VALUE}, quantise)
    uniform = _uniform(reader, layout, artefacts) if quantise is Quantise.UNIFORM else None
    head_profile = reader.text("head_profile") if quantise in PROFILED_FORMATS else None
    bit_decay = reader.number("bit_decay", 1.01, 64) if quantise is Quantise.ALLOCATED_LEVELS else 0.0
    block_rule = BlockRule.PLAIN
    if quantise is Quantise.NVFP4 and "block_rule" in configuration:
        block_rule = BlockRule(reader.choice("block_rule", [member.value for member in BlockRule]))
    reader.finish()
    if (quantise is Quantise.UNIFORM) != (transform is Transform.KLT):
        raise _invalid("transform", "the calibrated transform and the uniform step go together")
    if (quantise is Quantise.UNIFORM) != (code == CalibratedCoder.name):
        raise _invalid("code", "calibrated tables and the uniform step go together")
    if quantise is Quantise.NONE and transform is not Transform.NONE:
        raise _invalid("transform", "a transform without quantisation would lose bits for nothing")
    if quantise is Quantise.LLOYD_MAX and transform is Transform.NONE:
        raise _invalid("transform", "a Gaussian codebook is for rotated vectors")
    if code == "bitpack" and quantise in (Quantise.NONE, Quantise.FP8_E4M3):
        raise _invalid("code", "whole bytes cannot be bit-packed")
    if code == SPLITZIP and quantise not in (Quantise.NONE, Quantise.FP8_E4M3):
        raise _invalid("code", "SplitZip codes exponents, which integer symbols do not have")
    return CodecParameters(
        transform=transform,
        hadamard_seed=seed,
        sink_tokens=sink_tokens,
        window_tokens=window_tokens,
        quantise=quantise,
        key=key,
        value=value,
        uniform=uniform,
        head_profile=head_profile,
        bit_decay=bit_decay,
        block_rule=block_rule,
        code=code,
    )


def _levels(
    reader: _Reader, part: str, layout: KVLayout, roles: set[PlaneRole], quantise: Quantise
) -> LevelsParameters:
    levels, low_levels, low_percent, bits = 0, None, 0, None
    fewest = absmax.SMALLEST_BINS if quantise is Quantise.ABSMAX_LEVELS else 2
    if quantise is Quantise.ALLOCATED_LEVELS:
        bits = reader.number(f"{part}_bits", FEWEST_BITS, MOST_BITS)
    else:
        levels = reader.integer(f"{part}_levels", fewest, 256)
    if quantise in SPLIT_FORMATS:
        low_levels = reader.integer(f"{part}_low_levels", fewest, 256)
        if low_levels > levels:
            raise _invalid(f"{part}_low_levels", f"{low_levels} levels are more than {levels}")
        low_percent = reader.integer(f"{part}_low_percent", 1, 99)
    axis, group = _grouping(reader, part, layout, roles) if quantise in GROUPED_FORMATS else (None, 0)
    return LevelsParameters(
        levels=levels, axis=axis, group=group, low_levels=low_levels, low_percent=low_percent, bits=bits
    )


def _grouping(reader: _Reader, part: str, layout: KVLayout, roles: set[PlaneRole]) -> tuple[Axis, int]:
    axis = Axis(reader.choice(f"{part}_axis", [member.value for member in Axis]))
    if axis is Axis.ALL_HEADS:
        return axis, 0
    group = reader.integer(f"{part}_group", 1, 4096)
    if axis is Axis.CHANNEL:
        if group % layout.page_tokens and layout.page_tokens % group:
            raise _invalid(f"{part}_group", f"{group} tokens neither divide nor fill pages of {layout.page_tokens}")
    else:
        for plane in layout.planes:
            if plane.role in roles and plane.head_dim % min(group, plane.head_dim):
                raise _invalid(f"{part}_group", f"{group} channels do not divide a head of {plane.head_dim}")
    return axis, group


def _uniform(reader: _Reader, layout: KVLayout, artefacts: Mapping[str, object]) -> UniformParameters:
    if not has_calibrated_codec():
        raise _invalid("transform", "the calibrated transform runs in native kernels, which cannot be built here")
    artefact = find_predictive(artefacts, reader.text("artefact"))
    misfit = artefact.fits(layout)
    if misfit:
        raise _invalid("artefact", f"made for another model: {misfit}")
    step = reader.number("step", 0.0, 1e6)
    if step not in artefact.steps:
        raise _invalid("step", f"{step} is none of {list(artefact.steps)}")
    return UniformParameters(artefact=artefact, step=step)


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

    def number(self, name: str, low: float, high: float) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not low <= float(value) <= high:
            raise _invalid(name, f"{value!r} is not a number in {low}..{high}")
        return float(value)

    def text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise _invalid(name, f"{value!r} is no text")
        return value

    def finish(self) -> None:
        for name in self._left:
            raise _invalid(name, "unknown, or inactive here")

    def _take(self, name: str) -> Value:
        if name not in self._left:
            raise _invalid(name, "is missing")
        return self._left.pop(name)
