"""What turns a stack of planes into plain byte sections, which the coder then compresses, and back.

One stage per stack and codec. A stage picks the native kernels where they apply (host memory; lossless: bfloat16 only)
and the torch reference otherwise; both make the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.layout import ChunkPlanes, KVDtype, Stack, flat_bytes
from dataplanes.kvcodec.lossless import join_fields, split_fields
from dataplanes.kvcodec.native import stack_kernels
from dataplanes.kvcodec.parameters import GROUPED_FORMATS, CodecParameters, LevelsParameters, Quantise, Transform
from dataplanes.kvcodec.partition import StackPart
from dataplanes.kvcodec.quantisers import QuantisedStack, StackQuantiser, quantiser_for
from dataplanes.numerics import hadamard, packing
from dataplanes.numerics.bounds import output_rounding, through_inverse_hadamard

Bytes = NDArray[np.uint8]

LARGEST_INPUT = 2.0**96
"""Stacks with a magnitude from here on, an infinity or a NaN are stored raw."""


class Stage(ABC):
    """Some planes' way to bytes. `tokens` is at least 1 everywhere."""

    @abstractmethod
    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """Plain bytes of each section."""

    @abstractmethod
    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """The plain sections; None if the chunk must be stored raw."""

    @abstractmethod
    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """Write the planes into the chunk. Sections have the sizes that were announced, and may be read-only."""

    @abstractmethod
    def write_bound(self, chunk: ChunkPlanes, bounds: ChunkPlanes, first_token: int) -> None:
        """Write the largest error of each element of the chunk's planes into float32 planes that hold zeros."""


class StackStage(Stage):
    """A stage of one stack.

    Args:
        stack: which planes.
        dtype: their element type.
    """

    def __init__(self, stack: Stack, dtype: KVDtype) -> None:
        self.stack = stack
        self.dtype = dtype

    def write_bound(self, chunk: ChunkPlanes, bounds: ChunkPlanes, first_token: int) -> None:
        """No error, unless a stage says otherwise."""

    @property
    def _token_elements(self) -> int:
        return len(self.stack.positions) * self.stack.plane.heads * self.stack.plane.head_dim

    def _shape(self, tokens: int) -> tuple[int, int, int, int]:
        return len(self.stack.positions), tokens, self.stack.plane.heads, self.stack.plane.head_dim


class RawStage(StackStage):
    """The planes as they are."""

    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (tokens * self._token_elements * self.dtype.element_bytes,)

    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """See the base class."""
        return [_host_bytes(flat_bytes(chunk.read(self.stack)))]

    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        values = _tensor_of(sections[0]).view(self.dtype.torch_dtype)
        chunk.write(values.view(self._shape(-1)), self.stack)


class LosslessStage(StackStage):
    """Exponents apart from the rest, bit for bit."""

    def __init__(self, stack: Stack, dtype: KVDtype, *, use_native: bool) -> None:
        super().__init__(stack, dtype)
        self._use_native = use_native and dtype is KVDtype.BFLOAT16

    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return (tokens * self._token_elements,) * self.dtype.element_bytes

    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """See the base class."""
        listed = chunk.listed(self.stack)
        if self._use_native and stack_kernels.is_available(listed):
            return list(stack_kernels.split_bfloat16(listed, chunk.rows))
        return [_host_bytes(row.reshape(-1)) for row in split_fields(chunk.read(self.stack), self.dtype)]

    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        listed = chunk.listed(self.stack)
        if self._use_native and stack_kernels.is_available(listed):
            stack_kernels.join_bfloat16(sections[0], sections[1], listed, chunk.rows)
            return
        values = join_fields(tuple(_tensor_of(section) for section in sections), self.dtype)
        chunk.write(values.view(self._shape(-1)), self.stack)


class QuantisedStage(StackStage):
    """Transform, number format and packing."""

    def __init__(
        self,
        stack: Stack,
        dtype: KVDtype,
        parameters: CodecParameters,
        levels: LevelsParameters | None,
        *,
        packs: bool,
        use_native: bool,
    ) -> None:
        super().__init__(stack, dtype)
        self._seed = parameters.hadamard_seed if parameters.transform is Transform.HADAMARD else None
        self._quantiser: StackQuantiser = quantiser_for(stack.plane, parameters, levels)
        self._packs = packs
        self._kernel = self._native_kernel(parameters, levels) if use_native else None

    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        rows = packing.packed_tokens(tokens, self._quantiser.symbol_levels) if self._packs else tokens
        return rows * self._token_elements, *self._side_sizes(tokens, first_token)

    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """See the base class."""
        listed = chunk.listed(self.stack)
        if self._kernel is not None and stack_kernels.is_available(listed):
            sizes = self.section_sizes(chunk.tokens, first_token)
            return self._kernel.encode(listed, chunk.rows, first_token, sizes)
        x = chunk.read(self.stack).float()
        if not bool(x.abs().amax() < LARGEST_INPUT):
            return None
        if self._seed is not None:
            x = hadamard.forward(x, self._seed)
        quantised = self._quantiser.encode(x, first_token)
        symbols = quantised.symbols.flatten(2)
        if self._packs:
            symbols = packing.pack(symbols, self._quantiser.symbol_levels)
        return [_host_bytes(flat_bytes(part)) for part in (symbols, *quantised.side)]

    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        listed = chunk.listed(self.stack)
        if self._kernel is not None and stack_kernels.is_available(listed):
            self._kernel.decode(sections, listed, chunk.rows, first_token)
            return
        shape = self._shape(chunk.tokens)
        packed_symbols, *side = (_tensor_of(section).to(listed[0].device) for section in sections)
        symbols = packed_symbols.view(shape[0], -1, shape[2] * shape[3])
        if self._packs:
            symbols = packing.unpack(symbols, self._quantiser.symbol_levels, shape[1])
        values = self._quantiser.decode(QuantisedStack(symbols.reshape(shape), tuple(side)), first_token)
        if self._seed is not None:
            values = hadamard.inverse(values, self._seed)
        if self.dtype is KVDtype.FLOAT16:
            # Half a step above the largest half-precision number would round to infinity.
            limit = torch.finfo(torch.float16).max
            values = values.clamp(-limit, limit)
        chunk.write(values, self.stack)

    def write_bound(self, chunk: ChunkPlanes, bounds: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        x = chunk.read(self.stack).float()
        bounds.write(self._bound(x, first_token), self.stack)

    def _bound(self, x: Tensor, first_token: int) -> Tensor:
        if self._seed is None:
            bound = self._quantiser.bound(x, first_token)
        else:
            rotated = hadamard.forward(x, self._seed)
            bound = through_inverse_hadamard(self._quantiser.bound(rotated, first_token), x)
        return bound + output_rounding(x, bound, self.dtype.torch_dtype)

    def _side_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        return self._quantiser.side_sizes(len(self.stack.positions), tokens, first_token)

    def _native_kernel(self, parameters: CodecParameters, levels: LevelsParameters | None) -> stack_kernels.StackKernel:
        plane, quantise = self.stack.plane, parameters.quantise
        per_byte = packing.symbols_per_byte(self._quantiser.symbol_levels) if self._packs else 1
        if levels is None:
            rule = parameters.block_rule if quantise is Quantise.NVFP4 else None
            return stack_kernels.FloatFormatKernel(plane, self._seed, per_byte, nvfp4_rule=rule)
        if quantise in GROUPED_FORMATS:
            return stack_kernels.LevelsKernel(plane, levels, self._seed, per_byte)
        is_absmax = quantise is Quantise.ABSMAX_LEVELS
        return stack_kernels.CodebookKernel(plane, levels.levels, self._seed, per_byte, is_absmax=is_absmax)


class HeadsStage(StackStage):
    """Some heads of each plane, brought together for a stage that knows whole planes only.

    Args:
        stack: the layout's planes; its shape has as many heads as are chosen.
        heads: which heads of each plane.
        inner: codes them as if they were planes of their own.
    """

    def __init__(self, stack: Stack, heads: Sequence[Sequence[int]], inner: StackStage) -> None:
        super().__init__(stack, inner.dtype)
        self._heads = [torch.tensor(chosen) for chosen in heads]
        self._inner = inner

    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """See the base class."""
        return self._inner.section_sizes(tokens, first_token)

    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """See the base class."""
        return self._inner.encode(self._gathered(chunk), first_token)

    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        planes = chunk.listed(self.stack)
        values = torch.empty(self._shape(chunk.tokens), dtype=planes[0].dtype, device=planes[0].device)
        self._inner.decode(sections, ChunkPlanes(values, None), first_token)
        self._scatter(values, chunk)

    def write_bound(self, chunk: ChunkPlanes, bounds: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        gathered = self._gathered(chunk)
        values = torch.zeros(self._shape(chunk.tokens), dtype=torch.float32, device=gathered.planes[0].device)
        self._inner.write_bound(gathered, ChunkPlanes(values, None), first_token)
        self._scatter(values, bounds)

    def _gathered(self, chunk: ChunkPlanes) -> ChunkPlanes:
        chosen = []
        for plane, heads in zip(chunk.listed(self.stack), self._heads, strict=True):
            # The chunk's rows first: a pool is large.
            tokens = plane if chunk.rows is None else plane.index_select(0, chunk.rows)
            chosen.append(tokens.index_select(1, heads.to(plane.device)))
        return ChunkPlanes(torch.stack(chosen), None)

    def _scatter(self, values: Tensor, chunk: ChunkPlanes) -> None:
        for plane, heads, chosen in zip(chunk.listed(self.stack), self._heads, values, strict=True):
            where = heads.to(plane.device)
            if chunk.rows is None:
                plane.index_copy_(1, where, chosen)
            else:
                plane[chunk.rows[:, None], where[None, :]] = chosen


def stage_for(part: StackPart, dtype: KVDtype, parameters: CodecParameters, *, packs: bool, use_native: bool) -> Stage:
    """The stage of one part under a configuration."""
    if not parameters.is_lossless:
        stack = part.stack
        if part.heads is not None:
            stack = Stack(positions=tuple(range(len(part.heads))), plane=stack.plane)
        stage = QuantisedStage(stack, dtype, parameters, part.levels, packs=packs, use_native=use_native)
        return stage if part.heads is None else HeadsStage(part.stack, part.heads, stage)
    if parameters.code == "none":
        return RawStage(part.stack, dtype)
    return LosslessStage(part.stack, dtype, use_native=use_native)


def _host_bytes(x: Tensor) -> Bytes:
    array: Bytes = x.cpu().numpy()
    return array


def _tensor_of(data: Bytes) -> Tensor:
    # torch refuses read-only memory; frames that arrive in a staging buffer are writable and not copied.
    return torch.from_numpy(data if data.flags.writeable else data.copy())
