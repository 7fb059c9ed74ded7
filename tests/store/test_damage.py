"""Whatever a crash, a full disk or a person does to the state directory: typed errors, and a start that works."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controld.contract.clock import ManualClock
from controld.store.errors import GoneError, StoreError
from controld.store.records import AuditEvent, PosteriorRecord, VersionRecord
from controld.store.sqlite import SqliteStore
from controld.store.sqlite.opening import BACKUP, DATABASE, SUSPECT, VERSIONS_SKIPPED_AFTER_DAMAGE
from controld.store.sqlite.schema import SCHEMA_VERSION


def version(number: int) -> VersionRecord:
    return VersionRecord(
        number=number,
        kind="sglang",
        deployment="chat",
        policy_generation=1,
        created_unix_s=ManualClock().unix_s(),
        tables_json="[]",
        explanations_json="{}",
    )


async def filled(directory: Path, *, backup: bool) -> None:
    store = await SqliteStore.open(directory, clock=ManualClock())
    await store.posteriors.put([PosteriorRecord(key=f"k{i}", version=0, document="x" * 1000) for i in range(200)])
    await store.versions.append(version(1))
    if backup:
        await store.back_up()
    await store.versions.append(version(2))
    await store.close()


def zero_bytes(path: Path) -> None:
    path.write_bytes(b"")


def nul_filled(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def half_json(path: Path) -> None:
    path.write_text('{"version": 4, "posteriors": [{"ke')


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncated_in_a_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def nul_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\0" * 16384)


def future_schema(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    zero_bytes,
    nul_filled,
    garbage,
    half_json,
    truncated,
    truncated_in_a_page,
    nul_pages,
    future_schema,
    a_directory,
]


@pytest.mark.parametrize("backup", [True, False], ids=["backup", "no backup"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_a_damaged_file_is_set_aside_and_the_last_good_taken(
    tmp_path: Path, damage: Callable[[Path], None], backup: bool
) -> None:
    await filled(tmp_path, backup=backup)
    damage(tmp_path / DATABASE)
    store = await SqliteStore.open(tmp_path)
    try:
        assert store.damage is not None
        assert Path(store.damage.set_aside).exists() and store.damage.problem
        (alarm,) = await store.audit.recent(1, AuditEvent.STORE_DAMAGED)
        assert store.damage.set_aside in alarm.document
        assert len(await store.posteriors.list()) == (200 if backup else 0)
        assert bool(store.damage.restored_from) == backup
        # A number that agents may have seen never comes again.
        number = await store.versions.last_number()
        assert number == (1 if backup else 0) + VERSIONS_SKIPPED_AFTER_DAMAGE
        await store.versions.append(version(number + 1))
        with pytest.raises(GoneError):
            await store.versions.get(2)
    finally:
        await store.close()
    again = await SqliteStore.open(tmp_path)
    assert again.damage is None
    await again.close()


async def test_a_damaged_backup_is_not_taken(tmp_path: Path) -> None:
    await filled(tmp_path, backup=True)
    garbage(tmp_path / DATABASE)
    garbage(tmp_path / BACKUP)
    store = await SqliteStore.open(tmp_path)
    assert store.damage is not None and store.damage.restored_from == ""
    assert await store.posteriors.list() == ()
    await store.close()


async def test_damage_found_while_running_has_the_next_start_check_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(tmp_path, backup=True)
    monkeypatch.setattr("controld.store.sqlite.opening.FULL_CHECK_BYTES", 0)
    with (tmp_path / DATABASE).open("r+b") as file:
        file.seek(4096 * 20)
        file.write(os.urandom(4096 * 60))
    store = await SqliteStore.open(tmp_path)
    assert store.damage is None, "a large file is not read whole at each start"
    with pytest.raises(StoreError) as caught:
        await store.posteriors.list()
    assert caught.value.code == "store.corrupt"
    await store.close()
    assert (tmp_path / SUSPECT).exists()
    store = await SqliteStore.open(tmp_path)
    assert store.damage is not None and len(await store.posteriors.list()) == 200
    await store.close()


async def test_a_log_of_the_damaged_file_is_not_replayed_into_its_successor(tmp_path: Path) -> None:
    await filled(tmp_path, backup=False)
    (tmp_path / f"{DATABASE}-wal").write_bytes(b"left over" * 1000)
    zero_bytes(tmp_path / DATABASE)
    store = await SqliteStore.open(tmp_path)
    assert store.damage is not None
    assert Path(store.damage.set_aside + "-wal").exists()
    await store.close()


async def test_a_second_daemon_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    script = (
        "import asyncio, pathlib, sys\n"
        "from controld.store.errors import StoreError\n"
        "from controld.store.sqlite import SqliteStore\n"
        "try: asyncio.run(SqliteStore.open(pathlib.Path(sys.argv[1])))\n"
        "except StoreError as error: print(error.code, error)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path)]
    second = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert second.stdout.startswith("store.locked") and str(os.getpid()) in second.stdout, second.stderr
    await store.posteriors.put([PosteriorRecord(key="k", version=0, document="")])
    await store.close()
    third = await SqliteStore.open(tmp_path)
    assert await third.posteriors.get("k") is not None
    await third.close()


async def test_a_full_disk_is_a_typed_error_and_heals_by_itself(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path)
    pages = await store._access.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    # SQLite's own limit gives the same error as the disk.
    await store._access.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    small, large = PosteriorRecord(key="a", version=0, document=""), "x" * 100_000
    await store.posteriors.put([small])
    with pytest.raises(StoreError) as caught:
        await store.posteriors.put([PosteriorRecord(key="b", version=0, document=large)])
    assert caught.value.code == "store.disk_full"
    assert [r.key for r in await store.posteriors.list()] == ["a"]
    await store._access.write(lambda c: c.execute("PRAGMA max_page_count = 1000000").fetchone())
    await store.posteriors.put([PosteriorRecord(key="b", version=0, document=large)])
    assert [r.key for r in await store.posteriors.list()] == ["a", "b"]
    await store.close()


def test_a_state_directory_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    # As another user than root, who may write anything.
    tmp_path.chmod(0o755)
    target = tmp_path / "state"
    target.mkdir(mode=0o555)
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from controld.store.errors import StoreError\n"
        "from controld.store.sqlite import SqliteStore\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: asyncio.run(SqliteStore.open(pathlib.Path(sys.argv[1])))\n"
        "except StoreError as error: print(error.code)\n"
    )
    for parent in target.parents:
        if parent.stat().st_mode & 0o001 == 0 and os.getuid() == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o001)
        if parent == tmp_path.parent.parent:
            break
    arguments = [sys.executable, "-c", script, str(target)]
    outcome = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert outcome.stdout.strip() == "store.read_only", outcome.stderr


def test_a_file_in_place_of_the_directory_is_a_typed_error(tmp_path: Path) -> None:
    import asyncio

    (tmp_path / "state").write_text("")
    with pytest.raises(StoreError) as caught:
        asyncio.run(SqliteStore.open(tmp_path / "state"))
    assert caught.value.code == "store.io"


WRITER = """
import asyncio, pathlib, sys
from controld.store.records import PosteriorRecord
from controld.store.sqlite import SqliteStore

async def main():
    store = await SqliteStore.open(pathlib.Path(sys.argv[1]))
    assert store.damage is None, store.damage
    records = {r.key: r.version for r in await store.posteriors.list()}
    async def writer(key):
        version = records.get(key, 0)
        while True:
            await store.posteriors.put([PosteriorRecord(key=key, version=version, document="x" * 3000)])
            version += 1
            print(key, version, flush=True)
    await asyncio.gather(*(writer(f"k{i}") for i in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, *(pytest.param(many, marks=pytest.mark.slow) for many in (7, 40, 600)), 200])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    acknowledged: dict[str, int] = {}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _, line in zip(range(lines), process.stdout, strict=False):
            key, number = line.split()
            acknowledged[key] = int(number)
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if line.endswith("\n"):
                key, number = line.split()
                acknowledged[key] = int(number)
        process.stdout.close()
        process.wait()
        store = await SqliteStore.open(tmp_path)
        kept = {record.key: record.version for record in await store.posteriors.list()}
        await store.close()
        assert store.damage is None
        for key, number in acknowledged.items():
            # One more may have been committed, but not yet acknowledged.
            assert kept[key] in (number, number + 1)
        acknowledged = kept


KILLED_AT_START = """
import asyncio, os, pathlib, signal, sys
from controld.store.sqlite import SqliteStore
count = 0
def killer(event, arguments):
    global count
    if event in ("open", "os.rename", "os.remove", "sqlite3.connect", "os.truncate", "os.mkdir"):
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
directory = pathlib.Path(sys.argv[1])
sys.addaudithook(killer)
async def main():
    await (await SqliteStore.open(directory)).close()
asyncio.run(main())
print("survived")
"""


@pytest.mark.slow
async def test_a_kill_at_any_step_of_a_start_or_a_recovery_leaves_a_usable_directory(tmp_path: Path) -> None:
    for step in range(1, 60):
        directory = tmp_path / str(step)
        await filled(directory, backup=True)
        garbage(directory / DATABASE)
        arguments = [sys.executable, "-c", KILLED_AT_START, str(directory), str(step)]
        outcome = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        store = await SqliteStore.open(directory)
        assert len(await store.posteriors.list()) in (0, 200)
        await store.close()
        if "survived" in outcome.stdout:
            break
        assert outcome.returncode == -signal.SIGKILL, outcome.stderr
    else:
        pytest.fail("the start never ended")
    assert step > 8
