"""Durable state in one SQLite file: one writer thread with group commit, read-only connections for readers."""

from controld.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
