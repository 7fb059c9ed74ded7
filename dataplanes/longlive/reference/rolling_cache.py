"""The rolling cache of keys and values: a window of whole chunks, with sinks that never leave.

Which chunks the next one sees is `kept_chunks`, a closed form; the cache holds those and no others. The arrangement is
LongLive-2.0's (a global sink from the clip's begin, and the first chunk of the newest shot), with one difference: the
shot's sink has its place reserved as soon as there is one, so that nothing is wanted again that has been evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.longlive.reference.kv_tensor import AgreeOnPeak, KvRule, KvTensor, encode
from dataplanes.longlive.reference.model import SHOT_OFFSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What attention sees, in chunks.

    Args:
        window: in all, sinks and the chunk that is being made included; at least 1.
        sink: from the clip's begin.
        pins_shot: whether the first chunk after a scene cut stays, too.
    """

    window: int
    sink: int
    pins_shot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """Where in its clip a chunk is.

    Args:
        chunk: its number in the session, from 0.
        shot: its shot's number, from 0.
        starts_shot: whether a scene cut lies before it.
    """

    chunk: int
    shot: int = 0
    starts_shot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One chunk's clean keys and values, a tensor for each layer.

    Args:
        chunk: its number in the session.
        shot: its shot's number.
        keys: before rotation.
    """

    chunk: int
    shot: int
    keys: tuple[KvTensor, ...]
    values: tuple[KvTensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in (*self.keys, *self.values))


def kept_chunks(next_chunk: int, limits: CacheLimits, pinned: int | None) -> tuple[int, ...]:
    """The earlier chunks that chunk `next_chunk` sees, in order.

    Args:
        next_chunk: its number.
        limits: window and sinks.
        pinned: the first chunk of the newest shot after a cut.
    """
    sinks = set(range(min(limits.sink, next_chunk)))
    room = limits.window - 1 - limits.sink
    if limits.pins_shot and pinned is not None and pinned >= limits.sink:
        sinks.add(pinned)
        room -= 1
    return tuple(sorted(sinks | set(range(max(0, next_chunk - max(room, 0)), next_chunk))))


class RollingCache:
    """The history of one session on one rank.

    Args:
        limits: window and sinks.
        rule: how keys and values are stored.
        chunk_latents: latent frames of a chunk.
        agree: see `kv_tensor.encode`.
    """

    def __init__(self, limits: CacheLimits, rule: KvRule, chunk_latents: int, agree: AgreeOnPeak) -> None:
        self._limits = limits
        self._rule = rule
        self._chunk_latents = chunk_latents
        self._agree = agree
        self._entries: list[CacheEntry] = []
        self._pinned: int | None = None
        self._next_chunk = 0

    @property
    def entries(self) -> Sequence[CacheEntry]:
        """What the next chunk sees, in order."""
        return self._entries

    @property
    def bytes(self) -> int:
        """Of all stored tensors."""
        return sum(entry.bytes for entry in self._entries)

    def limit(self, limits: CacheLimits) -> None:
        """Change window and sinks; what no longer fits is dropped, what was dropped before does not come back."""
        self._limits = limits
        self._evict()

    def convert(self, rule: KvRule) -> None:
        """Store everything anew in another precision; what the old one lost stays lost."""
        self._rule = rule
        self._entries = [
            CacheEntry(
                chunk=entry.chunk,
                shot=entry.shot,
                keys=tuple(self._encode(key.decode(torch.float32), is_key=True) for key in entry.keys),
                values=tuple(self._encode(value.decode(torch.float32), is_key=False) for value in entry.values),
            )
            for entry in self._entries
        ]

    def append(self, keys: Sequence[Tensor], values: Sequence[Tensor], place: ChunkPlace) -> CacheEntry:
        """Add a chunk, later than all that are there.

        Args:
            keys: `[tokens, heads, head_dim]` of each layer, before rotation.
            values: the same.
            place: where in the clip it is.
        """
        entry = CacheEntry(
            chunk=place.chunk,
            shot=place.shot,
            keys=tuple(self._encode(key, is_key=True) for key in keys),
            values=tuple(self._encode(value, is_key=False) for value in values),
        )
        self._entries.append(entry)
        if place.starts_shot:
            self._pinned = place.chunk
        self._next_chunk = place.chunk + 1
        self._evict()
        return entry

    def read(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that a layer looks at: the history's, decoded, and then the next chunk's own.

        Each forward pass decodes anew: what would be kept between passes is wider than bf16, which a precision below
        it is there to save.

        Args:
            layer: whose.
            key: of the next chunk, `[tokens, heads, head_dim]`.
            value: the same.

        Returns:
            Both `[all tokens, heads, head_dim]`, in the type of what was given.
        """
        return (
            _after_history([entry.keys[layer] for entry in self._entries], key),
            _after_history([entry.values[layer] for entry in self._entries], value),
        )

    def times(self, shot: int) -> Tensor:
        """Temporal positions of the history's frames and then of the next chunk's, which is of `shot`.

        Counted over what is seen, so that they never exceed the window however long the clip is.
        """
        shots = [*(entry.shot for entry in self._entries), shot]
        ranks = {number: rank for rank, number in enumerate(sorted(set(shots)))}
        frames = torch.arange(len(shots) * self._chunk_latents, dtype=torch.float64).view(len(shots), -1)
        offsets = torch.tensor([SHOT_OFFSET * ranks[number] for number in shots], dtype=torch.float64)
        return (frames + offsets[:, None]).flatten()

    def _encode(self, x: Tensor, *, is_key: bool) -> KvTensor:
        return encode(x, self._rule, is_key=is_key, agree=self._agree)

    def _evict(self) -> None:
        kept = set(kept_chunks(self._next_chunk, self._limits, self._pinned))
        self._entries = [entry for entry in self._entries if entry.chunk in kept]


def _after_history(stored: Sequence[KvTensor], own: Tensor) -> Tensor:
    """Chunks are of one size, so that each is decoded where it belongs."""
    whole = own.new_empty(len(stored) + 1, *own.shape)
    for place, tensor in enumerate(stored):
        tensor.decode_into(whole[place])
    whole[-1] = own
    return whole.flatten(0, 1)


def signal_to_noise_db(written: Sequence[Tensor], stored: Sequence[KvTensor]) -> float | None:
    """Of stored tensors against what was written, over all of them; None where nothing was lost."""
    signal = noise = 0.0
    for exact, tensor in zip(written, stored, strict=True):
        signal += float(exact.double().square().sum())
        noise += float((exact - tensor.decode(exact.dtype)).double().square().sum())
    if noise == 0.0 or signal == 0.0:
        return None
    return 10.0 * float(torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))
