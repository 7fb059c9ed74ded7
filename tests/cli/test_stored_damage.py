"""A daemon over a store with rows that are no profiles: the rest is shown, they are named and can be replaced."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.exchange import export_document
from controld.candidates.profile import Profile, StageTime
from controld.cli.main import main
from controld.config import load_config
from controld.contract.configuration import Configuration
from controld.profiling.results import profile_record
from controld.store.sqlite import SqliteStore


def profile(code: str) -> Profile:
    return Profile(
        configuration=Configuration({"quantise": "levels", "key_levels": 12, "code": code}),
        workload="general", model_fingerprint="f" * 64, loss_mean_nats=0.01, loss_se_nats=0.001, loss_samples=8,
        worst_prompt_tokens=256, ratio=4.0, encode=StageTime(0.0, 1e-9), decode=StageTime(0.0, 1e-9),
        median_transfer_bytes=1e6, sender_hardware="cpu", receiver_hardware="cpu", measured_unix_s=1_700_000_000.0,
    )  # fmt: skip


GOOD, DAMAGED, EXTREME = profile("entropy"), profile("zstd"), profile("bitpack")


async def store_profiles(state_dir: Path) -> None:
    store = await SqliteStore.open(state_dir)
    tiny = {"ratio": 5e-324, "median_transfer_bytes": 5e-324, "measured_unix_s": 1e308}
    extreme = {**EXTREME.to_document(), **tiny, "encode": {"a_s": 1e308, "b_s_per_byte": 1e308}}
    rows = [profile_record(one) for one in (GOOD, DAMAGED, EXTREME)]
    rows[2] = replace(rows[2], document=json.dumps(extreme), updated_unix_s=1e308)
    await store.profiles.upsert(rows)
    await store.close()
    (file,) = (path for path in state_dir.iterdir() if path.suffix in (".db", ".sqlite", ".sqlite3"))
    with sqlite3.connect(file) as connection:
        connection.execute("update profiles set document = '{{{' where config_id = ?", (DAMAGED.arm_id,))
    connection.close()


@pytest.fixture
def daemon(config_file: Path, serving_of: Any) -> Iterator[None]:
    asyncio.run(store_profiles(load_config(config_file).state_dir))
    process = serving_of(config_file)
    process.start()
    try:
        assert main(["reload", "--wait", "--timeout", "60"]) == 0
        yield
    finally:
        process.stop()


def test_rows_that_cannot_be_read_are_left_out_named_and_replaced_by_an_import(
    daemon: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*options: str) -> Any:
        capsys.readouterr()
        assert main([*options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert [row["config_id"] for row in answer("candidates")] == [GOOD.arm_id]
    assert [row["config_id"] for row in answer("candidates", "--workload", "general")] == [GOOD.arm_id]
    alarms = {alarm["where"]: alarm["what"] for alarm in answer("status")["alarms"]}
    for one, problem in ((DAMAGED, "not JSON"), (EXTREME, "profile.ratio")):
        (where,) = [where for where in alarms if one.arm_id in where]
        assert problem in alarms[where]
    for options in (["candidates"], ["candidates", "--envelope"], ["status"]):
        assert main(options) == 0
    file = tmp_path / "candidates.json"
    assert answer("candidates", "--export", str(file))["profiles"] == 1
    file.write_text(json.dumps(export_document([GOOD, DAMAGED, EXTREME], exported_unix_s=1.0)))
    outcome = answer("candidates", "--import", str(file))
    assert (outcome["stored"], outcome["kept"]) == (2, 1)
    assert {row["config_id"] for row in answer("candidates")} == {GOOD.arm_id, DAMAGED.arm_id, EXTREME.arm_id}
    assert not [alarm for alarm in answer("status")["alarms"] if alarm["where"].startswith("profile ")]
