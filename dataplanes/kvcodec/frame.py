"""The frame: what one chunk of a transfer looks like on the wire. It explains itself; a receiver keeps no state.

```
offset size  field
0      4     magic "CKVF"
4      2     format version
6      2     flags: bit 0 = the planes are stored raw whatever the configuration says
8      8     frame bytes, header included
16     8     raw bytes of the planes
24     8     first token's position in the request
32     4     tokens
36     4     chunk index
40     4     chunk count
44     4     metadata bytes
48     8     tokens of the whole request; 0 where the sender does not know
56     8     XXH3-64 of everything else, the first 56 bytes first
64     ...   metadata: canonical JSON of configuration, its id, planes, dtype and page size; zero padding to 8
...    ...   sections: 8 bytes of length, that many bytes, zero padding to 8
```
Everything is little-endian. The checksum guards against damage, not against an attacker: the fields are checked again
where they are used, and no length is believed before it is bounded by the buffer.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from dataplanes.kvcodec.errors import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.layout import KVDtype, KVLayout, Plane, PlaneRole

MAGIC: Final = b"CKVF"
FORMAT_VERSION: Final = 1
FLAG_RAW: Final = 1
FIXED_BYTES: Final = 64
MAX_METADATA_BYTES: Final = 1 << 20
MAX_PLANES: Final = 1 << 16
MAX_HEADS: Final = 1 << 16
"""Also the largest head dimension."""
MAX_RAW_BYTES: Final = 1 << 36

_FIXED = struct.Struct("<4sHHQQQIIIIQ")
_CHECKSUM = struct.Struct("<Q")
_LENGTH = struct.Struct("<Q")
_METADATA_KEYS: Final = {"configuration", "configuration_id", "planes", "dtype", "page_tokens"}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """Everything a frame says about itself.

    Args:
        configuration: how the planes were coded.
        layout: the sender's planes.
        is_raw: the planes are stored as they are, because they could not be coded (an infinity or a NaN among them).
        first_token: position in the request of the first token.
        tokens: tokens in this frame.
        chunk_index: which chunk of the transfer this is.
        chunk_count: how many chunks the sender announces; 0 while it does not know.
        request_tokens: length of the whole request; 0 where the sender does not know it.
        frame_bytes: size of the whole frame.
        raw_bytes: size of the planes before coding.
    """

    configuration: Configuration
    layout: KVLayout
    is_raw: bool
    first_token: int
    tokens: int
    chunk_index: int
    chunk_count: int
    request_tokens: int
    frame_bytes: int
    raw_bytes: int


@lru_cache(maxsize=256)
def encode_metadata(configuration: Configuration, layout: KVLayout) -> bytes:
    """Canonical JSON of what does not change between the frames of one codec, padded to 8 bytes."""
    text = json.dumps(
        {
            "configuration": dict(configuration),
            "configuration_id": configuration.config_id,
            "planes": layout.run_lengths(),
            "dtype": layout.dtype.value,
            "page_tokens": layout.page_tokens,
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    return text + b" " * (-len(text) % 8)


@lru_cache(maxsize=256)
def decode_metadata(metadata: bytes) -> tuple[Configuration, KVLayout]:
    """Strict inverse of `encode_metadata`.

    Raises:
        FrameError: an unknown or missing key, a wrong type, an id that is not the configuration's.
    """
    try:
        fields = json.loads(metadata)
    except ValueError as error:
        raise FrameError(FrameErrorReason.METADATA, f"metadata is not JSON: {error}") from error
    if not isinstance(fields, dict) or set(fields) != _METADATA_KEYS:
        raise FrameError(FrameErrorReason.METADATA, "metadata does not have exactly the known keys")
    if not isinstance(fields["configuration"], dict):
        raise FrameError(FrameErrorReason.METADATA, "the configuration is no object")
    try:
        configuration = Configuration(fields["configuration"])
    except FieldError as error:
        raise FrameError(FrameErrorReason.CONFIGURATION, str(error)) from error
    if configuration.config_id != fields["configuration_id"]:
        raise FrameError(FrameErrorReason.CONFIGURATION, "the configuration's id is not that of its content")
    try:
        layout = KVLayout(
            planes=_read_planes(fields["planes"]),
            dtype=KVDtype(fields["dtype"]),
            page_tokens=_positive(fields["page_tokens"]),
        )
    except (ValueError, CodecError) as error:
        raise FrameError(FrameErrorReason.METADATA, f"not a layout: {error}") from error
    return configuration, layout


def _read_planes(runs: Any) -> tuple[Plane, ...]:
    if not isinstance(runs, list):
        raise ValueError("planes are no list")
    planes: list[Plane] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 4:
            raise ValueError("a run of planes has four fields")
        role, heads, head_dim, count = run
        if _positive(count) + len(planes) > MAX_PLANES or max(_positive(heads), _positive(head_dim)) > MAX_HEADS:
            raise ValueError("too many planes, or too large ones")
        planes += [Plane(PlaneRole(role), _positive(heads), _positive(head_dim))] * count
    return tuple(planes)


def _positive(value: Any) -> int:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{value!r} is not a positive integer")
    return value


class FrameWriter:
    """Fills a caller's buffer: metadata at once, sections one by one, the header last.

    Args:
        buffer: uint8, writable, contiguous.
        metadata: from `encode_metadata`.

    Raises:
        CodecError: the buffer is too small.
    """

    def __init__(self, buffer: Bytes, metadata: bytes) -> None:
        self._buffer = buffer
        self._metadata_bytes = len(metadata)
        self._end = FIXED_BYTES
        self._append(metadata)

    def add_section(self, data: Bytes) -> None:
        """Append a section."""
        self._append(_LENGTH.pack(data.size))
        self._append(data.data)
        self._append(bytes(-data.size % 8))

    def finish(
        self,
        *,
        is_raw: bool,
        raw_bytes: int,
        first_token: int,
        tokens: int,
        chunk_index: int,
        chunk_count: int,
        request_tokens: int,
    ) -> int:
        """Write the header; returns the frame's size."""
        flags = FLAG_RAW if is_raw else 0
        fixed = _FIXED.pack(
            MAGIC, FORMAT_VERSION, flags, self._end, raw_bytes, first_token, tokens, chunk_index, chunk_count,
            self._metadata_bytes, request_tokens,
        )  # fmt: skip
        self._buffer.data[: len(fixed)] = fixed
        checksum = _checksum(fixed, self._buffer.data[FIXED_BYTES : self._end])
        self._buffer.data[len(fixed) : FIXED_BYTES] = _CHECKSUM.pack(checksum)
        return self._end

    def _append(self, data: bytes | memoryview) -> None:
        end = self._end + len(data)
        if end > self._buffer.size:
            raise CodecError(f"a buffer of {self._buffer.size} bytes is too small", code="codec.buffer")
        # A plain copy: assigning to an array would give up the interpreter lock, and get it back when others like.
        self._buffer.data[self._end : end] = data
        self._end = end


class FrameReader:
    """A verified frame: its header, then its sections in order.

    Args:
        buffer: starts with the frame; may be longer.

    Raises:
        FrameError: any check failed.
    """

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < FIXED_BYTES:
            raise FrameError(FrameErrorReason.TRUNCATED, f"{len(buffer)} bytes are less than a header")
        fixed = bytes(buffer[: _FIXED.size])
        (
            magic, version, flags, frame_bytes, raw_bytes, first_token, tokens, chunk_index, chunk_count,
            metadata_bytes, request_tokens,
        ) = _FIXED.unpack(fixed)  # fmt: skip
        if magic != MAGIC:
            raise FrameError(FrameErrorReason.MAGIC, f"starts with {magic!r}")
        if version != FORMAT_VERSION:
            raise FrameError(FrameErrorReason.VERSION, f"format version {version}, not {FORMAT_VERSION}")
        if not FIXED_BYTES + metadata_bytes <= frame_bytes <= len(buffer):
            raise FrameError(FrameErrorReason.TRUNCATED, f"{len(buffer)} bytes of a frame of {frame_bytes}")
        body = buffer[FIXED_BYTES:frame_bytes]
        (expected,) = _CHECKSUM.unpack(buffer[_FIXED.size : FIXED_BYTES])
        if _checksum(fixed, body) != expected:
            raise FrameError(FrameErrorReason.CHECKSUM, "the checksum does not match")
        if flags & ~FLAG_RAW or metadata_bytes > MAX_METADATA_BYTES:
            raise FrameError(FrameErrorReason.METADATA, "unknown flags or oversized metadata")
        configuration, layout = decode_metadata(bytes(body[:metadata_bytes]))
        if raw_bytes > MAX_RAW_BYTES:
            raise FrameError(FrameErrorReason.TOO_LARGE, f"{raw_bytes} raw bytes in one frame")
        if raw_bytes != layout.raw_bytes(tokens):
            raise FrameError(FrameErrorReason.SHAPE, f"{raw_bytes} raw bytes, but {layout.raw_bytes(tokens)} by shape")
        if request_tokens and first_token + tokens > request_tokens:
            raise FrameError(FrameErrorReason.SHAPE, f"token {first_token + tokens} of a request of {request_tokens}")
        self.header = FrameHeader(
            configuration=configuration,
            layout=layout,
            is_raw=bool(flags & FLAG_RAW),
            first_token=first_token,
            tokens=tokens,
            chunk_index=chunk_index,
            chunk_count=chunk_count,
            request_tokens=request_tokens,
            frame_bytes=frame_bytes,
            raw_bytes=raw_bytes,
        )
        self._body = body
        self._position = metadata_bytes

    def next_section(self) -> memoryview:
        """The next section, without a copy."""
        start = self._position + _LENGTH.size
        if start > len(self._body):
            raise FrameError(FrameErrorReason.PAYLOAD, "a section is missing")
        (size,) = _LENGTH.unpack(self._body[self._position : start])
        if size > len(self._body) - start:
            raise FrameError(FrameErrorReason.PAYLOAD, "a section reaches beyond the frame")
        self._position = start + size + -size % 8
        return self._body[start : start + size]

    def finish(self) -> None:
        """Nothing may be left.

        Raises:
            FrameError: there are more sections than the configuration has.
        """
        if self._position != len(self._body):
            raise FrameError(FrameErrorReason.PAYLOAD, "bytes are left after the last section")


def section_bytes(size: int) -> int:
    """What a section of `size` bytes takes in a frame."""
    return _LENGTH.size + size + -size % 8


def _checksum(fixed: bytes, body: memoryview) -> int:
    state = xxhash.xxh3_64(fixed)
    state.update(body)
    return int(state.intdigest())
