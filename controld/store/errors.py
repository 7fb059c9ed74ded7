"""What can go wrong with durable state. None of these ends the daemon while it runs."""

from __future__ import annotations

from controld.contract.errors import ControldError


class StoreError(ControldError):
    """The store could not do what was asked; nothing of that request was kept.

    Codes: `store.locked`, `store.no_locking`, `store.read_only`, `store.disk_full`, `store.corrupt`, `store.io`,
    `store.busy`, `store.closed`, `store.constraint`, `store.failed`.
    """


class ConflictError(StoreError):
    """A compare-and-swap found another state than the caller expected; nothing was written."""

    def __init__(self, what: str, *, expected: object, actual: object) -> None:
        super().__init__(
            f"{what}: expected {expected}, found {actual}", code="store.conflict", hint="read again, then retry"
        )
        self.expected = expected
        self.actual = actual


class NotFoundError(StoreError):
    """There never was such a thing."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} does not exist", code="store.not_found")


class GoneError(StoreError):
    """There was such a thing, but it is older than what is kept."""

    def __init__(self, what: str, kept: str) -> None:
        super().__init__(f"{what} is no longer kept", code="store.gone", hint=f"kept: {kept}")
