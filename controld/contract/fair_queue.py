"""A queue that tenants share by weight: weighted deficit round robin in bytes (Shreedhar and Varghese, SIGCOMM 1995).

Every tenant with a backlog earns credit in proportion to its weight, and its oldest item goes once the credit covers
the item's cost. The quantum is as small as can be: rounds in which nobody could send are skipped in one step. So at any
moment the bytes served to two tenants that both had a backlog all along, each divided by its weight, differ by at most
one largest item of the one or the other, likewise divided; and nobody waits for more than its own share allows.

Pure: one thread, no clock. A caller with several threads holds a lock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from controld.contract.errors import FieldError

UNKNOWN_WEIGHT: Final = 1.0
"""Of a tenant that no weight was given for."""

LEAST_SHARE: Final = 1e-3
"""What a tenant keeps where the others are guaranteed everything: nobody is shut out."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Who shares a link, and whose share a service class uses.

    Args:
        weights: by tenant; none: nobody shares by weight.
        tenant_of_class: by service class; one that is missing belongs to the tenant without a name.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    tenant_of_class: Mapping[str, str] = field(default_factory=dict)

    def tenant(self, service_class: str) -> str:
        """Whose share a class uses; everybody's the same one where there are no weights."""
        return self.tenant_of_class.get(service_class, "") if self.weights else ""


def guaranteed_shares(weights: Mapping[str, float], guaranteed: Mapping[str, float]) -> dict[str, float]:
    """Shares of a link that sum to one, by weight, but nobody's below what it is guaranteed.

    What the guarantees leave is shared by weight among those whom it gives more than their guarantee. As the weights of
    a `FairQueue` these are what each gets while all have a backlog; what one does not use is the others', as ever.

    Args:
        weights: positive, by tenant; at least one.
        guaranteed: parts of the link in [0, 1], by tenant; they sum to at most one. Missing: none.
    """
    bound: dict[str, float] = {}
    while True:
        free = {tenant: weight for tenant, weight in weights.items() if tenant not in bound}
        total = sum(free.values())
        per_weight = max(0.0, 1.0 - sum(bound.values())) / total if total else 0.0
        short = {t: guaranteed.get(t, 0.0) for t, w in free.items() if guaranteed.get(t, 0.0) > per_weight * w}
        if not short:
            shares = bound | {tenant: max(LEAST_SHARE, per_weight * weight) for tenant, weight in free.items()}
            whole = sum(shares.values())
            return {tenant: shares[tenant] / whole for tenant in weights}
        bound |= short


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    transfer: Hashable
    cost_bytes: float


@dataclass(slots=True, eq=False)
class _Backlog(Generic[T]):
    """What waits of one tenant; it exists only while something does."""

    tenant: str
    weight: float
    credit_bytes: float = 0.0
    waiting_bytes: float = 0.0
    entries: deque[_Entry[T]] = field(default_factory=deque)

    def rounds_needed(self) -> float:
        """How much credit the oldest item lacks, in units of the weight."""
        return (self.entries[0].cost_bytes - self.credit_bytes) / self.weight


@dataclass(slots=True)
class _Queued:
    """Of which tenant the waiting items of a transfer are, and how many there are."""

    tenant: str
    items: int = 0


class FairQueue(Generic[T]):
    """Items of tenants in the order in which they may use a shared link.

    First in, first out inside a tenant. Items of one transfer keep their order whatever happens: while some of them
    wait, those that follow join them, even where the transfer is said to belong to another tenant by now. Whoever has
    no backlog has neither credit nor debt. Some item is always served while any waits.

    A push costs the same whatever waits; a pop depends on the number of tenants that have a backlog, never on the
    number of items or their sizes.

    Args:
        weights: positive, by tenant; a tenant without one has `UNKNOWN_WEIGHT`. Only their ratios matter.

    Raises:
        FieldError: a weight is not a positive finite number.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights: dict[str, float] = {}
        self._ring: deque[_Backlog[T]] = deque()
        self._backlogs: dict[str, _Backlog[T]] = {}
        self._transfers: dict[Hashable, _Queued] = {}
        self._items = 0
        self.set_weights(weights or {})

    def __len__(self) -> int:
        return self._items

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Share by these from now on; credit that was earned stays.

        Raises:
            FieldError: a weight is not a positive finite number; then nothing is changed.
        """
        for tenant, weight in weights.items():
            if not math.isfinite(weight) or weight <= 0:
                raise FieldError(f"weights.{tenant}", f"{weight} is not a positive finite number")
        self._weights = dict(weights)
        for backlog in self._ring:
            backlog.weight = self._weights.get(backlog.tenant, UNKNOWN_WEIGHT)

    def push(self, item: T, *, tenant: str, transfer: Hashable, cost_bytes: float) -> str:
        """Queue an item.

        Args:
            tenant: whose share it uses.
            transfer: what it is a part of.
            cost_bytes: expected bytes on the wire.

        Returns:
            The tenant that it waits with: of the transfer's items that wait already, if there are any.

        Raises:
            FieldError: the cost is not a finite non-negative number; then the item is not queued.
        """
        if not math.isfinite(cost_bytes) or cost_bytes < 0:
            raise FieldError("cost_bytes", f"{cost_bytes} is not a finite non-negative number")
        queued = self._transfers.setdefault(transfer, _Queued(tenant))
        queued.items += 1
        backlog = self._backlogs.get(queued.tenant)
        if backlog is None:
            weight = self._weights.get(queued.tenant, UNKNOWN_WEIGHT)
            backlog = self._backlogs[queued.tenant] = _Backlog(queued.tenant, weight)
            self._ring.append(backlog)
        backlog.entries.append(_Entry(item, transfer, cost_bytes))
        backlog.waiting_bytes += cost_bytes
        self._items += 1
        return queued.tenant

    def pop(self) -> T:
        """The next item.

        Raises:
            IndexError: nothing waits.
        """
        if not self._ring:
            raise IndexError("pop from an empty fair queue")
        # The first of the ring wins a tie, and it was served longest ago.
        chosen = min(self._ring, key=_Backlog.rounds_needed)
        rounds = chosen.rounds_needed()
        if rounds > 0:
            for backlog in self._ring:
                backlog.credit_bytes += rounds * backlog.weight
        entry = chosen.entries.popleft()
        chosen.credit_bytes -= entry.cost_bytes
        chosen.waiting_bytes -= entry.cost_bytes
        self._items -= 1
        self._ring.remove(chosen)
        if chosen.entries:
            self._ring.append(chosen)
        else:
            del self._backlogs[chosen.tenant]
        queued = self._transfers[entry.transfer]
        queued.items -= 1
        if not queued.items:
            del self._transfers[entry.transfer]
        return entry.item

    def charge(self, tenant: str, extra_bytes: float) -> None:
        """What was served took so many bytes more than its cost said (less, where negative).

        Nothing comes of it where the tenant has no backlog any more.

        Raises:
            FieldError: the number is not finite.
        """
        if not math.isfinite(extra_bytes):
            raise FieldError("extra_bytes", f"{extra_bytes} is not finite")
        backlog = self._backlogs.get(tenant)
        if backlog is not None:
            backlog.credit_bytes -= extra_bytes

    def waiting_bytes(self) -> dict[str, float]:
        """Expected bytes that wait, by tenant; only of those that have a backlog."""
        return {backlog.tenant: max(0.0, backlog.waiting_bytes) for backlog in self._ring}
