"""SQLite's and the system's errors as ours, by what the operator can do about them."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from controld.store.errors import StoreError

_BY_PRIMARY_CODE = {
    sqlite3.SQLITE_FULL: ("store.disk_full", "the disk is full", "free space; learning goes on by itself afterwards"),
    sqlite3.SQLITE_READONLY: ("store.read_only", "the state is read-only", "check mount options and ownership"),
    sqlite3.SQLITE_CANTOPEN: ("store.read_only", "the state file cannot be opened", "check ownership and mode"),
    sqlite3.SQLITE_CORRUPT: ("store.corrupt", "the state file is damaged", "a restart sets it aside"),
    sqlite3.SQLITE_NOTADB: ("store.corrupt", "the state file is not a database", "a restart sets it aside"),
    sqlite3.SQLITE_IOERR: ("store.io", "reading or writing the state failed", "check the disk and the kernel log"),
    sqlite3.SQLITE_BUSY: ("store.busy", "another process holds the state file", "end it"),
    sqlite3.SQLITE_LOCKED: ("store.busy", "another process holds the state file", "end it"),
    sqlite3.SQLITE_CONSTRAINT: ("store.constraint", "a row breaks a constraint", ""),
}

_BY_ERRNO = {
    errno.ENOSPC: ("store.disk_full", "the disk is full", "free space"),
    errno.EDQUOT: ("store.disk_full", "the quota is used up", "free space"),
    errno.EROFS: ("store.read_only", "the file system is read-only", "remount it, or choose another state directory"),
    errno.EACCES: ("store.read_only", "permission denied", "check the owner of the state directory"),
    errno.EPERM: ("store.read_only", "permission denied", "check the owner of the state directory"),
}


def store_error(error: sqlite3.Error | OSError, path: Path) -> StoreError:
    """The typed error; the original's text is kept in the message."""
    if isinstance(error, OSError):
        code, what, hint = _BY_ERRNO.get(error.errno or 0, ("store.io", "the file system refused", ""))
        return StoreError(f"{what}: {error}", code=code, hint=hint)
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    code, what, hint = _BY_PRIMARY_CODE.get(primary, ("store.failed", "the state could not be used", ""))
    return StoreError(f"{what}: {path}: {error}", code=code, hint=hint)
