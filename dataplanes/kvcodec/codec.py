"""KV codec: planes -> frame -> planes.

Public interface, stable:

- `KVCodec(configuration, layout)`; raises `CodecError` for what the layout cannot carry. Immutable, usable in any
  number of threads at once.
- `codec.max_frame_bytes(tokens)`: how large a buffer must be.
- `codec.encode_into(planes, buffer, first_token=..., chunk_index=..., chunk_count=...) -> int` (hot path) and
  `codec.encode(planes, ...) -> bytes`.
- `decode_frame(buffer, out=None, max_raw_bytes=...) -> DecodedFrame`: needs nothing but the frame.
- `peek_header(buffer) -> FrameHeader`: verify and read the header without decoding.

`planes` is a dense tensor `[planes, tokens, heads, head_dim]` (fast) or a list of `[tokens, heads, head_dim]`, of any
strides; `buffer` is a writable uint8 tensor or anything with a writable buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec.coders import CODERS
from dataplanes.kvcodec.errors import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.frame import (
    FIXED_BYTES,
    MAX_RAW_BYTES,
    FrameHeader,
    FrameReader,
    FrameWriter,
    encode_metadata,
    section_bytes,
)
from dataplanes.kvcodec.layout import KVDtype, KVLayout, Stack, flat_bytes, stack_planes, unstack_planes
from dataplanes.kvcodec.lossless import join_fields, split_fields
from dataplanes.kvcodec.parameters import Transform, parse_parameters
from dataplanes.kvcodec.quantisers import QuantisedStack, StackQuantiser, quantiser_for
from dataplanes.numerics import hadamard
from dataplanes.numerics.bounds import output_rounding, through_inverse_hadamard

Bytes = NDArray[np.uint8]
Buffer = Tensor | Bytes | bytearray | memoryview | bytes
Planes = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    """What a frame held.

    Args:
        header: its description.
        planes: the values, in the layout's dtype: what was passed as `out`, else a dense tensor where the layout
            allows one, else a list.
    """

    header: FrameHeader
    planes: Planes


class KVCodec:
    """One configuration over one layout.

    Args:
        configuration: a point of `kv_strategy_space(layout)`, or any other that `parse_parameters` accepts.
        layout: the sender's planes.

    Raises:
        CodecError: the configuration is malformed or does not fit the layout.
    """

    def __init__(self, configuration: Configuration, layout: KVLayout) -> None:
        self.configuration = configuration
        self.layout = layout
        self.parameters = parse_parameters(configuration, layout)
        self._coder = CODERS[self.parameters.code]
        self._metadata = encode_metadata(configuration, layout)
        self._quantisers: tuple[StackQuantiser, ...] = ()
        if not self.parameters.is_lossless:
            self._quantisers = tuple(quantiser_for(stack.plane, self.parameters) for stack in layout.stacks)

    @property
    def chunk_alignment_tokens(self) -> int:
        """Cut transfers at multiples of this, and every cut decodes to the same bytes."""
        pages, group = self.layout.page_tokens, self.parameters.group_tokens
        return max(pages, group)

    def max_frame_bytes(self, tokens: int, first_token: int = 0) -> int:
        """An upper bound of a frame's size; a frame stored raw fits too."""
        header = FIXED_BYTES + len(self._metadata)
        raw = header
        for stack in self.layout.stacks:
            elements = len(stack.positions) * tokens * stack.plane.heads * stack.plane.head_dim
            raw += section_bytes(elements * self.layout.dtype.element_bytes)
        if tokens == 0 or self._stores_raw:
            return raw
        coded = header
        for index, stack in enumerate(self.layout.stacks):
            for rows, length, levels in self._section_shapes(index, stack, tokens, first_token):
                coded += section_bytes(self._coder.max_bytes(rows, length, levels))
        return max(raw, coded)

    def encode(self, planes: Planes, *, first_token: int, chunk_index: int = 0, chunk_count: int = 1) -> bytes:
        """`encode_into` a buffer of its own."""
        buffer = np.empty(self.max_frame_bytes(self.layout.check_planes(planes), first_token), np.uint8)
        size = self.encode_into(
            planes, buffer, first_token=first_token, chunk_index=chunk_index, chunk_count=chunk_count
        )
        return buffer[:size].tobytes()

    def encode_into(
        self, planes: Planes, buffer: Buffer, *, first_token: int, chunk_index: int = 0, chunk_count: int = 1
    ) -> int:
        """Write one frame.

        Args:
            planes: the chunk's KV in the layout's order, shapes and dtype; on any device.
            buffer: writable; `max_frame_bytes` is always enough.
            first_token: position in the request of the chunk's first token; groups follow it.
            chunk_index: which chunk of the transfer this is.
            chunk_count: how many there are; 0 if not known yet.

        Returns:
            Size of the frame. A chunk with an infinity or a NaN, or with a range that the side data cannot hold, is
            stored raw inside the frame.

        Raises:
            CodecError: planes or buffer are not as announced.
        """
        tokens = self.layout.check_planes(planes)
        target = _byte_view(buffer)
        if not target.flags.writeable:
            raise CodecError("the buffer is read-only", code="codec.buffer")
        raw_bytes = self.layout.raw_bytes(tokens)
        writer = FrameWriter(target, self._metadata)
        is_raw = False
        if tokens:
            sections = None if self._stores_raw else self._code(planes, first_token)
            if sections is not None and self.parameters.is_lossless and sum(map(len, sections)) >= raw_bytes:
                sections = None
            is_raw = sections is None and not self._stores_raw
            if sections is None:
                sections = [_raw_section(planes, stack) for stack in self.layout.stacks]
            for section in sections:
                writer.add_section(section)
        return writer.finish(
            is_raw=is_raw,
            raw_bytes=raw_bytes,
            first_token=first_token,
            tokens=tokens,
            chunk_index=chunk_index,
            chunk_count=chunk_count,
        )

    def error_bound(self, planes: Planes, *, first_token: int) -> list[Tensor]:
        """The stated bound: how far each decoded element may lie from its input.

        Returns:
            float32, one tensor of each plane's shape. Where the chunk would be stored raw the true error is 0 and the
            bound may be anything, NaN included.
        """
        bounds = [torch.zeros(plane.shape, dtype=torch.float32, device=plane.device) for plane in planes]
        if self.parameters.is_lossless or self.layout.check_planes(planes) == 0:
            return bounds
        for index, stack in enumerate(self.layout.stacks):
            x = stack_planes(planes, stack).float()
            if self.parameters.transform is Transform.HADAMARD:
                rotated = hadamard.forward(x, self.parameters.hadamard_seed)
                bound = through_inverse_hadamard(self._quantisers[index].bound(rotated, first_token), x)
            else:
                bound = self._quantisers[index].bound(x, first_token)
            bound = bound + output_rounding(x, bound, self.layout.dtype.torch_dtype)
            unstack_planes(bound, bounds, stack)
        return bounds

    @property
    def _stores_raw(self) -> bool:
        return self.parameters.is_lossless and self.parameters.code == "none"

    def _code(self, planes: Planes, first_token: int) -> list[Bytes] | None:
        sections: list[Bytes] = []
        for index, stack in enumerate(self.layout.stacks):
            x = stack_planes(planes, stack)
            if self.parameters.is_lossless:
                sections += [self._coder.encode(row, 256) for row in split_fields(x, self.layout.dtype)]
                continue
            quantised = self._quantise(index, x, first_token)
            if quantised is None:
                return None
            levels = self._quantisers[index].symbol_levels
            sections.append(self._coder.encode(quantised.symbols.reshape(x.shape[0], -1), levels))
            sections += [self._coder.encode(rows, 256) for rows in quantised.side]
        return sections

    def _quantise(self, index: int, x: Tensor, first_token: int) -> QuantisedStack | None:
        values = x.float()
        if self.parameters.transform is Transform.HADAMARD:
            values = hadamard.forward(values, self.parameters.hadamard_seed)
        return self._quantisers[index].encode(values, first_token)

    def _section_shapes(self, index: int, stack: Stack, tokens: int, first_token: int) -> list[tuple[int, int, int]]:
        """Rows, length and alphabet of each coded section of a stack."""
        planes, elements = len(stack.positions), tokens * stack.plane.heads * stack.plane.head_dim
        if self.parameters.is_lossless:
            return [(planes, elements, 256)] * self.layout.dtype.element_bytes
        quantiser = self._quantisers[index]
        side = quantiser.side_shapes(planes, tokens, first_token)
        return [(planes, elements, quantiser.symbol_levels), *((rows, length, 256) for rows, length in side)]

    def _decode_stack(self, index: int, stack: Stack, reader: FrameReader) -> Tensor:
        tokens, first_token = reader.header.tokens, reader.header.first_token
        shape = (len(stack.positions), tokens, stack.plane.heads, stack.plane.head_dim)
        dtype = self.layout.dtype
        if reader.header.is_raw or self._stores_raw:
            data = reader.next_section()
            size = int(np.prod(shape)) * dtype.element_bytes
            if len(data) != size:
                raise FrameError(FrameErrorReason.PAYLOAD, f"{len(data)} raw bytes where {size} belong")
            return _tensor_of(data).view(dtype.torch_dtype).view(shape)
        parts = [
            self._coder.decode(reader.next_section(), rows, length, levels)
            for rows, length, levels in self._section_shapes(index, stack, tokens, first_token)
        ]
        if self.parameters.is_lossless:
            return join_fields(tuple(parts), dtype).view(shape)
        quantised = QuantisedStack(parts[0].reshape(shape), tuple(parts[1:]))
        values = self._quantisers[index].decode(quantised, first_token)
        if self.parameters.transform is Transform.HADAMARD:
            values = hadamard.inverse(values, self.parameters.hadamard_seed)
        if dtype is KVDtype.FLOAT16:
            # Half a step above the largest half-precision number would round to infinity.
            limit = torch.finfo(torch.float16).max
            values = values.clamp_(-limit, limit)
        return values


def decode_frame(buffer: Buffer, out: Planes | None = None, *, max_raw_bytes: int = MAX_RAW_BYTES) -> DecodedFrame:
    """Verify and decode one frame.

    Args:
        buffer: starts with the frame; may be longer.
        out: where the planes go (any device, any strides, the frame's shapes and dtype); allocated if None.
        max_raw_bytes: refuse frames that would decode to more.

    Raises:
        FrameError: a check failed. `out` may then hold some of the planes; they must not be used.
    """
    reader = FrameReader(_byte_view(buffer).data)
    header = reader.header
    if header.raw_bytes > max_raw_bytes:
        raise FrameError(FrameErrorReason.TOO_LARGE, f"{header.raw_bytes} raw bytes, at most {max_raw_bytes} wanted")
    try:
        codec = _codec_for(header.configuration, header.layout)
    except CodecError as error:
        raise FrameError(FrameErrorReason.CONFIGURATION, str(error)) from error
    if out is None:
        planes = _allocate(header.layout, header.tokens)
    else:
        planes = out
        try:
            tokens = header.layout.check_planes(planes)
        except CodecError as error:
            raise FrameError(FrameErrorReason.SHAPE, str(error)) from error
        if tokens != header.tokens:
            raise FrameError(FrameErrorReason.SHAPE, f"{header.tokens} tokens where {tokens} are awaited")
    if header.tokens:
        for index, stack in enumerate(header.layout.stacks):
            unstack_planes(codec._decode_stack(index, stack, reader), planes, stack)
    reader.finish()
    return DecodedFrame(header, planes)


def peek_header(buffer: Buffer) -> FrameHeader:
    """Verify a frame and read its header.

    Raises:
        FrameError: a check failed.
    """
    return FrameReader(_byte_view(buffer).data).header


@lru_cache(maxsize=64)
def _codec_for(configuration: Configuration, layout: KVLayout) -> KVCodec:
    return KVCodec(configuration, layout)


def _allocate(layout: KVLayout, tokens: int) -> Planes:
    dtype = layout.dtype.torch_dtype
    if layout.is_dense:
        plane = layout.planes[0]
        return torch.empty(len(layout.planes), tokens, plane.heads, plane.head_dim, dtype=dtype)
    return [torch.empty(tokens, plane.heads, plane.head_dim, dtype=dtype) for plane in layout.planes]


def _raw_section(planes: Planes, stack: Stack) -> Bytes:
    array: Bytes = flat_bytes(stack_planes(planes, stack)).cpu().numpy()
    return array


def _byte_view(buffer: Buffer) -> Bytes:
    if isinstance(buffer, Tensor):
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or not buffer.is_cpu:
            raise CodecError("a buffer tensor is flat, contiguous uint8 on the host", code="codec.buffer")
        array: Bytes = buffer.numpy()
        return array
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise CodecError("a buffer array is flat, contiguous uint8", code="codec.buffer")
        return buffer
    return np.frombuffer(buffer, np.uint8)


def _tensor_of(data: memoryview) -> Tensor:
    array = np.frombuffer(data, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
