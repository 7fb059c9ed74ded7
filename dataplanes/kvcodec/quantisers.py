"""The quantise stage over one stack of planes: symbols and side data, and back.

A stack is `[planes, tokens, heads, head_dim]`. Side data are flat bytes; 16-bit scales are two such arrays, low bytes
and high bytes, because only the high ones are predictable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.kvcodec.layout import Plane, flat_bytes
from dataplanes.kvcodec.parameters import Axis, CodecParameters, LevelsParameters, Quantise
from dataplanes.numerics import absmax, fp8, levels, lloyd_max, nvfp4
from dataplanes.numerics.bounds import absmax_bound, fp8_bound, levels_bound, lloyd_max_bound, nvfp4_bound


@dataclass(frozen=True, slots=True)
class QuantisedStack:
    """Symbols `[planes, tokens, heads, head_dim]` and flat side arrays, all uint8."""

    symbols: Tensor
    side: tuple[Tensor, ...]


class StackQuantiser(ABC):
    """One number format over one stack. `tokens` is at least 1 everywhere."""

    symbol_levels: int

    @abstractmethod
    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """Quantise float32 `x`, whose magnitudes are below 2**96."""

    @abstractmethod
    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """float32 values of the symbols' shape."""

    @abstractmethod
    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """Largest error of each element of float32 `x`, before any inverse transform and final rounding."""

    @abstractmethod
    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """Bytes of each side array."""


class ChannelLevels(StackQuantiser):
    """Integer levels; a group is one channel over the tokens of one span of positions.

    A chunk that starts or ends inside a span has a smaller group there. The span is completed by repeating the
    nearest token, which leaves minimum and maximum alone.
    """

    def __init__(self, plane: Plane, parameters: LevelsParameters) -> None:
        self._plane = plane
        self._group = parameters.group
        self.symbol_levels = parameters.levels

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        grouped = self._grouped(x, first_token)
        symbols, step, offset = levels.quantise(grouped, self.symbol_levels, dim=2)
        return QuantisedStack(self._ungrouped(symbols, x, first_token), (*split_bytes(step), *split_bytes(offset)))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        grouped = self._grouped(x, first_token)
        bound = levels_bound(grouped, self.symbol_levels, dim=2)
        return self._ungrouped(bound.expand(grouped.shape), x, first_token)

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        symbols = quantised.symbols
        planes, tokens = symbols.shape[:2]
        before, after = self._missing(tokens, first_token)
        if before or after:
            symbols = torch.nn.functional.pad(symbols, (0, 0, 0, 0, before, after))
        shape = (planes, -1, 1, self._channels)
        step = join_bytes(quantised.side[:2], torch.bfloat16).view(shape)
        offset = join_bytes(quantised.side[2:], torch.int16).view(shape)
        grouped = symbols.reshape(planes, -1, self._group, self._channels)
        return self._ungrouped(levels.dequantise(grouped, step, offset), symbols[:, :tokens], first_token)

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        before, after = self._missing(tokens, first_token)
        groups = (before + tokens + after) // self._group
        return (planes * groups * self._channels,) * 4

    def _grouped(self, x: Tensor, first_token: int) -> Tensor:
        """`[planes, groups, tokens per group, channels]`."""
        before, after = self._missing(x.shape[1], first_token)
        if before or after:
            x = torch.cat([x[:, :1].expand(-1, before, -1, -1), x, x[:, -1:].expand(-1, after, -1, -1)], dim=1)
        return x.reshape(x.shape[0], -1, self._group, self._channels)

    def _ungrouped(self, grouped: Tensor, like: Tensor, first_token: int) -> Tensor:
        """Drop what `_grouped` added: the shape of `like`."""
        planes, tokens, heads, head_dim = like.shape
        before = first_token % self._group
        return grouped.reshape(planes, -1, heads, head_dim)[:, before : before + tokens]

    @property
    def _channels(self) -> int:
        return self._plane.heads * self._plane.head_dim

    def _missing(self, tokens: int, first_token: int) -> tuple[int, int]:
        before = first_token % self._group
        return before, -(before + tokens) % self._group


class TokenLevels(StackQuantiser):
    """Integer levels; a group is a run of channels within one head of one token, or all of a token's channels."""

    def __init__(self, plane: Plane, parameters: LevelsParameters) -> None:
        self._plane = plane
        self._group = parameters.channels_per_group(plane)
        self.symbol_levels = parameters.levels

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        grouped = x.reshape(*x.shape[:2], -1, self._group)
        symbols, step, offset = levels.quantise(grouped, self.symbol_levels, dim=3)
        return QuantisedStack(symbols.view(x.shape), (*split_bytes(step), *split_bytes(offset)))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        grouped = x.reshape(*x.shape[:2], -1, self._group)
        return levels_bound(grouped, self.symbol_levels, dim=3).expand(grouped.shape).reshape(x.shape)

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        symbols = quantised.symbols
        grouped = symbols.reshape(*symbols.shape[:2], -1, self._group)
        step = join_bytes(quantised.side[:2], torch.bfloat16).view(*grouped.shape[:3], 1)
        offset = join_bytes(quantised.side[2:], torch.int16).view(*grouped.shape[:3], 1)
        return levels.dequantise(grouped, step, offset).view(symbols.shape)

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (planes * tokens * self._plane.heads * self._plane.head_dim // self._group,) * 4


class Fp8E4m3(StackQuantiser):
    """FP8 bytes with a scale per head vector."""

    symbol_levels = 256

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        codes, scale = fp8.quantise(x)
        return QuantisedStack(codes, split_bytes(scale))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        return fp8_bound(x)

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        codes = quantised.symbols
        scale = join_bytes(quantised.side[:2], torch.bfloat16).view(*codes.shape[:3], 1)
        return fp8.dequantise(codes.contiguous(), scale)

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (planes * tokens * self._plane.heads,) * 2


class Nvfp4(StackQuantiser):
    """NVFP4 codes with block scales and a scale per token."""

    symbol_levels = nvfp4.CODES

    def __init__(self, plane: Plane, rule: nvfp4.BlockRule) -> None:
        self._plane = plane
        self._rule = rule

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        codes, block_scale, outer = nvfp4.quantise(x, self._rule)
        return QuantisedStack(codes, (*split_bytes(outer), flat_bytes(block_scale)))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        blocks = nvfp4.as_blocks(x)
        bound = nvfp4_bound(blocks, x.abs().amax((-2, -1))[..., None, None, None], self._rule)
        return bound.expand(blocks.shape).flatten(-2)[..., : x.shape[-1]]

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        codes = quantised.symbols
        block_scale = quantised.side[2].view(*codes.shape[:3], self._blocks)
        return nvfp4.dequantise(
            codes, block_scale, join_bytes(quantised.side[:2], torch.bfloat16).view(codes.shape[:2])
        )

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return planes * tokens, planes * tokens, planes * tokens * self._plane.heads * self._blocks

    @property
    def _blocks(self) -> int:
        return nvfp4.block_count(self._plane.head_dim)


class AbsmaxLevels(StackQuantiser):
    """Symmetric levels; a group is all of a token's channels."""

    def __init__(self, plane: Plane, parameters: LevelsParameters) -> None:
        self._bins = parameters.levels
        self.symbol_levels = absmax.alphabet(self._bins)

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        symbols, step = absmax.quantise(x.flatten(2), self._bins, dim=2)
        return QuantisedStack(symbols.view(x.shape), split_bytes(step))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        return absmax_bound(x.flatten(2), self._bins, dim=2)[..., None].expand(x.shape)

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        symbols = quantised.symbols
        step = join_bytes(quantised.side, torch.bfloat16).view(*symbols.shape[:2], 1, 1)
        return absmax.dequantise(symbols, step, self._bins)

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (planes * tokens,) * 2


class LloydMax(StackQuantiser):
    """Entries of a Gaussian codebook, with a scale per head vector."""

    def __init__(self, plane: Plane, parameters: LevelsParameters) -> None:
        self._plane = plane
        self.symbol_levels = parameters.levels

    def encode(self, x: Tensor, first_token: int) -> QuantisedStack:
        """See the base class."""
        indices, scale = lloyd_max.quantise(x, self.symbol_levels)
        return QuantisedStack(indices, split_bytes(scale))

    def bound(self, x: Tensor, first_token: int) -> Tensor:
        """See the base class."""
        return lloyd_max_bound(x, self.symbol_levels)

    def decode(self, quantised: QuantisedStack, first_token: int) -> Tensor:
        """See the base class."""
        indices = quantised.symbols
        scale = join_bytes(quantised.side, torch.bfloat16).view(*indices.shape[:3], 1)
        return lloyd_max.dequantise(indices, scale, self.symbol_levels)

    def side_sizes(self, planes: int, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (planes * tokens * self._plane.heads,) * 2


def quantiser_for(plane: Plane, parameters: CodecParameters, levels: LevelsParameters | None) -> StackQuantiser:
    """The quantiser of a lossy format for planes of one shape; `levels` where it has any."""
    quantise = parameters.quantise
    match quantise:
        case Quantise.NONE | Quantise.UNIFORM:
            raise AssertionError(f"{quantise} has no quantiser of single stacks")
        case Quantise.FP8_E4M3:
            return Fp8E4m3(plane)
        case Quantise.NVFP4:
            return Nvfp4(plane, parameters.block_rule)
    assert levels is not None
    match quantise:
        case Quantise.ABSMAX_LEVELS:
            return AbsmaxLevels(plane, levels)
        case Quantise.LLOYD_MAX:
            return LloydMax(plane, levels)
    return ChannelLevels(plane, levels) if levels.axis is Axis.CHANNEL else TokenLevels(plane, levels)


def split_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high bytes of 16-bit elements, flat."""
    pairs = flat_bytes(values).view(-1, 2)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def join_bytes(halves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Undo `split_bytes`: a flat tensor of a 16-bit `dtype`."""
    return flat_bytes(torch.stack(list(halves), dim=1)).view(dtype)
