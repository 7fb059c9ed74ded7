"""Video profiles of a running daemon: shown unasked where there are only those, plotted, carried, deleted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.exchange import export_document
from controld.candidates.profile import Profile, StageTime
from controld.candidates.video_exchange import read_video_profiles, video_records
from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.cli.main import main
from controld.config import load_config
from controld.contract.configuration import Configuration
from controld.store.records import AuditEvent
from controld.store.sqlite import SqliteStore


def video(steps: int, kv: str, loss: float, kv_bytes: int, drift: float = 0.25) -> VideoProfile:
    return VideoProfile(
        configuration=Configuration({"steps": steps, "kv": kv, "vae": "async", "window": 15}), source=Source.MEASURED,
        forward_s=0.05, vae_s=0.1, frames_per_chunk=10, workload="shapes", model_fingerprint="m" * 64,
        hardware="cpu/2/1", loss_mean=loss, loss_se=0.001, loss_samples=30, drift=drift, motion=0.04,
        memory=VideoMemory(
            weights_bytes=2_000_000, kv_bytes=kv_bytes, activation_bytes=100_000, session_bytes=50_000
        ),
        measured_unix_s=1_700_000_000.0, provenance="grid, 30 clips",
    )  # fmt: skip


BEST, FAST, SMALL = video(4, "bf16", 0.0, 900_000), video(2, "bf16", 0.079, 900_000), video(4, "nvfp4", 0.005, 250_000)
BEATEN = video(3, "odd", 0.08, 900_000, drift=0.5)
ALL = (BEST, FAST, SMALL, BEATEN)

KV = Profile(
    configuration=Configuration({"quantise": "none", "code": "entropy"}), workload="general",
    model_fingerprint="f" * 64, loss_mean_nats=0.0, loss_se_nats=0.0, loss_samples=8, worst_prompt_tokens=256,
    ratio=1.5, encode=StageTime(0.0, 1e-9), decode=StageTime(0.0, 1e-9), median_transfer_bytes=1e6, measured_unix_s=1e9,
)  # fmt: skip

Run = Callable[..., str]


async def store_profiles(state_dir: Path) -> None:
    store = await SqliteStore.open(state_dir)
    await store.profiles.upsert(video_records(ALL))
    await store.close()


@pytest.fixture
def run(
    config_file: Path, serving_of: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """What `controld candidates` prints against a daemon that holds video profiles only."""
    monkeypatch.setenv("COLUMNS", "250")
    asyncio.run(store_profiles(load_config(config_file).state_dir))
    process = serving_of(config_file)
    process.start()

    def printed(*options: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(["candidates", *options]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    try:
        assert main(["reload", "--wait", "--timeout", "30"]) == 0
        yield printed
    finally:
        process.stop()


def rows(text: str) -> dict[str, Any]:
    return {row["config_id"]: row for row in json.loads(text)}


def test_settings_are_shown_unasked_filtered_and_plotted(run: Run, tmp_path: Path) -> None:
    text = run()
    assert text == run("--kind", "video")
    (line,) = [line for line in text.splitlines() if SMALL.setting_id in line]
    # Loss, bound, a pass, FPS, memory and two of its parts, a further session's, drift, front.
    for word in (
        "kv=nvfp4 4 steps", "0.0050 +- 0.0010", "0.0067", " 50 ", " 40 ", "2.35 MB", "2 MB", "250 kB", "300 kB",
        " 0.25 ", " * ",
    ):  # fmt: skip
        assert word in line, word
    assert (
        "all of them: async window=15, n 30, VAE ms 100, frames 10, activations 100 kB, motion 0.04,"
        " measured 2023-11-14 22:13 grid, 30 clips\n"
    ) in text, "what settings have in common is said once"
    alone = run("--config-id", SMALL.setting_id)
    assert "kv=nvfp4 4 steps async window=15" in alone
    assert "also: n 30, VAE ms 100, " in alone
    assert "workload shapes, model mmmmmmmmmmmm, cpu/2/1, measured" in text
    (line,) = [line for line in text.splitlines() if BEATEN.setting_id in line]
    assert " * " not in line
    assert rows(run("--json")).keys() == {one.setting_id for one in ALL}
    assert rows(run("--json", "--pareto")).keys() == {BEST.setting_id, FAST.setting_id, SMALL.setting_id}
    assert rows(run("--json", "--max-loss", "0.006")).keys() == {BEST.setting_id}, "the bound counts, not the mean"
    assert rows(run("--json", "--config-id", FAST.setting_id, "--model", "mmmmmmmm")).keys() == {FAST.setting_id}
    assert run("--max-loss", "-1") == "none of 4 video profiles passes --max-loss\n"
    gone = "no video profiles of workload dialogue; there are 4 video profiles of shapes\n"
    assert run("--workload", "dialogue", "--kind", "video") == gone
    assert run("--kind", "kv") == "no profiles; measure some: controld profile --grid\n"
    page = tmp_path / "front.html"
    assert f"plot: {page}" in run("--plot", str(page))
    assert all(one.setting_id in page.read_text() for one in ALL)


def test_an_export_is_what_an_import_takes_and_both_kinds_live_beside_each_other(run: Run, tmp_path: Path) -> None:
    file, kv_file = tmp_path / "video.json", tmp_path / "kv.json"
    assert run("--export", str(file)) == f"4 video profiles: {file}\n", "there are no others"
    assert {one.setting_id: one for one in read_video_profiles(file.read_text())} == {
        one.setting_id: one for one in ALL
    }
    assert "0 of 4 profiles stored, 4 are no newer than ours" in run("--import", str(file))
    kv_file.write_text(json.dumps(export_document([KV], exported_unix_s=1.0)))
    run("--import", str(kv_file))
    text = run()
    assert "lossless entropy" in text and BEST.setting_id not in text
    assert text.endswith("and 4 video profiles: --kind video\n")
    assert rows(run("--json")).keys() == {KV.arm_id}, "who reads KV profiles finds these"
    assert rows(run("--json", "--workload", "shapes")).keys() == {one.setting_id for one in ALL}
    assert run("--export", str(kv_file)) == f"1 profile: {kv_file}\n"
    assert json.loads(kv_file.read_text())["format"] == "controld-candidates"
    assert json.loads(run("--export", str(kv_file), "--kind", "video", "--json"))["profiles"] == 4
    assert read_video_profiles(kv_file.read_text())


def test_what_is_named_is_deleted_and_a_dry_run_only_says_so(run: Run, config_file: Path) -> None:
    said = run("--delete", "--config-id", FAST.setting_id, "--dry-run")
    assert said.splitlines() == [
        "1 profile would be deleted",
        f"  video {FAST.setting_id}, workload shapes, model mmmmmmmmmmmm, cpu/2/1",
    ]
    assert rows(run("--json")).keys() == {one.setting_id for one in ALL}
    assert run("--delete", "--config-id", FAST.setting_id).startswith("1 profile deleted\n")
    assert rows(run("--json")).keys() == {BEST.setting_id, SMALL.setting_id, BEATEN.setting_id}
    assert "no profile matches" in run("--delete", "--config-id", FAST.setting_id, status=1)
    assert json.loads(run("--delete", "--kind", "video", "--json"))["deleted"] == 3
    assert run() == "no profiles; measure some: controld profile --grid\n"

    (file,) = load_config(config_file).state_dir.glob("*.db")
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        query = "select document from audit where event = ? order by sequence"
        lines = [json.loads(line) for (line,) in connection.execute(query, (AuditEvent.CANDIDATES_DELETED,))]
    assert [line["by"] for line in lines] == [{"config_id": FAST.setting_id}, {"kind": "video"}]


@pytest.mark.parametrize(
    "options",
    [
        ["--delete"],
        ["--delete", "--pareto", "--kind", "kv"],
        ["--delete", "--max-loss", "0.1", "--kind", "video"],
        ["--dry-run"],
        ["--dry-run", "--kind", "video"],
        ["--envelope", "--kind", "video"],
        ["--export", "x.json", "--kind", "video", "--workload", "shapes"],
        ["--import", "x.json", "--kind", "video"],
        ["--import-kvserve", "x.json", "--hardware", "cpu"],
    ],
)
def test_options_that_do_not_go_together_are_refused(
    config_file: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "candidates", *options]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "cli.usage"
