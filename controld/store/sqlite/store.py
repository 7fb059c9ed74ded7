"""The store of one daemon in one directory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from controld.contract.clock import Clock, SystemClock
from controld.store.errors import StoreError
from controld.store.records import AuditEvent, Damage
from controld.store.sqlite.access import Access
from controld.store.sqlite.effects import SqliteEffects
from controld.store.sqlite.history import SqliteAudit, SqliteStudies, SqliteVersions
from controld.store.sqlite.learned import SqlitePolicyGenerations, SqlitePosteriors, SqliteProfiles
from controld.store.sqlite.opening import DATABASE, SUSPECT, Opened, back_up, open_database

RETAIN_VERSIONS = 10_000
RETAIN_VERSIONS_S = 24 * 3600.0
RETAIN_EFFECTS = 1_000_000
RETAIN_AUDIT = 100_000

FIRST_BACKUP_S = 60.0
BACKUP_INTERVAL_S = 3600.0

_log = logging.getLogger(__name__)


class SqliteStore:
    """Implements `Store`. Made by `open`, ended by `close`; the directory is locked in between.

    Attributes:
        profiles, posteriors, effects, versions, policy_generations, studies, audit: the aggregates.
        damage: what had to be set aside at the start; also in the audit trail.
    """

    def __init__(
        self,
        opened: Opened,
        directory: Path,
        clock: Clock,
        *,
        retain_versions: int,
        retain_versions_s: float,
        retain_effects: int,
        retain_audit: int,
    ) -> None:
        self._directory = directory
        self._lock: int | None = opened.lock
        self._backups: asyncio.Task[None] | None = None
        self._access = Access(opened.connection, directory / DATABASE, self._note_corruption)
        self.damage: Damage | None = opened.damage
        self.profiles = SqliteProfiles(self._access)
        self.posteriors = SqlitePosteriors(self._access)
        self.effects = SqliteEffects(self._access, retain=retain_effects)
        self.versions = SqliteVersions(self._access, clock, retain=retain_versions, retain_s=retain_versions_s)
        self.policy_generations = SqlitePolicyGenerations(self._access, clock)
        self.studies = SqliteStudies(self._access, clock)
        self.audit = SqliteAudit(self._access, clock, retain=retain_audit)

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        clock: Clock | None = None,
        retain_versions: int = RETAIN_VERSIONS,
        retain_versions_s: float = RETAIN_VERSIONS_S,
        retain_effects: int = RETAIN_EFFECTS,
        retain_audit: int = RETAIN_AUDIT,
        backup_interval_s: float | None = BACKUP_INTERVAL_S,
    ) -> SqliteStore:
        """Open the state in `directory`; a damaged file is set aside and the last good backup, or nothing, taken.

        Args:
            backup_interval_s: how often that backup is renewed; the first comes a minute after the start. None: never.

        Raises:
            StoreError: another daemon has the directory, or it cannot be locked or written.
        """
        clock = clock or SystemClock()
        opened = await asyncio.to_thread(open_database, directory, now_unix_s=clock.unix_s())
        store = cls(
            opened,
            directory,
            clock,
            retain_versions=retain_versions,
            retain_versions_s=retain_versions_s,
            retain_effects=retain_effects,
            retain_audit=retain_audit,
        )
        if store.damage is not None:
            await store.audit.append(AuditEvent.STORE_DAMAGED, json.dumps(asdict(store.damage)))
        if backup_interval_s is not None:
            store._backups = asyncio.create_task(store._back_up_every(backup_interval_s), name="store-backups")
        return store

    async def _back_up_every(self, interval_s: float) -> None:
        await asyncio.sleep(min(FIRST_BACKUP_S, interval_s))
        while True:
            try:
                await self.back_up()
            except StoreError as error:
                _log.error("no backup of the state: %s", error, extra={"code": error.code})
            await asyncio.sleep(interval_s)

    async def back_up(self) -> None:
        """Copy everything to the backup file that a damaged one is replaced by.

        Raises:
            StoreError: the copy failed; the former backup stays.
        """
        await self._access.in_reader(lambda: back_up(self._access.path))

    async def close(self) -> None:
        """Finish what was begun and give the directory back. May be called twice."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        if self._backups is not None:
            self._backups.cancel()
            await asyncio.wait({self._backups})
        try:
            await asyncio.to_thread(self._access.close)
        finally:
            os.close(lock)

    @property
    def commits(self) -> int:
        """How many transactions were committed since the start."""
        return self._access.writer.commits

    def _note_corruption(self) -> None:
        """Have the next start check every page, however large the file is."""
        try:
            (self._directory / SUSPECT).touch()
        except OSError:
            # The disk refuses even this; the error that brought us here is on its way to the caller.
            pass
