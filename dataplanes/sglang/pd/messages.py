"""The plane's own messages between a sender and a receiver, on the sockets that SGLang already has between them.

Every message is a ZMQ multipart `[TAG, kind, header, ...]`; the header is a fixed struct, lengths are checked before
anything is read, and a message that is not exactly right is refused. SGLang's own messages never start with `TAG`.

One exchange: the receiver's capability rides on SGLang's registration message; `Open` asks for staging slots, `Grant`
lends them for a while; each written frame is announced by `Chunk` and answered by `Ack`; `Cancel` withdraws a chunk
whose answer never came, and `Finish` closes the transfer.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from controld.contract.errors import ControldError

TAG = b"CONTROLD-KV"
PROTOCOL_VERSION = 2

_CAPABILITY_MAGIC = b"CTRLDKV\x01"
_MAX_TEXT_BYTES = 512
_MAX_PAGES = 1 << 20
_MAX_SLOTS = 1024
_FIRST_PARTS = 3


class MessageError(ControldError):
    """A message of ours that is malformed; it is dropped and counted."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="pd.message")


class Kind(enum.Enum):
    """What a message is."""

    OPEN = b"open"
    GRANT = b"grant"
    CHUNK = b"chunk"
    ACK = b"ack"
    CANCEL = b"cancel"
    FINISH = b"finish"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer's manager listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Capability:
    """What a receiver adds to SGLang's registration message.

    Args:
        layout_digest: 8 bytes over everything that both pools must have in common.
        slot_bytes: size of one staging slot.
        version: protocol version.
    """

    layout_digest: bytes
    slot_bytes: int
    version: int = PROTOCOL_VERSION

    _STRUCT: ClassVar = struct.Struct("<8sH8sQ")

    def to_frame(self) -> bytes:
        """The frame to append."""
        return self._STRUCT.pack(_CAPABILITY_MAGIC, self.version, self.layout_digest, self.slot_bytes)

    @classmethod
    def from_frame(cls, frame: bytes) -> Self | None:
        """The capability, or None where the frame is not one of ours."""
        if len(frame) != cls._STRUCT.size or not frame.startswith(_CAPABILITY_MAGIC):
            return None
        _, version, digest, slot_bytes = cls._STRUCT.unpack(frame)
        return cls(layout_digest=digest, slot_bytes=slot_bytes, version=version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A sender asks for staging slots."""

    nonce: int
    wanted_slots: int
    reply_to: Endpoint

    _STRUCT: ClassVar = struct.Struct("<QHH")

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        header = self._STRUCT.pack(self.nonce, self.wanted_slots, self.reply_to.port)
        return [TAG, Kind.OPEN.value, header, _text(self.reply_to.host)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        header, host = _exactly(parts, 2)
        nonce, wanted, port = _unpack(cls._STRUCT, header)
        if not 1 <= wanted <= _MAX_SLOTS:
            raise MessageError(f"open: {wanted} slots wanted")
        return cls(nonce=nonce, wanted_slots=wanted, reply_to=Endpoint(_read_text(host), port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The receiver lends staging slots; none at all when it has none to lend.

    Args:
        lease_s: the loan ends when it was not used for this long.
        addresses: where each slot starts in the receiver's memory.
    """

    nonce: int
    grant_id: int
    lease_s: float
    slot_bytes: int
    addresses: tuple[int, ...]

    _STRUCT: ClassVar = struct.Struct("<QQdQ")

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        header = self._STRUCT.pack(self.nonce, self.grant_id, self.lease_s, self.slot_bytes)
        return [TAG, Kind.GRANT.value, header, struct.pack(f"<{len(self.addresses)}Q", *self.addresses)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        header, packed = _exactly(parts, 2)
        nonce, grant_id, lease_s, slot_bytes = _unpack(cls._STRUCT, header)
        count, rest = divmod(len(packed), 8)
        if rest or count > _MAX_SLOTS or not math.isfinite(lease_s) or lease_s <= 0:
            raise MessageError("grant: slots or lease out of range")
        return cls(
            nonce=nonce,
            grant_id=grant_id,
            lease_s=lease_s,
            slot_bytes=slot_bytes,
            addresses=struct.unpack(f"<{count}Q", packed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A frame lies in a staging slot, to be decoded into these pages.

    Args:
        sequence: unique over all senders and chunks; also the frame's arrival mark in the slot.
        slot: index into the grant's slots.
        room: SGLang's bootstrap room of the request.
        tokens: valid tokens; the last page may be partial.
        pages: page indices in the receiver's pool.
        transfer_id: for the receiver's half of the effect.
    """

    sequence: int
    grant_id: int
    slot: int
    frame_bytes: int
    room: int
    tokens: int
    pages: npt.NDArray[np.int32]
    transfer_id: str
    reply_to: Endpoint

    _STRUCT: ClassVar = struct.Struct("<QQHQqIH")

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        header = self._STRUCT.pack(
            self.sequence, self.grant_id, self.slot, self.frame_bytes, self.room, self.tokens, self.reply_to.port
        )
        pages = np.ascontiguousarray(self.pages, dtype="<i4").tobytes()
        return [TAG, Kind.CHUNK.value, header, pages, _text(self.transfer_id), _text(self.reply_to.host)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        header, packed, transfer_id, host = _exactly(parts, 4)
        sequence, grant_id, slot, frame_bytes, room, tokens, port = _unpack(cls._STRUCT, header)
        if len(packed) % 4 or not 0 < len(packed) <= 4 * _MAX_PAGES or tokens == 0:
            raise MessageError(f"chunk: {len(packed)} bytes of pages for {tokens} tokens")
        return cls(
            sequence=sequence,
            grant_id=grant_id,
            slot=slot,
            frame_bytes=frame_bytes,
            room=room,
            tokens=tokens,
            pages=np.frombuffer(packed, dtype="<i4").astype(np.int32),
            transfer_id=_read_text(transfer_id),
            reply_to=Endpoint(_read_text(host), port),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The receiver's answer to a chunk.

    Args:
        refusal: empty where the chunk was verified and decoded; else why it was not (a NACK).
        verify_s, decode_s: seconds spent.
        held_s: seconds from the chunk's message to this answer.
        late_s: seconds that the frame arrived after its message; above zero only with engines whose writes return
            before the bytes are there.
    """

    sequence: int
    refusal: str
    verify_s: float
    decode_s: float
    held_s: float
    late_s: float

    _STRUCT: ClassVar = struct.Struct("<Qdddd")

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        header = self._STRUCT.pack(self.sequence, self.verify_s, self.decode_s, self.held_s, self.late_s)
        return [TAG, Kind.ACK.value, header, _text(self.refusal)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        header, refusal = _exactly(parts, 2)
        sequence, *seconds = _unpack(cls._STRUCT, header)
        if not all(math.isfinite(value) and value >= 0 for value in seconds):
            raise MessageError(f"ack: seconds {seconds}")
        verify_s, decode_s, held_s, late_s = seconds
        return cls(
            sequence=sequence,
            refusal=_read_text(refusal),
            verify_s=verify_s,
            decode_s=decode_s,
            held_s=held_s,
            late_s=late_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Chunks that must not be written to the pool any more; once SGLang's next message is read, none will be."""

    sequences: tuple[int, ...]

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        return [TAG, Kind.CANCEL.value, struct.pack(f"<{len(self.sequences)}Q", *self.sequences)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        (packed,) = _exactly(parts, 1)
        count, rest = divmod(len(packed), 8)
        if rest:
            raise MessageError("cancel: cut short")
        return cls(sequences=struct.unpack(f"<{count}Q", packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A transfer is over: the labels under which the receiver reports its half."""

    transfer_id: str
    arm_id: str
    service_class: str
    link_group: str
    path: str
    reason: str
    table_version: int
    explored: bool

    _STRUCT: ClassVar = struct.Struct("<Q?")

    def to_frames(self) -> list[bytes]:
        """For `send_multipart`."""
        texts = (self.transfer_id, self.arm_id, self.service_class, self.link_group, self.path, self.reason)
        return [TAG, Kind.FINISH.value, self._STRUCT.pack(self.table_version, self.explored), *map(_text, texts)]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Self:
        """Read what follows the kind. Raises: MessageError."""
        header, *texts = _exactly(parts, 7)
        table_version, explored = _unpack(cls._STRUCT, header)
        transfer_id, arm_id, service_class, link_group, path, reason = map(_read_text, texts)
        return cls(
            transfer_id=transfer_id,
            arm_id=arm_id,
            service_class=service_class,
            link_group=link_group,
            path=path,
            reason=reason,
            table_version=table_version,
            explored=explored,
        )


Message = Open | Grant | Chunk | Ack | Cancel | Finish

_PARSERS: dict[bytes, type[Message]] = {
    Kind.OPEN.value: Open,
    Kind.GRANT.value: Grant,
    Kind.CHUNK.value: Chunk,
    Kind.ACK.value: Ack,
    Kind.CANCEL.value: Cancel,
    Kind.FINISH.value: Finish,
}


def is_ours(frames: Sequence[bytes]) -> bool:
    """Whether a multipart message belongs to this plane."""
    return bool(frames) and frames[0] == TAG


def parse(frames: Sequence[bytes]) -> Message:
    """Read one of our messages.

    Raises:
        MessageError: anything about it is not exactly right.
    """
    if len(frames) < _FIRST_PARTS or frames[0] != TAG or frames[1] not in _PARSERS:
        raise MessageError("unknown kind of message")
    return _PARSERS[frames[1]].from_parts(frames[2:])


def _exactly(parts: Sequence[bytes], count: int) -> Sequence[bytes]:
    if len(parts) != count:
        raise MessageError(f"{len(parts)} parts where {count} belong")
    return parts


def _unpack(layout: struct.Struct, header: bytes) -> tuple[Any, ...]:
    if len(header) != layout.size:
        raise MessageError(f"a header of {len(header)} bytes where {layout.size} belong")
    return layout.unpack(header)


def _text(value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > _MAX_TEXT_BYTES:
        raise MessageError(f"a text of {len(encoded)} bytes")
    return encoded


def _read_text(part: bytes) -> str:
    if len(part) > _MAX_TEXT_BYTES:
        raise MessageError(f"a text of {len(part)} bytes")
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        raise MessageError("a text that is not UTF-8") from error
