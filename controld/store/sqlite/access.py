"""How the aggregates reach the file: jobs for the writer, queries in reader threads."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from controld.store.errors import StoreError
from controld.store.sqlite.failure import store_error
from controld.store.sqlite.opening import connect_reader
from controld.store.sqlite.writer import Writer

_T = TypeVar("_T")

READER_THREADS = 2


class Access:
    """Writes through one thread, reads on connections that cannot write.

    A query is fetched whole inside its thread, so a caller that is cancelled leaves no cursor open behind which the
    write-ahead log could not be emptied.

    Args:
        connection: the one that writes; owned from here on.
        path: the file.
        on_corruption: called from any thread when SQLite says that the file is damaged.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, on_corruption: Callable[[], None]) -> None:
        self.path = path
        self.writer = Writer(connection, path, on_corruption)
        self._on_corruption = on_corruption
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        self._closed = False

    async def write(self, job: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a job in the writer and return after its commit. Raises: StoreError, or what the job raises."""
        return await self.writer.run(job)

    async def read(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, from a reader thread. Raises: StoreError."""
        return await self.in_reader(lambda: self._fetch(query, parameters))

    async def in_reader(self, work: Callable[[], _T]) -> _T:
        """Run something that blocks in a reader thread. Raises: StoreError: closed."""
        if self._closed:
            raise StoreError("the store is closed", code="store.closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _fetch(self, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            connection = getattr(self._local, "connection", None)
            if connection is None:
                connection = connect_reader(self.path)
                self._local.connection = connection
                with self._connections_lock:
                    self._connections.append(connection)
            return connection.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            typed = store_error(error, self.path)
            if typed.code == "store.corrupt":
                self._on_corruption()
            raise typed from error

    def close(self) -> None:
        """Finish what is queued. Blocks."""
        self._closed = True
        self._readers.shutdown()
        with self._connections_lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self.writer.close()
