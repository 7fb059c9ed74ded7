"""The stored profiles of one kind, at hand for planning."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic, TypeVar

from controld.candidates.stored import ProfileReader
from controld.store.errors import StoreError
from controld.store.interface import Store

_log = logging.getLogger(__name__)

_Kept = TypeVar("_Kept")


class ProfileShelf(Generic[_Kept]):
    """All profiles that can be read; one that cannot is left out and logged.

    Args:
        store: where the rows are.
        reader: of the rows of one kind.
    """

    def __init__(self, store: Store, reader: ProfileReader[_Kept]) -> None:
        self._store = store
        self._reader = reader
        self._is_stale = True
        self.profiles: tuple[_Kept, ...] = ()

    def changed(self) -> None:
        """Rows were added, changed or deleted: read them before the next use."""
        self._is_stale = True

    async def refresh(self) -> bool:
        """Read what may have changed; whether anything was read. Raises: StoreError: they are still to be read."""
        if not self._is_stale:
            return False
        self._is_stale = False
        try:
            records = await self._store.profiles.list()
        except StoreError:
            self._is_stale = True
            raise
        stored = await asyncio.to_thread(self._reader.read, records)
        for row in stored.unreadable:
            _log.error("%s: %s", row.where, row.what, extra={"config_id": row.key.config_id})
        self.profiles = stored.profiles
        return True
