"""The one thread that writes, with group commit: whatever waits when a transaction begins shares its fsync."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from controld.store.errors import StoreError
from controld.store.sqlite.failure import store_error

_T = TypeVar("_T")
_Job = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]

MAX_JOBS_PER_COMMIT = 256
"""Bounds how long the first caller of a group waits for the others."""


class Writer:
    """Runs jobs one after another in its own thread, each in a savepoint, many in one transaction.

    A job's future is resolved after the commit that holds it. A job that raises takes back its own changes only; a
    failed commit fails every job of its group. A job cancelled before its turn is not run.

    Args:
        connection: in autocommit mode, usable from another thread; closed by `close`.
        path: the file, for messages.
        on_corruption: called from the thread when SQLite says that the file is damaged.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, on_corruption: Callable[[], None]) -> None:
        self._connection = connection
        self._path = path
        self._on_corruption = on_corruption
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._submit_lock = threading.Lock()
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[sqlite3.Connection], _T]) -> Future[_T]:
        """Queue a job from any thread.

        Raises:
            StoreError: closed.
        """
        future: Future[_T] = Future()
        with self._submit_lock:
            if self._closed:
                raise StoreError("the store is closed", code="store.closed")
            self._jobs.put((job, future))
        return future

    async def run(self, job: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a job and return after its commit. Raises: StoreError, or what the job raises."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """Run what is queued, then end the thread. Blocks; may be called twice."""
        with self._submit_lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            group, ending = self._next_group()
            if group:
                self._commit(group)
        self._connection.close()

    def _next_group(self) -> tuple[list[_Job], bool]:
        group: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            if job[1].set_running_or_notify_cancel():
                group.append(job)
            if len(group) >= MAX_JOBS_PER_COMMIT:
                return group, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _commit(self, group: list[_Job]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        failed: list[tuple[Future[Any], BaseException]] = []
        lost: StoreError | None = None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job, future in group:
                outcome = self._run_one(job)
                if isinstance(outcome, _Failed):
                    failed.append((future, outcome.error))
                else:
                    done.append((future, outcome))
                if not self._connection.in_transaction:
                    # SQLite gave up the whole transaction (a full disk, an I/O error): nothing of the group is kept.
                    lost = StoreError("the transaction was given up", code="store.io", hint="see the error before")
                    if isinstance(outcome, _Failed) and isinstance(outcome.error, StoreError):
                        lost = outcome.error
                    break
            if lost is None:
                self._connection.execute("COMMIT")
                self.commits += 1
        except sqlite3.Error as error:
            lost = self._typed(error)
        if lost is None:
            for future, result in done:
                future.set_result(result)
            for future, reason in failed:
                future.set_exception(reason)
            return
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                lost = self._typed(error)
        for _, future in group:
            future.set_exception(lost)

    def _run_one(self, job: Callable[[sqlite3.Connection], Any]) -> Any:
        self._connection.execute("SAVEPOINT job")
        try:
            result = job(self._connection)
        except Exception as error:  # noqa: BLE001 - the thread's edge: handed to the caller whole
            failure: BaseException = self._typed(error) if isinstance(error, sqlite3.Error) else error
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK TO job")
                self._connection.execute("RELEASE job")
            return _Failed(failure)
        self._connection.execute("RELEASE job")
        return result

    def _typed(self, error: sqlite3.Error) -> StoreError:
        typed = store_error(error, self._path)
        if typed.code == "store.corrupt":
            self._on_corruption()
        return typed


class _Failed:
    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error
