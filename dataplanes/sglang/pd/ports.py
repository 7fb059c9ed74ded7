"""What the plane needs of an agent, so that its parts can be driven without one."""

from __future__ import annotations

from typing import Protocol

from controld.contract.decision import Drawn
from controld.contract.effect import Effect
from controld.contract.fair_queue import Tenancy


class Draw(Protocol):
    """A drawn arm and what it was drawn for."""

    @property
    def drawn(self) -> Drawn: ...
    @property
    def bandwidth_bytes_per_s(self) -> float: ...
    @property
    def load(self) -> float: ...


class PlaneAgent(Protocol):
    """The part of `dataplanes.agent.Agent` that transfers use; none of it blocks or raises."""

    def classify(self, *, extra_key: str | None, priority: int | None) -> str: ...

    def tenancy(self) -> Tenancy: ...

    def draw(
        self, *, transfer_id: str, service_class: str, raw_bytes: int, tier: str, link_group: str = "default"
    ) -> Draw: ...

    def offered(self, *, tier: str, link_group: str, raw_bytes: int, service_class: str) -> None: ...

    def withdrawn(self, *, tier: str, link_group: str, raw_bytes: int, service_class: str) -> None: ...

    def observe_wire(
        self, *, tier: str, link_group: str, start_s: float, end_s: float, wire_bytes: int, service_class: str
    ) -> None: ...

    def report(self, effect: Effect) -> None: ...

    def count(self, name: str, n: int = 1) -> None: ...
