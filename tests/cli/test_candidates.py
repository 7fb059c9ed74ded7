"""Profiles of a running daemon as a table, as JSON and as a plot; studies that cannot begin say why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.profile import Profile, StageTime
from controld.cli.main import main
from controld.config import load_config
from controld.contract.configuration import Configuration
from controld.contract.configuration_label import configuration_label
from controld.store.records import ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore

LEVELS: dict[str, Any] = {
    "transform": "hadamard",
    "quantise": "levels",
    "key_levels": 12,
    "key_axis": "channel",
    "key_group": 64,
    "value_levels": 6,
    "value_axis": "token",
    "value_group": 32,
    "code": "entropy",
}
LOSSLESS = {"transform": "none", "quantise": "none", "code": "entropy"}
WORSE = {**LEVELS, "code": "zstd"}


def profile(values: dict[str, Any], loss: float, ratio: float, seconds_per_byte: float) -> Profile:
    return Profile(
        configuration=Configuration(values),
        workload="general",
        model_fingerprint="f" * 64,
        loss_mean_nats=loss,
        loss_se_nats=loss / 10,
        loss_samples=8,
        worst_prompt_tokens=2048,
        ratio=ratio,
        encode=StageTime(0.0, seconds_per_byte),
        decode=StageTime(0.0, seconds_per_byte / 2),
        median_transfer_bytes=20e6,
        sender_hardware="cpu/2/1",
        receiver_hardware="cpu/2/1",
        measured_unix_s=1_700_000_000.0,
        corpus="texts#1",
        provenance="study s, trial 001",
    )


PROFILES = (
    profile(LOSSLESS, 0.0, 1.5, 2e-9),
    profile(LEVELS, 0.015, 5.0, 4e-9),
    profile(WORSE, 0.015, 4.9, 9e-9),
)


async def store_profiles(state_dir: Path) -> None:
    store = await SqliteStore.open(state_dir)
    await store.profiles.upsert(
        [
            ProfileRecord(
                key=ProfileKey(
                    model_fingerprint=one.model_fingerprint,
                    workload=one.workload,
                    config_id=one.arm_id,
                    sender_hardware=one.sender_hardware,
                    receiver_hardware=one.receiver_hardware,
                ),
                document=one.to_json(),
                updated_unix_s=one.measured_unix_s,
            )
            for one in PROFILES
        ]
    )
    await store.close()


@pytest.fixture(scope="module")
def serving(module_config_file: Path, serving_of: Any) -> Iterator[Path]:
    """The settings of a daemon that serves; no test here changes what another one looks at."""
    asyncio.run(store_profiles(load_config(module_config_file).state_dir))
    daemon = serving_of(module_config_file)
    daemon.start()
    yield module_config_file
    daemon.stop()


@pytest.fixture
def daemon(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTROLD_CONFIG", str(serving))
    assert main(["reload", "--wait", "--timeout", "30"]) == 0


def test_the_table_shows_quality_bytes_and_speed(
    daemon: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    assert main(["candidates", "--workload", "general"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "had K12/c64 V6/t32 entropy" in line]
    assert "0.01500 +- 0.00150" in row
    assert "8@2048" in row and " 5.00 " in row and " 250 " in row and " 500 " in row and " * " in row
    (beaten,) = [line for line in lines if "had K12/c64 V6/t32 zstd" in line]
    assert " * " not in beaten


def test_filters_and_json_agree(daemon: None, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> set[str]:
        capsys.readouterr()
        assert main(["candidates", "--json", *options]) == 0
        return {row["config_id"] for row in json.loads(capsys.readouterr().out)}

    ids = [one.arm_id for one in PROFILES]
    assert shown() == set(ids)
    assert shown("--pareto") == set(ids[:2])
    # The upper bound counts, not the mean: 0.015 + 1.9 x 0.0015 is above 0.016.
    assert shown("--max-loss", "0.016") == {ids[0]}
    assert shown("--max-loss", "0.018") == set(ids)
    assert shown("--workload", "dialogue") == set()


def test_filters_that_hide_everything_say_how_much(daemon: None, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> str:
        capsys.readouterr()
        assert main(["candidates", *options]) == 0
        return capsys.readouterr().out

    assert shown("--max-loss", "-1") == "none of 3 profiles passes --max-loss\n"
    assert shown("--max-loss", "-1", "--pareto") == "none of 3 profiles passes --pareto and --max-loss\n"
    assert shown("--max-loss", "0", "--workload", "dialogue") == (
        "no profiles of workload dialogue; there are 3 profiles of general\n"
    )
    assert json.loads(shown("--max-loss", "-1", "--json")) == []


@pytest.mark.slow
def test_a_folder_gets_whole_files(daemon: None, tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    assert main(["candidates", "--plot", str(folder)]) == 0
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "front.html").read_text()
    assert all(one.arm_id in text for one in PROFILES)


def test_a_page_is_whole_and_another_kind_is_refused(
    daemon: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "front.html"
    assert main(["candidates", "--plot", str(page)]) == 0
    assert all(one.arm_id in page.read_text() for one in PROFILES)
    capsys.readouterr()
    assert main(["candidates", "--plot", str(tmp_path / "front.gif")]) == 1
    assert ".html" in capsys.readouterr().err


def test_an_export_imports_again_and_changes_nothing(
    daemon: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "candidates.json"
    assert main(["candidates", "--export", str(file)]) == 0
    document = json.loads(file.read_text())
    assert len(document["profiles"]) == len(PROFILES)
    newer = document["profiles"][0]
    newer["measured_unix_s"] += 1.0
    file.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["candidates", "--import", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"profiles": 3, "stored": 1, "kept": 2, "unmapped": []}
    assert main(["candidates", "--json"]) == 0
    shown = {row["config_id"]: row["provenance"] for row in json.loads(capsys.readouterr().out)}
    assert sorted(shown.values()) == ["imported: study s, trial 001", "study s, trial 001", "study s, trial 001"]
    assert shown[newer["arm_id"]].startswith("imported: ")
    document["profiles"][2]["encode"]["a_s"] = float("nan")
    file.write_text(json.dumps(document))
    assert main(["candidates", "--import", str(file)]) == 1
    assert "profiles[2].encode.a_s" in capsys.readouterr().err
    assert main(["candidates", "--import-kvserve", str(file)]) == 1
    assert "library_metadata" in capsys.readouterr().err
    assert main(["candidates", "--import", str(tmp_path / "none.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--export", "x.json", "--pareto"], ["--import", "x.json", "--workload", "general"]]
)
def test_options_that_do_not_go_together_are_refused(
    config_file: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["candidates", *options]) == 1
    assert "--" in capsys.readouterr().err


def test_a_study_without_a_worker_is_refused_with_the_way_out(daemon: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--grid", "--quick"]) == 1
    assert "dataplanes.sglang.profiler" in capsys.readouterr().err
    assert main(["profile", "--follow", "nope"]) == 1
    assert "no study nope" in capsys.readouterr().err
    assert main(["profile", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("values", "label"),
    [
        (LEVELS, "had K12/c64 V6/t32 entropy"),
        ({**LEVELS, "transform": "none", "code": "bitpack"}, "K12/c64 V6/t32 bitpack"),
        (LOSSLESS, "lossless entropy"),
        ({"transform": "none", "quantise": "nvfp4", "code": "zstd"}, "nvfp4 zstd"),
        ({"transform": "hadamard", "quantise": "nvfp4"}, "had nvfp4"),
        ({**LEVELS, "sink_tokens": 4}, "had s4 K12/c64 V6/t32 entropy"),
        ({**LEVELS, "hadamard_seed": 5}, "had K12/c64 V6/t32 hadamard_seed=5 entropy"),
        ({"precision": "fp8", "steps": 4}, "4 steps precision=fp8"),
    ],
)
def test_a_label_is_short_and_loses_no_knob(values: dict[str, Any], label: str) -> None:
    assert configuration_label(values) == label
