"""KV of which every head keeps other tokens: its layout, its frame, and attention over it.

The retained vectors of a layer's heads stand one behind another, head by head, keys and values apart. As every layer
keeps as many in all (`retention.head_budgets`), planes are equally long, and any codec codes them like planes of one
head. A frame holds which tokens each head keeps, one bit each and compressed, and an ordinary frame with the vectors:

    magic "KVRG", version u16, layers u16, heads u16, reserved u16, tokens u32, map bytes u32;
    xxh3 u64 of all but itself;
    the map (Zstandard, bits of [layers, heads, tokens]); the inner frame.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec.codec import KVCodec, decode_frame
from dataplanes.kvcodec.errors import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.head_profile import NO_ARTEFACTS
from dataplanes.kvcodec.layout import KVDtype, KVLayout

MAGIC: Final = b"KVRG"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHHHHII")
_HEADER_BYTES: Final = _FIELDS.size + 8
_MAX_MAP_BITS: Final = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class RaggedKV:
    """One request's retained keys and values.

    Args:
        kept: bool `[layers, heads, tokens]`.
        keys, values: `[layers, total, dim]`: the retained vectors of a layer, head by head, tokens ascending.

    Raises:
        CodecError: shapes do not fit together.
    """

    kept: Tensor
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        totals = set(self.kept.sum((1, 2)).tolist())
        shapes = {tuple(part.shape[:2]) for part in (self.keys, self.values)}
        if len(totals) > 1 or shapes != {(self.kept.shape[0], next(iter(totals), 0))}:
            raise CodecError(f"layers keep {sorted(totals)} vectors, there are {shapes}", code="codec.ragged")

    @classmethod
    def retain(cls, keys: Tensor, values: Tensor, kept: Tensor) -> RaggedKV:
        """Keep what `kept` says of keys and values `[layers, tokens, heads, dim]`. Raises: CodecError."""
        parts = []
        for planes in (keys, values):
            rows = [plane.transpose(0, 1)[kept[layer]] for layer, plane in enumerate(planes)]
            if len({len(row) for row in rows}) > 1:
                raise CodecError("every layer must keep as many vectors in all", code="codec.ragged")
            parts.append(torch.stack(rows))
        return cls(kept, *parts)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[layers, tokens, heads, dim]`; zero where nothing was kept."""
        layers, heads, tokens = self.kept.shape
        result = []
        for part in (self.keys, self.values):
            planes = torch.zeros(layers, heads, tokens, part.shape[-1], dtype=part.dtype)
            planes[self.kept] = part.flatten(0, 1)
            result.append(planes.transpose(1, 2))
        return result[0], result[1]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attention of queries `[query heads, dim]` to one layer, each head over its own tokens.

        Query heads share KV heads in equal groups, in order. Returns float32 `[query heads, dim of values]`.

        Raises:
            CodecError: query heads are no multiple of KV heads, or a head keeps nothing.
        """
        heads = self.kept.shape[1]
        counts = self.kept[layer].sum(1).tolist()
        if queries.shape[0] % heads or not all(counts):
            raise CodecError(f"{queries.shape[0]} queries over heads that keep {counts}", code="codec.ragged")
        groups = queries.float().view(heads, -1, queries.shape[-1])
        keys = torch.split(self.keys[layer].float(), counts)
        values = torch.split(self.values[layer].float(), counts)
        out = [
            (group @ key.T / math.sqrt(key.shape[-1])).softmax(-1) @ value
            for group, key, value in zip(groups, keys, values, strict=True)
        ]
        return torch.cat(out)


def encode_ragged(kv: RaggedKV, configuration: Configuration, artefacts: Mapping[str, object] = NO_ARTEFACTS) -> bytes:
    """A frame; the configuration must be one that codes each vector by itself or in groups along the run.

    Raises:
        CodecError: the configuration does not fit, or there is more than a frame can say.
    """
    layers, heads, tokens = kv.kept.shape
    if kv.kept.numel() >= _MAX_MAP_BITS or max(layers, heads) >= 1 << 16:
        raise CodecError(f"{tuple(kv.kept.shape)} is too much for a frame", code="codec.ragged")
    codec = KVCodec(configuration, _inner_layout(kv), artefacts=artefacts)
    inner = codec.encode([*_as_planes(kv.keys), *_as_planes(kv.values)], first_token=0)
    bits = np.packbits(kv.kept.numpy().reshape(-1), bitorder="little").tobytes()
    tokens_map = zstandard.ZstdCompressor(level=3).compress(bits)
    fields, body = _FIELDS.pack(MAGIC, VERSION, layers, heads, 0, tokens, len(tokens_map)), tokens_map + inner
    return fields + xxhash.xxh3_64_digest(fields + body) + body


def decode_ragged(frame: bytes, artefacts: Mapping[str, object] = NO_ARTEFACTS) -> RaggedKV:
    """Undo `encode_ragged`.

    Raises:
        FrameError: damaged, cut short, or of another format.
    """
    if len(frame) < _HEADER_BYTES:
        raise FrameError(FrameErrorReason.TRUNCATED, f"{len(frame)} bytes are no ragged frame")
    magic, version, layers, heads, _, tokens, map_bytes = _FIELDS.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(FrameErrorReason.MAGIC, f"{magic!r} begins no ragged frame")
    if version != VERSION:
        raise FrameError(FrameErrorReason.VERSION, f"ragged frames of version {version} are unknown")
    fields, body = frame[: _FIELDS.size], frame[_HEADER_BYTES:]
    if xxhash.xxh3_64_digest(fields + body) != frame[_FIELDS.size : _HEADER_BYTES]:
        raise FrameError(FrameErrorReason.CHECKSUM, "the ragged frame's checksum differs")
    count = layers * heads * tokens
    try:
        bits = zstandard.ZstdDecompressor().decompress(body[:map_bytes], max_output_size=(count + 7) // 8)
    except zstandard.ZstdError as error:
        raise FrameError(FrameErrorReason.PAYLOAD, f"the map of kept tokens: {error}") from error
    if len(bits) != (count + 7) // 8:
        raise FrameError(FrameErrorReason.PAYLOAD, f"the map of kept tokens has {len(bits)} bytes")
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(bool)
    planes = decode_frame(body[map_bytes:], artefacts=artefacts).planes
    if len(planes) != 2 * layers:
        raise FrameError(FrameErrorReason.SHAPE, f"{len(planes)} planes for {layers} layers")
    vectors = [torch.as_tensor(plane).squeeze(1) for plane in planes]
    keys, values = torch.stack(vectors[:layers]), torch.stack(vectors[layers:])
    try:
        return RaggedKV(torch.from_numpy(flags.reshape(layers, heads, tokens)), keys, values)
    except CodecError as error:
        raise FrameError(FrameErrorReason.PAYLOAD, error.message) from error


def _inner_layout(kv: RaggedKV) -> KVLayout:
    return KVLayout.keys_then_values(
        layers=kv.kept.shape[0],
        heads=1,
        head_dim=kv.keys.shape[-1],
        value_dim=kv.values.shape[-1],
        dtype=KVDtype.of(kv.keys.dtype),
        page_tokens=1,
    )


def _as_planes(part: Tensor) -> list[Tensor]:
    return list(part.unsqueeze(2))
