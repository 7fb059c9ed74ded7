"""The stored profiles of one kind in memory, read again once there are others."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic, TypeVar

from controld.candidates.stored import ProfileReader
from controld.store.errors import StoreError
from controld.store.interface import Store

_log = logging.getLogger(__name__)

_Kept = TypeVar("_Kept")


class KnownProfiles(Generic[_Kept]):
    """All profiles of a kind that can be read; one that cannot is left out and logged.

    Args:
        store: where they live.
        reader: of their kind.

    Attributes:
        profiles: as the store had them at the last `refresh`; the same tuple until there are others.
    """

    def __init__(self, store: Store, reader: ProfileReader[_Kept]) -> None:
        self._store = store
        self._reader = reader
        self._stale = True
        self.profiles: tuple[_Kept, ...] = ()

    def changed(self) -> None:
        """Something was measured, imported or deleted."""
        self._stale = True

    async def refresh(self) -> None:
        """Read them if something changed. Raises: StoreError: those that were known stay, and the next one reads."""
        if not self._stale:
            return
        self._stale = False
        try:
            records = await self._store.profiles.list()
        except StoreError:
            self._stale = True
            raise
        stored = await asyncio.to_thread(self._reader.read, records)
        for row in stored.unreadable:
            _log.error("%s: %s", row.where, row.what, extra={"config_id": row.key.config_id})
        self.profiles = stored.profiles
