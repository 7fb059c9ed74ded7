"""KV codec: planes -> frame -> planes.

Public interface, stable:

- `KVCodec(configuration, layout, artefacts=...)`; raises `CodecError` for what the layout cannot carry. Immutable,
  usable in any number of threads at once.
- `codec.max_frame_bytes(tokens)`: how large a buffer must be.
- `codec.encode_into(planes, buffer, first_token=..., request_tokens=..., ...) -> int` (hot path) and
  `codec.encode(planes, ...) -> bytes`.
- `decode_frame(buffer, out=None, max_raw_bytes=...) -> DecodedFrame`: needs nothing but the frame, and the artefacts
  that its configuration names.
- `KVCodec.compile()`: build the native kernels; call it before serving.
- `peek_header(buffer) -> FrameHeader`: verify and read the header without decoding.

`planes` is a dense tensor `[planes, tokens, heads, head_dim]` or a list of `[tokens, heads, head_dim]`, of any strides
(fast where heads and head_dim are contiguous within a token); with `rows=` it is a whole pool, read and written in
place. `buffer` is a writable uint8 tensor or anything with a writable buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec.coders import CODERS, STORED
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
from dataplanes.kvcodec.head_profile import NO_ARTEFACTS, find_head_profile
from dataplanes.kvcodec.layout import ChunkPlanes, KVLayout, Planes
from dataplanes.kvcodec.native.library import (
    load_codebook_library,
    load_library,
    load_predictive_library,
    load_rans_library,
    load_splitzip_library,
)
from dataplanes.kvcodec.parameters import parse_parameters
from dataplanes.kvcodec.partition import parts_of
from dataplanes.kvcodec.predictive.artefact import find_predictive
from dataplanes.kvcodec.predictive.stage import PredictiveStage
from dataplanes.kvcodec.stages import LosslessStage, RawStage, Stage, stage_for

Bytes = NDArray[np.uint8]
Buffer = Tensor | Bytes | bytearray | memoryview | bytes


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens start .. stop - 1 of a chunk and the stages that code them; the first stands at `first_token`."""

    stages: tuple[Stage, ...]
    start: int
    stop: int
    first_token: int

    @property
    def section_sizes(self) -> list[int]:
        """Plain bytes of each section, stage by stage."""
        tokens = self.stop - self.start
        return [size for stage in self.stages for size in stage.section_sizes(tokens, self.first_token)]


class KVCodec:
    """One configuration over one layout.

    Args:
        configuration: a point of `kv_strategy_space(layout)`, or any other that `parse_parameters` accepts.
        layout: the sender's planes.
        artefacts: calibrated objects by id, of which the configuration may name some; an `ArtefactShelf`, say.
        use_native: false runs the torch reference everywhere; the frames are the same.

    Raises:
        CodecError: the configuration is malformed or does not fit the layout, or an artefact that it names is unknown.
    """

    def __init__(
        self,
        configuration: Configuration,
        layout: KVLayout,
        *,
        artefacts: Mapping[str, object] = NO_ARTEFACTS,
        use_native: bool = True,
    ) -> None:
        self.configuration = configuration
        self.layout = layout
        self.parameters = parse_parameters(configuration, layout, artefacts)
        self._coder = CODERS[self.parameters.code]
        self._metadata = encode_metadata(configuration, layout)
        packs, dtype = self._coder.packs_symbols, layout.dtype
        uniform = self.parameters.uniform
        self._stages: tuple[Stage, ...] = (
            (PredictiveStage(layout, uniform.artefact, uniform.step),)
            if uniform
            else tuple(
                stage_for(part, dtype, self.parameters, packs=packs, use_native=use_native)
                for part in parts_of(layout, self.parameters, artefacts)
            )
        )
        self._raw_stages = tuple(RawStage(stack, dtype) for stack in layout.stacks)
        self._sink_stages = tuple(LosslessStage(stack, dtype, use_native=use_native) for stack in layout.stacks)

    @staticmethod
    def compile() -> bool:
        """Build what is otherwise built at first use, about a second once per machine; call before serving.

        Returns:
            Whether the native kernels run; without them the reference does the work, several times slower.
        """
        loaders = (
            load_library,
            load_codebook_library,
            load_splitzip_library,
            load_predictive_library,
            load_rans_library,
        )
        return all(loader() is not None for loader in loaders)

    @property
    def chunk_alignment_tokens(self) -> int:
        """Cut transfers at multiples of this, and every cut decodes to the same bytes."""
        return lcm(self.layout.page_tokens, self.parameters.group_tokens)

    def max_frame_bytes(self, tokens: int, first_token: int | None = None) -> int:
        """An upper bound of a frame's size; a frame stored raw fits too.

        Args:
            tokens: of the chunk.
            first_token: its position, which decides how many groups it touches; None for the worst.
        """
        header = FIXED_BYTES + len(self._metadata)
        if tokens == 0:
            return header
        if first_token is None:
            # Most groups: the chunk starts at the last token of one. Most sinks: it starts the request.
            sinks = min(tokens, self.parameters.sink_tokens)
            parts = [_Part(self._stages, 0, tokens, self.parameters.group_tokens - 1)]
            parts += [_Part(self._sink_stages, 0, sinks, 0)] if sinks else []
        else:
            parts = self._parts(tokens, first_token, 0)
        if window := min(tokens, self.parameters.window_tokens):
            parts.append(_Part(self._sink_stages, 0, window, 0))
        coded = sum(section_bytes(self._coder.max_bytes(size)) for part in parts for size in part.section_sizes)
        raw = sum(section_bytes(size) for size in _Part(self._raw_stages, 0, tokens, 0).section_sizes)
        return header + max(raw, coded)

    def encode(
        self,
        planes: Planes,
        *,
        first_token: int,
        chunk_index: int = 0,
        chunk_count: int = 1,
        request_tokens: int = 0,
    ) -> bytes:
        """`encode_into` a buffer of its own."""
        buffer = np.empty(self.max_frame_bytes(self.layout.check_planes(planes), first_token), np.uint8)
        size = self.encode_into(
            planes,
            buffer,
            first_token=first_token,
            chunk_index=chunk_index,
            chunk_count=chunk_count,
            request_tokens=request_tokens,
        )
        return buffer[:size].tobytes()

    def encode_into(
        self,
        planes: Planes,
        buffer: Buffer,
        *,
        first_token: int,
        rows: Tensor | None = None,
        chunk_index: int = 0,
        chunk_count: int = 1,
        request_tokens: int = 0,
    ) -> int:
        """Write one frame.

        Args:
            planes: the chunk's KV in the layout's order, shapes and dtype; on any device.
            buffer: writable; `max_frame_bytes` is always enough.
            first_token: position in the request of the chunk's first token; groups follow it.
            rows: where `planes` is a whole pool, the row of each of the chunk's tokens (int64): nothing is gathered
                first.
            chunk_index: which chunk of the transfer this is.
            chunk_count: how many there are; 0 if not known yet.
            request_tokens: length of the whole request: the prompt's, which a prefill server knows before its first
                chunk; 0 if not known. All chunks of a transfer must say the same. Its last tokens may be coded more
                finely; a configuration that keeps a window there needs it.

        Returns:
            Size of the frame. A chunk with an infinity or a NaN, or with a range that the side data cannot hold, is
            stored raw inside the frame.

        Raises:
            CodecError: planes or buffer are not as announced, or the request's length is missing or too small.
        """
        chunk = self.layout.chunk(planes, rows, request_tokens=request_tokens)
        tokens = chunk.tokens
        self._check_request(request_tokens, first_token + tokens)
        target = _byte_view(buffer)
        if not target.flags.writeable:
            raise CodecError("the buffer is read-only", code="codec.buffer")
        raw_bytes = self.layout.raw_bytes(tokens)
        writer = FrameWriter(target, self._metadata)
        is_raw = False
        if tokens:
            sections = self._code(chunk, first_token, request_tokens)
            if sections is None:
                is_raw = True
                sections = [section for stage in self._raw_stages for section in stage.encode(chunk, first_token) or ()]
            for section in sections:
                writer.add_section(section)
        return writer.finish(
            is_raw=is_raw,
            raw_bytes=raw_bytes,
            first_token=first_token,
            tokens=tokens,
            chunk_index=chunk_index,
            chunk_count=chunk_count,
            request_tokens=request_tokens,
        )

    def error_bound(self, planes: Planes, *, first_token: int, request_tokens: int = 0) -> list[Tensor]:
        """The stated bound: how far each decoded element may lie from its input.

        Returns:
            float32, one tensor of each plane's shape. Where the chunk would be stored raw the true error is 0 and the
            bound may be anything, NaN included.
        """
        bounds = [torch.zeros(plane.shape, dtype=torch.float32, device=plane.device) for plane in planes]
        chunk = self.layout.chunk(planes, request_tokens=request_tokens)
        self._check_request(request_tokens, first_token + chunk.tokens)
        for part in self._parts(chunk.tokens, first_token, request_tokens):
            source = chunk.between(part.start, part.stop)
            target = ChunkPlanes(bounds, None).between(part.start, part.stop)
            for stage in part.stages:
                stage.write_bound(source, target, part.first_token)
        return bounds

    def _check_request(self, request_tokens: int, end: int) -> None:
        """A request is long enough for its chunk, and its length is known where it matters."""
        if request_tokens and request_tokens < end:
            raise CodecError(f"a chunk up to token {end} of a request of {request_tokens}", code="codec.request_tokens")
        if self.parameters.window_tokens and not request_tokens:
            raise CodecError(
                "the request's length decides where its window starts", code="codec.request_tokens",
                hint="pass request_tokens, or choose a configuration without window_tokens",
            )  # fmt: skip

    def _parts(self, tokens: int, first_token: int, request_tokens: int) -> list[_Part]:
        """A chunk's sinks, what is quantised and the window at the request's end: those that are not empty."""
        sinks = min(max(self.parameters.sink_tokens - first_token, 0), tokens)
        window = tokens
        if self.parameters.window_tokens and request_tokens:
            window = min(max(request_tokens - self.parameters.window_tokens - first_token, sinks), tokens)
        parts = [
            _Part(self._sink_stages, 0, sinks, first_token),
            _Part(self._stages, sinks, window, first_token + sinks),
            _Part(self._sink_stages, window, tokens, first_token + window),
        ]
        return [part for part in parts if part.start < part.stop]

    def _code(self, chunk: ChunkPlanes, first_token: int, request_tokens: int) -> list[Bytes] | None:
        """All coded sections; None if the planes must be stored raw, or are lossless and not smaller coded."""
        plain: list[Bytes] = []
        for part in self._parts(chunk.tokens, first_token, request_tokens):
            tokens = chunk.between(part.start, part.stop)
            for stage in part.stages:
                encoded = stage.encode(tokens, part.first_token)
                if encoded is None:
                    return None
                plain += encoded
        sections = self._coder.encode(plain)
        may_grow = self.parameters.is_lossless and self.parameters.code != "none"
        if may_grow and sum(section.size for section in sections) >= self.layout.raw_bytes(chunk.tokens):
            return None
        return sections

    def _decode(self, reader: FrameReader, chunk: ChunkPlanes) -> None:
        """Decode a frame's sections into a chunk; nothing is written before all of them proved to be whole."""
        header = reader.header
        if self.parameters.window_tokens and not header.request_tokens:
            raise FrameError(FrameErrorReason.METADATA, "a window at the end of a request of unknown length")
        parts = self._parts(header.tokens, header.first_token, header.request_tokens)
        coder = self._coder
        if header.is_raw:
            parts, coder = [_Part(self._raw_stages, 0, header.tokens, header.first_token)], STORED
        sizes = [size for part in parts for size in part.section_sizes]
        coded = [reader.next_section() for _ in sizes]
        reader.finish()
        sections = iter(coder.decode(coded, sizes))
        for part in parts:
            target = chunk.between(part.start, part.stop)
            for stage in part.stages:
                count = len(stage.section_sizes(target.tokens, part.first_token))
                stage.decode([next(sections) for _ in range(count)], target, part.first_token)


def decode_frame(
    buffer: Buffer,
    out: Planes | None = None,
    *,
    rows: Tensor | None = None,
    max_raw_bytes: int = MAX_RAW_BYTES,
    artefacts: Mapping[str, object] = NO_ARTEFACTS,
    use_native: bool = True,
) -> DecodedFrame:
    """Verify and decode one frame.

    Args:
        buffer: starts with the frame; may be longer.
        out: where the planes go (any device, any strides, the frame's shapes and dtype); allocated if None.
        rows: where `out` is a pool, the row of each token there (int64); other rows are left alone.
        max_raw_bytes: refuse frames that would decode to more.
        artefacts: calibrated objects by id, as the sender's codec had them.
        use_native: false runs the torch reference everywhere.

    Raises:
        FrameError: a check failed; nothing was written to `out`.
    """
    reader = FrameReader(_byte_view(buffer).data)
    header = reader.header
    if header.raw_bytes > max_raw_bytes:
        raise FrameError(FrameErrorReason.TOO_LARGE, f"{header.raw_bytes} raw bytes, at most {max_raw_bytes} wanted")
    try:
        codec = _codec_for(header.configuration, header.layout, _named(header.configuration, artefacts), use_native)
    except CodecError as error:
        is_unknown = error.code == "codec.artefact_unknown"
        reason = FrameErrorReason.ARTEFACT if is_unknown else FrameErrorReason.CONFIGURATION
        raise FrameError(reason, str(error)) from error
    if out is None:
        chunk = ChunkPlanes(_allocate(header.layout, header.tokens), None, header.request_tokens)
    else:
        try:
            chunk = header.layout.chunk(out, rows, request_tokens=header.request_tokens)
        except CodecError as error:
            raise FrameError(FrameErrorReason.SHAPE, str(error)) from error
        if chunk.tokens != header.tokens:
            raise FrameError(FrameErrorReason.SHAPE, f"{header.tokens} tokens where {chunk.tokens} are awaited")
    if header.tokens:
        codec._decode(reader, chunk)
    else:
        reader.finish()
    return DecodedFrame(header, chunk.planes)


def peek_header(buffer: Buffer) -> FrameHeader:
    """Verify a frame and read its header.

    Raises:
        FrameError: a check failed.
    """
    return FrameReader(_byte_view(buffer).data).header


def _named(configuration: Configuration, artefacts: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """The artefacts that a configuration names, by id."""
    finders: dict[str, Callable[[Mapping[str, object], str], object]] = {
        "head_profile": find_head_profile,
        "artefact": find_predictive,
    }
    names = ((find, configuration.get(parameter)) for parameter, find in finders.items())
    return tuple((name, find(artefacts, name)) for find, name in names if isinstance(name, str))


@lru_cache(maxsize=64)
def _codec_for(
    configuration: Configuration, layout: KVLayout, named: tuple[tuple[str, object], ...], use_native: bool
) -> KVCodec:
    artefacts = dict(named)
    return KVCodec(configuration, layout, artefacts=artefacts, use_native=use_native)


def _allocate(layout: KVLayout, tokens: int) -> Planes:
    dtype = layout.dtype.torch_dtype
    if layout.is_dense:
        plane = layout.planes[0]
        return torch.empty(len(layout.planes), tokens, plane.heads, plane.head_dim, dtype=dtype)
    return [torch.empty(tokens, plane.heads, plane.head_dim, dtype=dtype) for plane in layout.planes]


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
