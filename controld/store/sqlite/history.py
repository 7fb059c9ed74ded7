"""Published versions, studies and the audit trail in SQLite."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence

from controld.contract.clock import Clock
from controld.store.errors import ConflictError, GoneError, NotFoundError
from controld.store.records import AuditEvent, AuditRecord, StudyRecord, TrialChange, TrialRecord, VersionRecord
from controld.store.sqlite.access import Access

_VERSION_COLUMNS = "number, kind, deployment, policy_generation, created_unix_s, tables_zlib, explanations_zlib"
_TRIAL_COLUMNS = "study_id, trial_id, state, spec, result, updated_unix_s"


class SqliteVersions:
    """Implements `Versions`.

    Args:
        retain, retain_s: a version goes when it is older than either, unless it is the last one of its selector.
    """

    def __init__(self, access: Access, clock: Clock, *, retain: int, retain_s: float) -> None:
        self._access = access
        self._clock = clock
        self._retain = retain
        self._retain_s = retain_s

    async def last_number(self) -> int:
        return int((await self._access.read("SELECT number FROM last_version"))[0][0])

    async def append(self, record: VersionRecord) -> None:
        # Compressed outside the writer: effects wait behind it.
        tables, explanations = await self._access.in_reader(
            lambda: (zlib.compress(record.tables_json.encode()), zlib.compress(record.explanations_json.encode()))
        )
        oldest_unix_s = self._clock.unix_s() - self._retain_s

        def job(connection: sqlite3.Connection) -> None:
            last = connection.execute("SELECT number FROM last_version").fetchone()[0]
            if record.number != last + 1:
                raise ConflictError("version", expected=record.number - 1, actual=last)
            connection.execute(
                f"INSERT INTO versions ({_VERSION_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    record.number,
                    record.kind,
                    record.deployment,
                    record.policy_generation,
                    record.created_unix_s,
                    tables,
                    explanations,
                ),
            )
            connection.execute("UPDATE last_version SET number = ?", (record.number,))
            connection.execute(
                "DELETE FROM versions WHERE (number <= ? OR created_unix_s < ?) AND number NOT IN"
                " (SELECT max(number) FROM versions GROUP BY kind, deployment)",
                (record.number - self._retain, oldest_unix_s),
            )

        await self._access.write(job)

    async def get(self, number: int) -> VersionRecord:
        rows = await self._access.read(f"SELECT {_VERSION_COLUMNS} FROM versions WHERE number = ?", (number,))
        if rows:
            return _version(rows[0])
        if 1 <= number <= await self.last_number():
            raise GoneError(f"version {number}", f"{self._retain} versions of the last {self._retain_s / 3600:g} hours")
        raise NotFoundError(f"version {number}")

    async def latest(self, kind: str, deployment: str) -> VersionRecord | None:
        rows = await self._access.read(
            f"SELECT {_VERSION_COLUMNS} FROM versions WHERE kind = ? AND deployment = ? ORDER BY number DESC LIMIT 1",
            (kind, deployment),
        )
        return _version(rows[0]) if rows else None


def _version(row: tuple[int, str, str, int, float, bytes, bytes]) -> VersionRecord:
    return VersionRecord(
        number=row[0],
        kind=row[1],
        deployment=row[2],
        policy_generation=row[3],
        created_unix_s=row[4],
        tables_json=zlib.decompress(row[5]).decode(),
        explanations_json=zlib.decompress(row[6]).decode(),
    )


class SqliteStudies:
    """Implements `Studies`."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock

    async def create(self, study: StudyRecord, trials: Sequence[TrialRecord] = ()) -> None:
        def job(connection: sqlite3.Connection) -> None:
            state = _study_state(connection, study.study_id)
            if state is not None:
                raise ConflictError(f"study {study.study_id}", expected="none", actual=state)
            connection.execute(
                "INSERT INTO studies (study_id, kind, state, spec, created_unix_s) VALUES (?, ?, ?, ?, ?)",
                (study.study_id, study.kind, study.state, study.spec, study.created_unix_s),
            )
            _insert_trials(connection, trials)

        await self._access.write(job)

    async def get(self, study_id: str) -> StudyRecord:
        rows = await self._access.read(
            "SELECT study_id, kind, state, spec, created_unix_s FROM studies WHERE study_id = ?", (study_id,)
        )
        if not rows:
            raise NotFoundError(f"study {study_id}")
        return _study(rows[0])

    async def list(self) -> tuple[StudyRecord, ...]:
        rows = await self._access.read(
            "SELECT study_id, kind, state, spec, created_unix_s FROM studies ORDER BY created_unix_s DESC, rowid DESC"
        )
        return tuple(_study(row) for row in rows)

    async def transition(self, study_id: str, *, expected: str, state: str, trials: Sequence[TrialChange] = ()) -> None:
        now_unix_s = self._clock.unix_s()

        def job(connection: sqlite3.Connection) -> None:
            actual = _study_state(connection, study_id)
            _expect(f"study {study_id}", expected, actual)
            connection.execute("UPDATE studies SET state = ? WHERE study_id = ?", (state, study_id))
            for change in trials:
                _change_trial(connection, study_id, change, now_unix_s)

        await self._access.write(job)

    async def add_trials(self, trials: Sequence[TrialRecord]) -> None:
        await self._access.write(lambda connection: _insert_trials(connection, trials))

    async def transition_trial(self, study_id: str, change: TrialChange) -> None:
        now_unix_s = self._clock.unix_s()
        await self._access.write(lambda connection: _change_trial(connection, study_id, change, now_unix_s))

    async def trials(self, study_id: str) -> tuple[TrialRecord, ...]:
        rows = await self._access.read(
            f"SELECT {_TRIAL_COLUMNS} FROM trials WHERE study_id = ? ORDER BY id", (study_id,)
        )
        return tuple(
            TrialRecord(
                study_id=row[0],
                trial_id=row[1],
                state=row[2],
                spec=row[3],
                result=row[4],
                updated_unix_s=row[5],
            )
            for row in rows
        )


def _study(row: tuple[str, str, str, str, float]) -> StudyRecord:
    return StudyRecord(study_id=row[0], kind=row[1], state=row[2], spec=row[3], created_unix_s=row[4])


def _study_state(connection: sqlite3.Connection, study_id: str) -> str | None:
    row = connection.execute("SELECT state FROM studies WHERE study_id = ?", (study_id,)).fetchone()
    return row[0] if row else None


def _trial_state(connection: sqlite3.Connection, study_id: str, trial_id: str) -> str | None:
    row = connection.execute(
        "SELECT state FROM trials WHERE study_id = ? AND trial_id = ?", (study_id, trial_id)
    ).fetchone()
    return row[0] if row else None


def _insert_trials(connection: sqlite3.Connection, trials: Sequence[TrialRecord]) -> None:
    for trial in trials:
        if _study_state(connection, trial.study_id) is None:
            raise NotFoundError(f"study {trial.study_id}")
        state = _trial_state(connection, trial.study_id, trial.trial_id)
        if state is not None:
            raise ConflictError(f"trial {trial.study_id}/{trial.trial_id}", expected="none", actual=state)
        connection.execute(
            f"INSERT INTO trials ({_TRIAL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            (trial.study_id, trial.trial_id, trial.state, trial.spec, trial.result, trial.updated_unix_s),
        )


def _change_trial(connection: sqlite3.Connection, study_id: str, change: TrialChange, now_unix_s: float) -> None:
    actual = _trial_state(connection, study_id, change.trial_id)
    _expect(f"trial {study_id}/{change.trial_id}", change.expected, actual)
    connection.execute(
        "UPDATE trials SET state = ?, result = ?, updated_unix_s = ? WHERE study_id = ? AND trial_id = ?",
        (change.state, change.result, now_unix_s, study_id, change.trial_id),
    )


def _expect(what: str, expected: str, actual: str | None) -> None:
    if actual is None:
        raise NotFoundError(what)
    if actual != expected:
        raise ConflictError(what, expected=expected, actual=actual)


class SqliteAudit:
    """Implements `Audit`.

    Args:
        retain: how many lines are kept; the oldest go first.
    """

    def __init__(self, access: Access, clock: Clock, *, retain: int) -> None:
        self._access = access
        self._clock = clock
        self._retain = retain

    async def append(self, event: AuditEvent, document: str) -> None:
        now_unix_s = self._clock.unix_s()

        def job(connection: sqlite3.Connection) -> None:
            sequence = connection.execute(
                "INSERT INTO audit (event, document, at_unix_s) VALUES (?, ?, ?)",
                (event.value, document, now_unix_s),
            ).lastrowid
            connection.execute("DELETE FROM audit WHERE sequence <= ?", ((sequence or 0) - self._retain,))

        await self._access.write(job)

    async def recent(self, limit: int, event: AuditEvent | None = None) -> tuple[AuditRecord, ...]:
        condition, parameters = ("event = ?", (event.value,)) if event is not None else ("1", ())
        rows = await self._access.read(
            f"SELECT sequence, event, document, at_unix_s FROM audit WHERE {condition} ORDER BY sequence DESC LIMIT ?",
            (*parameters, max(0, limit)),
        )
        return tuple(
            AuditRecord(sequence=row[0], event=AuditEvent(row[1]), document=row[2], at_unix_s=row[3]) for row in rows
        )
