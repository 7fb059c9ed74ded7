"""What a simulation asks and tells its decider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controld.contract.decision import DEFAULT_CLASS, RAW
from controld.controller.goals import TableRequest
from controld.sim.link import FifoLink
from controld.sim.record import Arrival, Choice, TransferRecord


@dataclass(frozen=True, slots=True)
class Situation:
    """The moment at which a worker begins a transfer.

    Args:
        index: position among the arrivals.
        now_s: virtual time.
        begun: transfers begun before it.
        behind: transfers that wait in the queue behind it.
        elsewhere: transfers that wait or are under way in other queues of the same link.
        link: the link's true state; for the oracle alone.
    """

    index: int
    now_s: float
    begun: int
    behind: int
    elsewhere: int
    link: FifoLink


class Decider(Protocol):
    """Chooses an arm when a transfer begins, and hears what a data plane's agent hears.

    Times never go back from one call to the next.
    """

    @property
    def name(self) -> str:
        """Short, for tables."""
        ...

    def offered(self, arrival: Arrival, now_s: float) -> None:
        """A transfer was handed over."""
        ...

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        """The arm of a transfer that begins."""
        ...

    def wire_span(self, arrival: Arrival, start_s: float, end_s: float, wire_bytes: float) -> None:
        """Bytes were on the wire; called when they have been acknowledged."""
        ...

    def finished(self, record: TransferRecord) -> None:
        """A transfer ended."""
        ...


class SilentDecider:
    """What a decider that learns nothing does with news."""

    def offered(self, arrival: Arrival, now_s: float) -> None:
        """Nothing."""

    def wire_span(self, arrival: Arrival, start_s: float, end_s: float, wire_bytes: float) -> None:
        """Nothing."""

    def finished(self, record: TransferRecord) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Menu:
    """The arms that each class may use: raw, and those whose loss's upper bound is within its limit.

    Args:
        arms: by class; `default` answers for classes that are not named.
    """

    arms: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, request: TableRequest) -> Menu:
        """What the controller's first gate lets through for this request."""
        return cls(
            {
                item.goal.name: tuple(
                    candidate.arm_id
                    for candidate in item.candidates
                    if candidate.arm_id == RAW or candidate.loss_upper_nats <= item.goal.max_quality_loss_nats
                )
                for item in request.class_inputs()
            }
        )

    def of_class(self, service_class: str) -> tuple[str, ...]:
        """Its arms."""
        found = self.arms.get(service_class)
        return self.arms.get(DEFAULT_CLASS, (RAW,)) if found is None else found
