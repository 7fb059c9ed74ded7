"""What is true in a simulation: codecs, link, machines. Nothing here is known to a decider but the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.link import LinkTruth
from controld.sim.schedule import Drift, Trait, drift_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTruth:
    """What an arm really costs on idle machines. Seconds and bytes are of a whole transfer of V raw bytes.

    Args:
        encode_a_s, decode_a_s: once a transfer, in its first chunk.
        encode_b_s_per_byte, decode_b_s_per_byte: for each raw byte.
        wire_share: wire bytes / raw bytes.
        loss_nats: mean quality loss.
    """

    encode_a_s: float = 0.0
    encode_b_s_per_byte: float = 0.0
    decode_a_s: float = 0.0
    decode_b_s_per_byte: float = 0.0
    wire_share: float = 1.0
    loss_nats: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> CodecTruth:
        """A codec that is what its profile says."""
        return cls(
            encode_a_s=profile.encode.a_s,
            encode_b_s_per_byte=profile.encode.b_s_per_byte,
            decode_a_s=profile.decode.a_s,
            decode_b_s_per_byte=profile.decode.b_s_per_byte,
            wire_share=1.0 / profile.ratio,
            loss_nats=profile.loss_mean_nats,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Log-normal scatter with mean 1, one draw for each transfer and stage; standard deviations of the logarithm."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    @classmethod
    def even(cls, sd: float) -> Noise:
        """The same scatter in every stage."""
        return cls(encode=sd, wire=sd, decode=sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Machines and the link between them.

    Args:
        codecs: by arm id, raw left out.
        link: how bytes travel.
        raw_a_s, raw_b_s_per_byte: what a raw transfer costs beside the wire (page descriptors), before its first byte.
        chunk_bytes: raw bytes that are encoded, sent and decoded as one; the stages of different chunks overlap.
        slots: chunks of one transfer between the start of their encoding and their acknowledgement.
        contention: each further encoding that runs on the sender makes one longer by this share when it begins;
            likewise decodings on the receiver.
        noise: scatter of the stages.
        drifts: how arms differ from their profiles, and when.
    """

    codecs: Mapping[str, CodecTruth]
    link: LinkTruth
    raw_a_s: float = 1e-3
    raw_b_s_per_byte: float = 0.0
    chunk_bytes: float = 1.5e6
    slots: int = 4
    contention: float = 0.0
    noise: Noise = field(default_factory=Noise)
    drifts: tuple[Drift, ...] = ()

    def __post_init__(self) -> None:
        if RAW in self.codecs:
            raise FieldError("world.codecs", "raw is no codec")
        if not (math.isfinite(self.chunk_bytes) and self.chunk_bytes > 0) or self.slots < 1:
            raise FieldError("world.chunk_bytes", "chunks have bytes, and there is a slot for one")
        unknown = {drift.arm_id for drift in self.drifts} - set(self.codecs) - {None}
        if unknown:
            raise FieldError("world.drifts", f"no codec is called {', '.join(sorted(map(str, unknown)))}")

    @property
    def arm_ids(self) -> tuple[str, ...]:
        """Raw, and every codec."""
        return (RAW, *self.codecs)

    def loss_nats(self, arm_id: str, now_s: float, transfers: int) -> float:
        """The true quality loss of a transfer on an arm."""
        if arm_id == RAW:
            return 0.0
        return self.codecs[arm_id].loss_nats * drift_factor(self.drifts, Trait.LOSS, arm_id, now_s, transfers)

    def work(self, arm_id: str, raw_bytes: float, now_s: float, transfers: int, *, cuts_raw: bool = False) -> Work:
        """The mean work of a transfer that begins now, cut into chunks.

        Args:
            transfers: how many have begun.
            cuts_raw: whether raw bytes, too, enter the wire chunk by chunk, so that others' get in between.
        """
        if arm_id == RAW:
            overhead = self.raw_a_s + self.raw_b_s_per_byte * raw_bytes
            if not cuts_raw:
                return Work(overhead, 0.0, raw_bytes, 0.0, 0.0, 1, 1.0, is_raw=True)
            chunks, full_bytes, last_share = self._cut(raw_bytes)
            return Work(overhead, 0.0, full_bytes, 0.0, 0.0, chunks, last_share, is_raw=True)
        codec = self.codecs[arm_id]
        encode = decode = share = 1.0
        if self.drifts:
            encode, decode, share = (
                drift_factor(self.drifts, trait, arm_id, now_s, transfers)
                for trait in (Trait.ENCODE, Trait.DECODE, Trait.BYTES)
            )
        chunks, full_bytes, last_share = self._cut(raw_bytes)
        return Work(
            encode * codec.encode_a_s,
            encode * codec.encode_b_s_per_byte * full_bytes,
            codec.wire_share * share * full_bytes,
            decode * codec.decode_a_s,
            decode * codec.decode_b_s_per_byte * full_bytes,
            chunks,
            last_share,
        )

    def _cut(self, raw_bytes: float) -> tuple[int, float, float]:
        """How many chunks, bytes of a full one, and how much of one the last is."""
        chunks = max(1, math.ceil(raw_bytes / self.chunk_bytes))
        full_bytes = min(self.chunk_bytes, raw_bytes)
        return chunks, full_bytes, (raw_bytes - (chunks - 1) * full_bytes) / full_bytes if full_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """One transfer's work. Seconds and bytes of one full chunk, and how much of one the last chunk is.

    Args:
        encode_a_s, decode_a_s: in addition, in the first chunk; all that raw has.
    """

    encode_a_s: float
    encode_s: float
    wire_bytes: float
    decode_a_s: float
    decode_s: float
    chunks: int
    last_share: float
    is_raw: bool = False
