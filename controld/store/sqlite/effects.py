"""Effects in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from controld.contract.effect import Effect, Half, Path, Verdict
from controld.store.records import EffectColumn, EffectCount, EffectFilter, EffectRecord
from controld.store.sqlite.access import Access

_EFFECT_COLUMNS = tuple(field.name for field in fields(Effect))
_COLUMNS = ("agent_id", "instance_id", "seq", "received_unix_s", *_EFFECT_COLUMNS)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM effects"
_INSERT = (
    f"INSERT INTO effects ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    " ON CONFLICT (agent_id, instance_id, seq) DO NOTHING"
)
_EVERYTHING = EffectFilter()

PRUNE_EVERY = 4096
"""The table is trimmed once in so many new rows, which costs less than counting at each."""


class SqliteEffects:
    """Implements `Effects`.

    Args:
        retain: how many effects are kept; the oldest go first.
    """

    def __init__(self, access: Access, *, retain: int) -> None:
        self._access = access
        self._retain = retain
        self._until_prune = 0

    async def append(
        self, agent_id: str, instance_id: str, records: Sequence[EffectRecord], *, up_to_seq: int
    ) -> tuple[EffectRecord, ...]:
        def job(connection: sqlite3.Connection) -> tuple[EffectRecord, ...]:
            new = tuple(record for record in records if connection.execute(_INSERT, _row(record)).rowcount == 1)
            connection.execute(
                "INSERT INTO effect_progress VALUES (?, ?, ?) ON CONFLICT (agent_id, instance_id)"
                " DO UPDATE SET up_to_seq = max(up_to_seq, excluded.up_to_seq)",
                (agent_id, instance_id, up_to_seq),
            )
            self._prune(connection, len(new))
            return new

        return await self._access.write(job)

    def _prune(self, connection: sqlite3.Connection, added: int) -> None:
        self._until_prune -= added
        if self._until_prune <= 0:
            self._until_prune = min(PRUNE_EVERY, self._retain)
            connection.execute("DELETE FROM effects WHERE id <= (SELECT max(id) FROM effects) - ?", (self._retain,))

    async def acked_up_to(self, agent_id: str, instance_id: str) -> int:
        rows = await self._access.read(
            "SELECT up_to_seq FROM effect_progress WHERE agent_id = ? AND instance_id = ?",
            (agent_id, instance_id),
        )
        return int(rows[0][0]) if rows else 0

    async def by_transfer(self, transfer_id: str) -> tuple[EffectRecord, ...]:
        rows = await self._access.read(
            f"{_SELECT} WHERE transfer_id = ? ORDER BY half = 'receiver', id", (transfer_id,)
        )
        return tuple(_record(row) for row in rows)

    async def recent(self, limit: int, where: EffectFilter = _EVERYTHING) -> tuple[EffectRecord, ...]:
        condition, parameters = _where(where)
        rows = await self._access.read(
            f"{_SELECT} WHERE {condition} ORDER BY id DESC LIMIT ?", (*parameters, max(0, limit))
        )
        return tuple(_record(row) for row in rows)

    async def after(self, position: int, limit: int) -> tuple[tuple[int, EffectRecord], ...]:
        columns = ", ".join((*_COLUMNS, "id"))
        rows = await self._access.read(
            f"SELECT {columns} FROM effects WHERE id > ? ORDER BY id LIMIT ?", (position, max(0, limit))
        )
        return tuple((row[-1], _record(row[:-1])) for row in rows)

    async def counts(self, by: Sequence[EffectColumn], where: EffectFilter = _EVERYTHING) -> tuple[EffectCount, ...]:
        condition, parameters = _where(where)
        columns = ", ".join(column.value for column in by)
        group = f" GROUP BY {columns}" if by else ""
        rows = await self._access.read(
            f"SELECT {columns}{', ' if by else ''}count(*) AS n,"
            # Not `sum`: over integers it fails when a lying agent's bytes overflow it.
            " CAST(total(raw_bytes) AS INTEGER), CAST(total(wire_bytes) AS INTEGER) FROM effects"
            f" WHERE {condition}{group} ORDER BY n DESC{', ' if by else ''}{columns}",
            parameters,
        )
        return tuple(
            EffectCount(values=row[:-3], effects=row[-3], raw_bytes=row[-2], wire_bytes=row[-1])
            for row in rows
            if row[-3]
        )

    async def count(self) -> int:
        return int((await self._access.read("SELECT count(*) FROM effects"))[0][0])


def _row(record: EffectRecord) -> tuple[Any, ...]:
    effect = record.effect
    return (
        record.agent_id,
        record.instance_id,
        record.seq,
        record.received_unix_s,
        *(getattr(effect, name) for name in _EFFECT_COLUMNS),
    )


def _record(row: tuple[Any, ...]) -> EffectRecord:
    values = dict(zip(_EFFECT_COLUMNS, row[4:], strict=True))
    values["half"] = Half(values["half"])
    values["path"] = Path(values["path"])
    values["verdict"] = Verdict(values["verdict"])
    values["explored"] = bool(values["explored"])
    return EffectRecord(
        agent_id=row[0], instance_id=row[1], seq=row[2], received_unix_s=row[3], effect=Effect(**values)
    )


def _where(where: EffectFilter) -> tuple[str, tuple[Any, ...]]:
    conditions, parameters = [], []
    for field in fields(EffectFilter):
        value = getattr(where, field.name)
        if value is None:
            continue
        since = field.name == "received_since_unix_s"
        conditions.append("received_unix_s >= ?" if since else f"{field.name} = ?")
        parameters.append(value)
    return " AND ".join(conditions) or "1", tuple(parameters)
