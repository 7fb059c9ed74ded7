"""One writer thread: group commit, isolation of jobs, readers that pin nothing."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controld.store.errors import ConflictError, StoreError
from controld.store.records import AuditEvent, PosteriorRecord
from controld.store.sqlite import SqliteStore
from controld.store.sqlite.opening import BACKUP, DATABASE, connect_reader


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path)
    yield opened
    await opened.close()


def put(store: SqliteStore, key: str, version: int = 0) -> asyncio.Task[None]:
    return asyncio.create_task(store.posteriors.put([PosteriorRecord(key=key, version=version, document="x")]))


async def test_waiting_writes_share_a_commit_and_each_is_durable_when_it_returns(
    store: SqliteStore, tmp_path: Path
) -> None:
    before = store.commits
    await asyncio.gather(*(put(store, f"k{i}") for i in range(200)))
    assert store.commits - before < 20
    other = connect_reader(tmp_path / DATABASE)
    assert other.execute("SELECT count(*) FROM posteriors").fetchone() == (200,)
    other.close()


async def test_a_job_that_fails_takes_only_itself_back(store: SqliteStore) -> None:
    outcomes = await asyncio.gather(
        put(store, "a"), put(store, "b", version=7), put(store, "c"), return_exceptions=True
    )
    assert outcomes[0] is None and isinstance(outcomes[1], ConflictError) and outcomes[2] is None
    assert [r.key for r in await store.posteriors.list()] == ["a", "c"]


async def test_a_bug_in_a_job_reaches_its_caller_and_nobody_else(store: SqliteStore) -> None:
    def bug(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO posteriors VALUES ('half', 1, '')")
        raise ZeroDivisionError

    outcomes = await asyncio.gather(store._access.write(bug), put(store, "good"), return_exceptions=True)
    assert isinstance(outcomes[0], ZeroDivisionError) and outcomes[1] is None
    assert [r.key for r in await store.posteriors.list()] == ["good"]


async def test_wrong_sql_is_a_typed_error(store: SqliteStore) -> None:
    with pytest.raises(StoreError) as caught:
        await store._access.write(lambda connection: connection.execute("no such statement"))
    assert caught.value.code == "store.failed"
    with pytest.raises(StoreError):
        await store._access.read("SELECT * FROM nowhere")
    with pytest.raises(StoreError) as caught:
        await store._access.read("DELETE FROM audit")
    assert caught.value.code == "store.read_only"


async def test_a_write_cancelled_before_its_turn_is_not_run(store: SqliteStore) -> None:
    begun, may_end = threading.Event(), threading.Event()
    blocker = asyncio.create_task(store._access.write(lambda _: (begun.set(), may_end.wait(30))))
    await asyncio.to_thread(begun.wait, 30)
    cancelled, kept = put(store, "cancelled"), put(store, "kept")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    may_end.set()
    await asyncio.gather(blocker, kept)
    assert [r.key for r in await store.posteriors.list()] == ["kept"]


async def test_cancelled_reads_do_not_pin_the_log(store: SqliteStore, tmp_path: Path) -> None:
    await asyncio.gather(*(put(store, f"k{i}") for i in range(500)))
    reads = [asyncio.create_task(store.posteriors.list()) for _ in range(50)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await store.posteriors.list()
    busy, _, _ = await asyncio.to_thread(_checkpoint, tmp_path / DATABASE)
    assert busy == 0
    assert (tmp_path / f"{DATABASE}-wal").stat().st_size == 0


def _checkpoint(path: Path) -> tuple[int, int, int]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        busy, frames, done = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return busy, frames, done
    finally:
        connection.close()


async def test_readers_go_on_while_eight_tasks_write(store: SqliteStore) -> None:
    stop = False

    async def write(number: int) -> int:
        version = 0
        while not stop:
            await store.posteriors.put([PosteriorRecord(key=f"w{number}", version=version, document="x" * 500)])
            version += 1
        return version

    writers = [asyncio.create_task(write(number)) for number in range(8)]
    reads, slowest_s, until_s = 0, 0.0, time.monotonic() + 0.5
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        await store.posteriors.list()
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        reads += 1
    stop = True
    versions = await asyncio.gather(*writers)
    assert min(versions) > 0 and reads > 10 and slowest_s < 5.0
    assert [r.version for r in await store.posteriors.list()] == list(versions)


async def test_the_backup_is_a_whole_store(store: SqliteStore, tmp_path: Path) -> None:
    await store.audit.append(AuditEvent.DAEMON_STARTED, "{}")
    await store.back_up()
    await store.audit.append(AuditEvent.DAEMON_STOPPED, "{}")
    await store.back_up()
    copy = connect_reader(tmp_path / BACKUP)
    assert copy.execute("SELECT event FROM audit ORDER BY sequence").fetchall() == [
        ("daemon_started",),
        ("daemon_stopped",),
    ]
    assert copy.execute("PRAGMA user_version").fetchone()[0] > 0
    copy.close()


async def test_the_backup_is_renewed_by_itself(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "other", backup_interval_s=0.02)
    async with asyncio.timeout(30):
        while not (tmp_path / "other" / BACKUP).exists():
            await asyncio.sleep(0.01)
    await store.close()


async def test_all_writers_of_a_closed_loop_are_finished(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "other")
    writes = [put(store, f"k{i}") for i in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    again = await SqliteStore.open(tmp_path / "other")
    assert len(await again.posteriors.list()) == 50
    await again.close()
