"""A state file of an earlier release is taken over as it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from controld.store.sqlite import SqliteStore
from controld.store.sqlite.opening import DATABASE
from controld.store.sqlite.schema import MIGRATIONS, SCHEMA_VERSION, schema_version


async def test_effects_of_the_first_schema_come_back_without_what_it_did_not_know(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    connection = sqlite3.connect(path)
    for statement in MIGRATIONS[0]:
        connection.execute(statement)
    connection.execute("PRAGMA user_version = 1")
    connection.execute(
        "INSERT INTO effects VALUES (1, 'a', 'i', 1, 5.0, 't1', 'sender', 'raw', 7, 'chat', 'pd', 'default', 12, 1,"
        " 9, 9, 0.1, 0.2, 0.3, 0.0, 0.6, 'raw', 'verified', '', 0.0, 0.0, 0.0, 0, 4.0)"
    )
    connection.commit()
    connection.close()

    store = await SqliteStore.open(tmp_path)
    assert store.damage is None
    ((_, kept),) = await store.effects.after(0, 10)
    assert (kept.effect.transfer_id, kept.effect.reconstruction_error) == ("t1", None)
    await store.close()
    connection = sqlite3.connect(path)
    assert schema_version(connection) == SCHEMA_VERSION > 1
    connection.close()
