"""The tables, as migrations: `user_version` says how many were applied. A migration is never edited once released."""

from __future__ import annotations

import sqlite3

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE profiles (
            model_fingerprint TEXT NOT NULL, workload TEXT NOT NULL, config_id TEXT NOT NULL,
            sender_hardware TEXT NOT NULL, receiver_hardware TEXT NOT NULL,
            document TEXT NOT NULL, updated_unix_s REAL NOT NULL,
            PRIMARY KEY (model_fingerprint, workload, config_id, sender_hardware, receiver_hardware)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE posteriors (
            key TEXT PRIMARY KEY, version INTEGER NOT NULL, document TEXT NOT NULL
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE effects (
            id INTEGER PRIMARY KEY,
            agent_id TEXT NOT NULL, instance_id TEXT NOT NULL, seq INTEGER NOT NULL, received_unix_s REAL NOT NULL,
            transfer_id TEXT NOT NULL, half TEXT NOT NULL, arm_id TEXT NOT NULL, table_version INTEGER NOT NULL,
            service_class TEXT NOT NULL, tier TEXT NOT NULL, link_group TEXT NOT NULL,
            tokens INTEGER NOT NULL, chunks INTEGER NOT NULL, raw_bytes INTEGER NOT NULL, wire_bytes INTEGER NOT NULL,
            encode_s REAL NOT NULL, wire_s REAL NOT NULL, decode_s REAL NOT NULL, wait_s REAL NOT NULL,
            total_s REAL NOT NULL, path TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL,
            expected_bytes REAL NOT NULL, bandwidth_bytes_per_s REAL NOT NULL, load REAL NOT NULL,
            explored INTEGER NOT NULL, finished_unix_s REAL NOT NULL,
            UNIQUE (agent_id, instance_id, seq)
        ) STRICT""",
        "CREATE INDEX effects_transfer ON effects (transfer_id)",
        """CREATE TABLE effect_progress (
            agent_id TEXT NOT NULL, instance_id TEXT NOT NULL, up_to_seq INTEGER NOT NULL,
            PRIMARY KEY (agent_id, instance_id)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE versions (
            number INTEGER PRIMARY KEY, kind TEXT NOT NULL, deployment TEXT NOT NULL,
            policy_generation INTEGER NOT NULL, created_unix_s REAL NOT NULL,
            tables_zlib BLOB NOT NULL, explanations_zlib BLOB NOT NULL
        ) STRICT""",
        "CREATE INDEX versions_selector ON versions (kind, deployment, number)",
        "CREATE INDEX versions_created ON versions (created_unix_s)",
        # Apart from the rows: it outlives them.
        "CREATE TABLE last_version (id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL) STRICT",
        "INSERT INTO last_version VALUES (1, 0)",
        """CREATE TABLE policy_generation (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            generation INTEGER NOT NULL, content_hash TEXT NOT NULL, applied_unix_s REAL NOT NULL
        ) STRICT""",
        "INSERT INTO policy_generation VALUES (1, 0, '', 0.0)",
        """CREATE TABLE studies (
            study_id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL, spec TEXT NOT NULL,
            created_unix_s REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE trials (
            id INTEGER PRIMARY KEY, study_id TEXT NOT NULL REFERENCES studies (study_id), trial_id TEXT NOT NULL,
            state TEXT NOT NULL, spec TEXT NOT NULL, result TEXT NOT NULL, updated_unix_s REAL NOT NULL,
            UNIQUE (study_id, trial_id)
        ) STRICT""",
        """CREATE TABLE audit (
            sequence INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, document TEXT NOT NULL,
            at_unix_s REAL NOT NULL
        ) STRICT""",
    ),
    ("ALTER TABLE effects ADD COLUMN reconstruction_error REAL",),
)

SCHEMA_VERSION = len(MIGRATIONS)


def schema_version(connection: sqlite3.Connection) -> int:
    """How many migrations the file has seen."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Apply what is missing, each migration whole or not at all."""
    for number in range(schema_version(connection), SCHEMA_VERSION):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
