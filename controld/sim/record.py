"""What a simulation leaves behind: one record a transfer, and the run that they make up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A transfer that is going to be.

    Args:
        at_s: when it is handed over; where transfers follow one another, seconds after the one before has ended.
        raw_bytes: its size.
        peer: which receiver's queue it waits in.
    """

    at_s: float
    raw_bytes: int
    service_class: str = "default"
    tenant: str = "default"
    peer: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A decider's answer.

    Args:
        explored: not its best guess, but to learn.
        table_version, bandwidth_bytes_per_s, load: what it was drawn from, where that exists.
    """

    arm_id: str
    explored: bool = False
    table_version: int = 0
    bandwidth_bytes_per_s: float = 0.0
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One finished transfer. Seconds on the virtual clock; bytes.

    Args:
        index: position among the arrivals.
        started_s: when its worker began.
        encode_s, decode_s: work, summed over chunks; wire_s: union of its spans, raw's overhead included.
        service_s: from the first work to the last acknowledgement.
        loss_nats: true quality loss.
    """

    index: int
    service_class: str
    tenant: str
    peer: int
    raw_bytes: int
    wire_bytes: float
    arm_id: str
    explored: bool
    arrived_s: float
    started_s: float
    finished_s: float
    encode_s: float
    wire_s: float
    decode_s: float
    chunks: int
    loss_nats: float
    table_version: int = 0
    bandwidth_bytes_per_s: float = 0.0
    load: float = 0.0

    @property
    def wait_s(self) -> float:
        """In the queue."""
        return self.started_s - self.arrived_s

    @property
    def service_s(self) -> float:
        """From the first work to the last acknowledgement."""
        return self.finished_s - self.started_s

    @property
    def total_s(self) -> float:
        """From the hand-over to the last acknowledgement."""
        return self.finished_s - self.arrived_s

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: getattr(self, name) for name in _FIELDS} | {"wait_s": self.wait_s, "total_s": self.total_s}


_FIELDS = tuple(field.name for field in fields(TransferRecord))


@dataclass(frozen=True)
class Run:
    """All transfers of one decider, in the order of the arrivals."""

    decider: str
    records: tuple[TransferRecord, ...]

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"decider": self.decider, "transfers": [record.to_document() for record in self.records]}
