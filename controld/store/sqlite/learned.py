"""Profiles, posteriors and the policy generation in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import astuple

from controld.contract.clock import Clock
from controld.store.errors import ConflictError
from controld.store.records import PolicyGeneration, PosteriorRecord, ProfileKey, ProfileRecord
from controld.store.sqlite.access import Access

_KEY = ("model_fingerprint", "workload", "config_id", "sender_hardware", "receiver_hardware")
_KEY_COLUMNS = ", ".join(_KEY)


class SqliteProfiles:
    """Implements `Profiles`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def upsert(self, records: Sequence[ProfileRecord]) -> None:
        await self._insert(records, "")

    async def add_newer(self, records: Sequence[ProfileRecord]) -> int:
        return await self._insert(records, " WHERE excluded.updated_unix_s > profiles.updated_unix_s")

    async def _insert(self, records: Sequence[ProfileRecord], replace_where: str) -> int:
        rows = [(*astuple(record.key), record.document, record.updated_unix_s) for record in records]

        def job(connection: sqlite3.Connection) -> int:
            return connection.executemany(
                f"INSERT INTO profiles ({_KEY_COLUMNS}, document, updated_unix_s) VALUES (?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT ({_KEY_COLUMNS}) DO UPDATE"
                f" SET document = excluded.document, updated_unix_s = excluded.updated_unix_s{replace_where}",
                rows,
            ).rowcount

        return max(0, await self._access.write(job))

    async def list(
        self, *, model_fingerprint: str | None = None, workload: str | None = None
    ) -> tuple[ProfileRecord, ...]:
        given = {"model_fingerprint": model_fingerprint, "workload": workload}
        wanted = {name: value for name, value in given.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        rows = await self._access.read(
            f"SELECT {_KEY_COLUMNS}, document, updated_unix_s FROM profiles WHERE {where} ORDER BY {_KEY_COLUMNS}",
            tuple(wanted.values()),
        )
        return tuple(
            ProfileRecord(
                key=ProfileKey(**dict(zip(_KEY, row[:5], strict=True))), document=row[5], updated_unix_s=row[6]
            )
            for row in rows
        )

    async def delete(self, keys: Sequence[ProfileKey]) -> int:
        rows = [astuple(key) for key in keys]
        where = " AND ".join(f"{name} = ?" for name in _KEY)

        def job(connection: sqlite3.Connection) -> int:
            return connection.executemany(f"DELETE FROM profiles WHERE {where}", rows).rowcount

        return max(0, await self._access.write(job))


class SqlitePosteriors:
    """Implements `Posteriors`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def get(self, key: str) -> PosteriorRecord | None:
        rows = await self._access.read("SELECT key, version, document FROM posteriors WHERE key = ?", (key,))
        return _posterior(rows[0]) if rows else None

    async def list(self, prefix: str = "") -> tuple[PosteriorRecord, ...]:
        rows = await self._access.read(
            "SELECT key, version, document FROM posteriors WHERE substr(key, 1, ?) = ? ORDER BY key",
            (len(prefix), prefix),
        )
        return tuple(_posterior(row) for row in rows)

    async def put(self, records: Sequence[PosteriorRecord]) -> None:
        def job(connection: sqlite3.Connection) -> None:
            for record in records:
                row = connection.execute("SELECT version FROM posteriors WHERE key = ?", (record.key,)).fetchone()
                actual = row[0] if row else 0
                if actual != record.version:
                    raise ConflictError(f"posterior {record.key!r}", expected=record.version, actual=actual)
                connection.execute(
                    "INSERT INTO posteriors VALUES (?, ?, ?)"
                    " ON CONFLICT (key) DO UPDATE SET version = excluded.version, document = excluded.document",
                    (record.key, record.version + 1, record.document),
                )

        await self._access.write(job)

    async def delete(self, prefix: str) -> int:
        def job(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "DELETE FROM posteriors WHERE substr(key, 1, ?) = ?", (len(prefix), prefix)
            ).rowcount

        return await self._access.write(job)


def _posterior(row: tuple[str, int, str]) -> PosteriorRecord:
    return PosteriorRecord(key=row[0], version=row[1], document=row[2])


class SqlitePolicyGenerations:
    """Implements `PolicyGenerations`."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock

    async def current(self) -> PolicyGeneration:
        rows = await self._access.read("SELECT generation, content_hash, applied_unix_s FROM policy_generation")
        return _generation(rows[0])

    async def advance(self, content_hash: str, *, expected_generation: int) -> PolicyGeneration:
        now_unix_s = self._clock.unix_s()

        def job(connection: sqlite3.Connection) -> PolicyGeneration:
            current = _generation(
                connection.execute("SELECT generation, content_hash, applied_unix_s FROM policy_generation").fetchone()
            )
            if current.generation != expected_generation:
                raise ConflictError("policy generation", expected=expected_generation, actual=current.generation)
            if current.content_hash == content_hash and current.generation > 0:
                return current
            following = PolicyGeneration(
                generation=current.generation + 1, content_hash=content_hash, applied_unix_s=now_unix_s
            )
            connection.execute(
                "UPDATE policy_generation SET generation = ?, content_hash = ?, applied_unix_s = ?",
                (following.generation, following.content_hash, following.applied_unix_s),
            )
            return following

        return await self._access.write(job)


def _generation(row: tuple[int, str, float]) -> PolicyGeneration:
    return PolicyGeneration(generation=row[0], content_hash=row[1], applied_unix_s=row[2])
