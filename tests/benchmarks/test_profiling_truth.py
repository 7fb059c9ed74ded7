"""The ground truth: its table says what was measured, its fast meter what the profiler's meter says, and it repeats."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controld.contract.configuration import Configuration

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import profiling_truth as truth  # noqa: E402 - benchmarks are scripts, not a package

TABLE = ROOT / "benchmarks/data/profiling_truth.csv.gz"
MODEL = ROOT / "build/models/smollm2-135m-instruct"
ARTEFACTS = ROOT / "build/models/artefacts"
HEADER = {"model": "tiny", "raw_bytes": 1000, "parts": 3, "segments": 2, "shard": "1/1", "started_unix_s": 5}


def levels(key: int, **others: Any) -> dict[str, Any]:
    return {"quantise": "levels", "transform": "none", "key_levels": key, "value_levels": 8, **others}


def row(lossy: dict[str, Any], losses: tuple[float, float], seconds: float, infeasible: str = "") -> dict[str, Any]:
    coders = {"none": (500, seconds, seconds), "zstd": (250, 2 * seconds, seconds)}
    return {"lossy": lossy, "losses": losses, "infeasible": infeasible, "coders": {} if infeasible else coders}


ROWS = [
    row(levels(4), (0.3, 0.1), 1e-6),
    row(levels(8, sink_tokens=1), (0.02, 0.04), 9e-6),
    row({"quantise": "fp8_e4m3", "transform": "none"}, (0.001, 0.003), 2e-6),
]


def write_lines(path: Path, rows: list[dict[str, Any]], torn: str = "", **header: Any) -> Path:
    lines = [{"header": {**HEADER, **header}}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "truth.jsonl", ROWS)


def test_the_table_says_what_was_measured(measured: Path, tmp_path: Path) -> None:
    table = tmp_path / "data/truth.csv.gz"
    truth.write_table([measured], table)
    loaded = truth.load_truth(table)
    by_id = {part.config_id: number for number, part in enumerate(loaded.parts)}
    assert list(by_id) == sorted(by_id)
    number = by_id[Configuration(levels(4)).config_id]
    assert loaded.loss_nats[number] == pytest.approx(0.2)
    assert loaded.loss_se_nats[number] == pytest.approx(0.1)
    assert loaded.segment_losses[number].tolist() == [0.3, 0.1]
    assert loaded.wire_bytes[number] == {"none": 500, "zstd": 250}
    assert [(cost.variant, cost.size_ratio) for cost in loaded.costs[number]] == [("none", 0.5), ("zstd", 0.25)]
    assert loaded.header["infeasible"] == 0


def test_seconds_are_the_median_of_parts_that_differ_in_magnitudes_only(measured: Path, tmp_path: Path) -> None:
    table = tmp_path / "truth.csv.gz"
    truth.write_table([measured], table)
    loaded = truth.load_truth(table)
    seconds = {
        part["quantise"]: {cost.variant: cost.seconds_per_unit for cost in costs}
        for part, costs in zip(loaded.parts, loaded.costs, strict=True)
    }
    # Of 1e-6 and 9e-6 each way, over 1,000 bytes; FP8 stands alone.
    assert seconds["levels"] == pytest.approx({"none": 1e-8, "zstd": 1.5e-8})
    assert seconds["fp8_e4m3"] == pytest.approx({"none": 4e-9, "zstd": 6e-9})
    levels_costs = [c for p, c in zip(loaded.parts, loaded.costs, strict=True) if p["quantise"] == "levels"]
    assert levels_costs[0] == levels_costs[1]


def test_shards_make_the_same_table_in_any_order(measured: Path, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "1.jsonl", ROWS[:2], shard="1/2", started_unix_s=5)
    second = write_lines(tmp_path / "2.jsonl", ROWS[2:], shard="2/2", started_unix_s=5)
    tables = []
    for number, sources in enumerate(([measured], [first, second], [second, first])):
        truth.write_table(sources, tmp_path / f"{number}.gz")
        tables.append((tmp_path / f"{number}.gz").read_bytes())
    assert len(set(tables)) == 1


def test_infeasible_parts_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [*ROWS[:2], row({"quantise": "nvfp4"}, (0.0, 0.0), 0.0, infeasible="codec.layout: no")]
    header = truth.write_table([write_lines(tmp_path / "t.jsonl", rows)], tmp_path / "t.gz")
    assert (header["rows"], header["infeasible"]) == (2, 1)
    assert len(truth.load_truth(tmp_path / "t.gz").parts) == 2


def test_a_run_that_has_not_ended_makes_no_table(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", ROWS[:2])
    with pytest.raises(truth.TruthFileError, match="2 of 3 parts"):
        truth.write_table([path], tmp_path / "t.gz")
    assert not (tmp_path / "t.gz").exists()


def test_shards_of_different_runs_make_no_table(measured: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", ROWS, raw_bytes=2000)
    with pytest.raises(truth.TruthFileError, match="not made alike"):
        truth.write_table([measured, other], tmp_path / "t.gz")


def test_a_torn_last_line_is_not_read_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    torn = write_lines(tmp_path / "torn.jsonl", ROWS[:2], torn='{"lossy":{"quan')
    header, rows, end = truth.read_rows(torn)
    assert header is not None and len(rows) == 2
    assert torn.read_bytes()[end:] == b'{"lossy":{"quan'
    damaged = write_lines(tmp_path / "damaged.jsonl", ROWS[:1], torn='{"lossy":{"quan\n')
    with pytest.raises(truth.TruthFileError, match="a line is damaged"):
        truth.read_rows(damaged)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", gzip.compress(b"", mtime=0), gzip.compress(b"{}\nlossy\n{}\n", mtime=0)]
)
def test_what_is_no_table_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.gz").write_bytes(content)
    with pytest.raises(truth.TruthFileError, match="no ground truth"):
        truth.load_truth(tmp_path / "t.gz")


def test_what_differs_in_more_than_magnitudes_is_another_stage() -> None:
    first = Configuration(levels(4, key_axis="channel", window_tokens=64))
    assert truth.stage_key(first) == truth.stage_key(Configuration(levels(32, key_axis="channel", sink_tokens=1)))
    assert truth.stage_key(first) != truth.stage_key(Configuration(levels(4, key_axis="token", window_tokens=64)))


@pytest.fixture(scope="module")
def bench() -> Any:
    import torch
    from profiling_truth_bench import TruthBench

    if not MODEL.is_dir():
        pytest.skip("make setup converts the model")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TruthBench(
        MODEL,
        ARTEFACTS,
        prompt_tokens=truth.PROMPT_TOKENS,
        continuation_tokens=truth.CONTINUATION_TOKENS,
        segments=truth.SEGMENTS,
        batch_parts=truth.BATCH_PARTS,
        tokens_file=TABLE.with_name("profiling_truth_tokens.json"),
    )
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_losses_are_those_of_the_profilers_meter(bench: Any) -> None:
    from profiling_truth_bench import Wanted

    from dataplanes.sglang.profiler.wire_codec import FrameCodec

    axes = {"key_axis": "channel", "key_group": 64, "value_axis": "token", "value_group": 32}
    lossy_parts = [
        {"transform": "none", "quantise": "none"},
        {**levels(16), **axes, "sink_tokens": 1},
        {**levels(4), **axes, "transform": "hadamard", "sink_tokens": 0, "window_tokens": 64},
        {"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 0},
        {"transform": "hadamard", "quantise": "nvfp4", "sink_tokens": 0},
    ]
    wanted = [Wanted(lossy=Configuration(part), codes=("none", "zstd")) for part in lossy_parts]
    found = list(bench.measure(wanted))
    assert [part.lossy for part in found] == [part.lossy for part in wanted]
    for part in found:
        codec = FrameCodec(part.lossy.with_coder("none"), bench.layout)
        losses, sizes = [], []
        for prompt in bench.prompts:
            frames = codec.encode(prompt.planes)
            sizes.append(sum(frame.numel() for frame in frames))
            losses.append(bench.meter.measure_planes(prompt, codec.decode(frames, prompt.tokens)).loss_nats)
        assert part.losses == pytest.approx(losses, abs=1e-6)
        assert part.coders["none"].wire_bytes == sizes[0]
    assert found[0].losses == (0.0, 0.0)
    assert all(loss > 1e-4 for part in found[1:] for loss in part.losses)


@pytest.mark.slow
def test_a_part_that_the_codec_refuses_is_infeasible_and_the_others_are_measured(bench: Any) -> None:
    from profiling_truth_bench import Wanted

    refused = Configuration({**levels(4), "key_axis": "channel", "key_group": 7, "value_axis": "token"})
    fine = Configuration({"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 0})
    found = {
        part.lossy: part for part in bench.measure([Wanted(lossy=part, codes=("none",)) for part in (refused, fine)])
    }
    assert found[refused].infeasible and not found[refused].losses
    assert not found[fine].infeasible and len(found[fine].losses) == truth.SEGMENTS


CALIBRATED = ("artefact", "head_profile")


def sample(loaded: Any, *, calibrated: bool, count: int) -> list[int]:
    numbers = [
        number for number, part in enumerate(loaded.parts) if calibrated == any(name in part for name in CALIBRATED)
    ]
    return random.Random(7).sample(numbers, count)


@pytest.mark.slow
@pytest.mark.parametrize(("calibrated", "count"), [(False, 14), (True, 6)])
def test_random_rows_of_the_table_are_measured_again(bench: Any, calibrated: bool, count: int) -> None:
    """Within 3 standard errors anywhere; the same processor and torch repeat to 1e-3, and to the byte.

    Elsewhere float32 sums round otherwise, so that some KV elements are another bfloat16, and what an entropy coder
    makes of them is a few bytes more or less; coders without a model of their symbols give the same sizes everywhere.
    """
    from profiling_truth_bench import Wanted

    loaded = truth.load_truth(TABLE)
    if bench.identity.fingerprint != loaded.header["model_fingerprint"]:
        pytest.skip("another model is in build/models than the table is of")
    assert bench.corpus_label == loaded.header["corpus"]
    if calibrated and set(loaded.header["artefacts"]) - set(bench.artefacts):
        pytest.skip(f"the table's artefacts {loaded.header['artefacts']} were calibrated on another machine")
    import torch

    alike = (truth.machine_name(), torch.__version__) == (loaded.header["machine"], loaded.header["versions"]["torch"])
    numbers = sample(loaded, calibrated=calibrated, count=count)
    wanted = [Wanted(lossy=loaded.parts[number], codes=tuple(loaded.wire_bytes[number])) for number in numbers]
    for number, part in zip(numbers, bench.measure(wanted), strict=True):
        assert part.lossy == loaded.parts[number]
        loss = float(np.mean(part.losses))
        # Two segments that happen to agree have a standard error of next to nothing: elsewhere a hundredth is allowed.
        elsewhere = max(3 * loaded.loss_se_nats[number], 0.01 * loaded.loss_nats[number])
        within = 1e-3 * loaded.loss_nats[number] if alike else elsewhere
        assert loss == pytest.approx(loaded.loss_nats[number], abs=max(within, 1e-6))
        sizes = {code: timing.wire_bytes for code, timing in part.coders.items()}
        for code, size in loaded.wire_bytes[number].items():
            exact = alike or code in ("none", "bitpack")
            assert sizes[code] == (size if exact else pytest.approx(size, rel=0.005)), (part.lossy, code)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    if not MODEL.is_dir():
        pytest.skip("make setup converts the model")
    out = tmp_path / "truth.jsonl"
    settings: dict[str, Any] = {"model": MODEL, "artefacts": ARTEFACTS, "shard": (2, 3)}
    truth.measure(out, limit=2, **settings)
    before = out.read_bytes()
    out.write_bytes(before + b'{"lossy":{"quan')
    truth.measure(out, limit=3, **settings)
    assert out.read_bytes().startswith(before)
    _, rows, _ = truth.read_rows(out)
    ids = [Configuration(row["lossy"]).config_id for row in rows]
    assert len(ids) == 3 and ids == sorted(set(ids))
