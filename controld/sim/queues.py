"""The order in which a peer's transfers are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class TransferQueue(Protocol[T]):
    """A peer's queue; `controld.contract.fair_queue.FairQueue` is one."""

    def __len__(self) -> int: ...

    def push(self, item: T, *, tenant: str, transfer: Hashable, cost_bytes: float) -> object:
        """Queue an item; its cost is what it is expected to put on the wire."""
        ...

    def pop(self) -> T:
        """The next one. Raises: IndexError: nothing waits."""
        ...

    def charge(self, tenant: str, extra_bytes: float) -> None:
        """What was served took so many bytes more (or less) than its cost said."""
        ...


class FifoQueue(Generic[T]):
    """First in, first out, as SGLang's own."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: T, *, tenant: str, transfer: Hashable, cost_bytes: float) -> None:
        """Queue an item."""
        self._items.append(item)

    def pop(self) -> T:
        """The oldest one. Raises: IndexError: nothing waits."""
        return self._items.popleft()

    def charge(self, tenant: str, extra_bytes: float) -> None:
        """Of no account."""
