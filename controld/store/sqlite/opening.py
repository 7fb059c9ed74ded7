"""From a state directory to a usable database, whatever a crash or a person left in it.

```
lock the directory ──► file there? ──no──► backup there? ──no──► create empty
                           │ yes               │ yes (only after damage)
                           ▼                   ▼
                       usable? ──no──► set aside, restore the backup, alarm
                           │ yes
                           ▼
                        migrate
```
A new file is built under another name and renamed, so a crash never leaves a half-made one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from controld.store.errors import StoreError
from controld.store.records import Damage
from controld.store.sqlite.failure import store_error
from controld.store.sqlite.schema import SCHEMA_VERSION, migrate, schema_version

DATABASE = "controld.db"
BACKUP = "controld.db.backup"
SUSPECT = "controld.db.suspect"
LOCK = "lock"

FULL_CHECK_BYTES = 64 * 1024 * 1024
"""Up to this size every page is checked at each start; above it only when the last run saw damage."""

VERSIONS_SKIPPED_AFTER_DAMAGE = 1_000_000
"""A backup may lack the newest versions; a number that agents have seen must not come again with other content."""

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_BUSY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A usable database.

    Args:
        connection: the only one that may write.
        lock: file descriptor that holds the directory's lock until it is closed.
        damage: what had to be set aside; None in the usual case.
    """

    connection: sqlite3.Connection
    lock: int
    damage: Damage | None


def open_database(directory: Path, *, now_unix_s: float) -> Opened:
    """Lock the directory and open its database, restoring or creating it where need be.

    Raises:
        StoreError: another daemon has the directory, it cannot be locked or written, or even an empty database cannot
            be made there.
    """
    lock = _lock(directory)
    path = directory / DATABASE
    try:
        damage = None
        if path.exists() or path.is_symlink():
            problem = _problem(path, thorough=(directory / SUSPECT).exists())
            if problem:
                damage = _recover(directory, problem, now_unix_s)
        if not path.exists():
            _create(path)
        connection = connect_writer(path)
        try:
            migrate(connection)
            if damage is not None:
                connection.execute("UPDATE last_version SET number = number + ?", (VERSIONS_SKIPPED_AFTER_DAMAGE,))
        except BaseException:
            connection.close()
            raise
        (directory / SUSPECT).unlink(missing_ok=True)
    except (sqlite3.Error, OSError) as error:
        os.close(lock)
        raise store_error(error, path) from error
    except BaseException:
        os.close(lock)
        raise
    return Opened(connection, lock, damage)


def connect_writer(path: Path) -> sqlite3.Connection:
    """A connection that may write, in autocommit mode, every commit on the disk before it returns."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S, cached_statements=256
    )
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{path}: no write-ahead log on this file system",
                code="store.no_locking",
                hint="put the state directory on a local file system",
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = _connect_read_only(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{_uri_path(path)}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=_BUSY_TIMEOUT_S,
    )


def back_up(path: Path) -> None:
    """Copy the database as it is now to its backup, atomically. Blocks; reads only, so writers go on.

    Raises:
        StoreError: the copy failed; the former backup stays.
    """
    target = path.with_name(BACKUP)
    scratch = path.with_name(BACKUP + ".new")
    try:
        scratch.unlink(missing_ok=True)
        # Not `query_only`, which would forbid writing the copy, too.
        source = _connect_read_only(path)
        try:
            source.execute("VACUUM INTO ?", (str(scratch),))
        finally:
            source.close()
        _sync(scratch)
        scratch.replace(target)
        _sync(path.parent)
    except (sqlite3.Error, OSError) as error:
        scratch.unlink(missing_ok=True)
        raise store_error(error, target) from error


def _lock(directory: Path) -> int:
    path = directory / LOCK
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise store_error(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise StoreError(
                f"another controld (process {holder}) uses the state directory {directory}",
                code="store.locked",
                hint="stop it, or give this one a directory of its own",
            ) from error
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise StoreError(
                f"the file system of {directory} cannot lock files: {error}",
                code="store.no_locking",
                hint="put the state directory on a local file system",
            ) from error
        raise store_error(error, path) from error
    return descriptor


def _problem(path: Path, *, thorough: bool) -> str:
    """What is wrong with the file; empty where it can be used. Changes nothing."""
    if not path.is_file():
        return "not a regular file"
    size = path.stat().st_size
    if size == 0:
        return "empty file"
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header.startswith(_MAGIC):
        return "not an SQLite file" if any(header) else "all zero bytes at its beginning"
    log = path.with_name(path.name + "-wal")
    # With pages still in the log the file may rightly be shorter than it says.
    if not (log.exists() and log.stat().st_size) and size < _stated_bytes(header):
        return f"truncated: {size} bytes of {_stated_bytes(header)}"
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
        try:
            version = schema_version(connection)
            if version > SCHEMA_VERSION:
                return f"schema {version} is newer than this controld's {SCHEMA_VERSION}"
            if version < 1:
                return "holds no schema"
            if thorough or size <= FULL_CHECK_BYTES:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    return str(verdict)
            else:
                connection.execute("SELECT count(*) FROM last_version").fetchone()
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        if store_error(error, path).code in ("store.corrupt", "store.failed"):
            return str(error)
        raise
    return ""


def _stated_bytes(header: bytes) -> int:
    """How long the file says it is (https://sqlite.org/fileformat2.html, sections 1.3.2 and 1.3.8); 0: it does not."""
    if len(header) < _HEADER_BYTES:
        return _HEADER_BYTES
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    valid = header[24:28] == header[92:96]
    return page_bytes * int.from_bytes(header[28:32], "big") if valid else 0


def _recover(directory: Path, problem: str, now_unix_s: float) -> Damage:
    path, backup = directory / DATABASE, directory / BACKUP
    set_aside = _free_name(directory, f"{DATABASE}.damaged-{int(now_unix_s)}")
    path.rename(set_aside)
    for suffix in ("-wal", "-shm"):
        # A log of the damaged file must not be replayed into its successor.
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(set_aside.with_name(set_aside.name + suffix))
    restored = ""
    if backup.exists() and not _problem(backup, thorough=True):
        scratch = path.with_name(DATABASE + ".new")
        scratch.write_bytes(backup.read_bytes())
        _sync(scratch)
        scratch.rename(path)
        restored = str(backup)
    _sync(directory)
    return Damage(problem=problem, set_aside=str(set_aside), restored_from=restored)


def _create(path: Path) -> None:
    scratch = path.with_name(path.name + ".new")
    for leftover in path.parent.glob(scratch.name + "*"):
        leftover.unlink()
    for suffix in ("-wal", "-shm"):
        # Without its database a log is of no use, and would be taken for the new one's.
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    connection = connect_writer(scratch)
    try:
        migrate(connection)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    _sync(scratch)
    scratch.rename(path)
    _sync(path.parent)


def _free_name(directory: Path, name: str) -> Path:
    candidate, number = directory / name, 1
    while candidate.exists():
        candidate, number = directory / f"{name}-{number}", number + 1
    return candidate


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _uri_path(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
