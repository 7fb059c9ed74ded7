"""`controld replay`, from files to text, JSON and plots."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from controld.cli.main import main

POLICY = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: chat}
select: {kind: sglang, deployment: chat}
links: {default: {rate: 100Mbit}}
tenants: [{name: acme, weight: 1}, {name: default, weight: 1}]
classes:
  - {name: chat, tenant: acme, match: {priority: 1}, workload: dialogue, tiers: [pd], max_quality_loss_nats: 0.02}
  - {name: default, tenant: default, workload: general, tiers: [pd], max_quality_loss_nats: 0}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.0,{400 + 7 * second},5\n" for second in range(12)
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "few.json").write_text(json.dumps(packaged() | {"profiles": packaged()["profiles"][:6]}))
    paths = {"--trace": "trace.csv", "--policy": "policy.yaml", "--profiles": "few.json"}
    return [word for option, name in paths.items() for word in (option, str(tmp_path / name))]


def packaged() -> dict[str, Any]:
    """The profiles that come with the package."""
    text = resources.files("controld.sim").joinpath("data/smollm2_cpu.json").read_text()
    document: dict[str, Any] = json.loads(text)
    return document


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_every_decider_is_shown(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # With the profiles of the package.
    assert main(["replay", *files[:4], "--limit", "4"]) == 0
    text = capsys.readouterr().out
    for name in ("raw", "static", "kvserve", "controld", "oracle", "4 transfers", "chat (4)"):
        assert name in text


def test_json_has_the_figures(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *files, "--json", "--mix", "chat=1,default=1", "--speed", "4", "--seed", "3"]) == 0
    document = answer(capsys)
    rows = {row["decider"]: row for row in document["deciders"]}
    assert rows["raw"]["raw_bytes"] == rows["raw"]["wire_bytes"] == document["replay"]["raw_bytes"]
    assert rows["oracle"]["mean_s"] <= rows["controld"]["mean_s"] < rows["raw"]["mean_s"]
    assert sum(document["replay"]["classes"].values()) == 12
    assert document["replay"]["seconds"] == pytest.approx(11 / 4)
    # `default` is lossless only.
    lossless = document["replay"]["classes"]["default"]
    static = next(row for name, row in rows.items() if name.startswith("static"))
    assert static["arms"]["raw"] == lossless > 0


def test_a_tenant_s_weight_counts(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = []
    for weight in (1, 50):
        (tmp_path / "policy.yaml").write_text(POLICY.replace("acme, weight: 1", f"acme, weight: {weight}"))
        assert main(["replay", *files, "--json", "--mix", "chat=1,default=1", "--speed", "1000"]) == 0
        means.append({row["decider"]: row["p50_s"] for row in answer(capsys)["deciders"]}["raw"])
    assert means[0] != means[1]


def test_a_seed_gives_the_same_answer(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(2):
        assert main(["replay", *files, "--json", "--limit", "4"]) == 0
        answers.append(answer(capsys))
    assert answers[0] == answers[1]
    assert answers[0]["replay"]["transfers"] == 4


@pytest.mark.slow
def test_controld_is_seen_under_the_oracle(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    assert main(["replay", *files, "--plot", str(tmp_path / "r.png")]) == 0
    [figure] = figures
    assert "Simulated" in figure.get_suptitle()
    [legend] = figure.legends
    assert {"raw", "kvserve", "controld", "oracle"} < {text.get_text() for text in legend.get_texts()}
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    ours, oracle = lines["controld"], lines["oracle"]
    assert ours.get_linewidth() > 2 * oracle.get_linewidth()
    assert oracle.get_zorder() > ours.get_zorder() > lines["kvserve"].get_zorder()
    assert oracle.is_dashed()


@pytest.mark.slow
def test_transfers_and_plots_are_written(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture, transfers = (tmp_path / name for name in ("r.html", "r.png", "t.json"))
    assert main(["replay", *files, "--plot", str(page), "--transfers", str(transfers)]) == 0
    assert main(["replay", *files, "--plot", str(picture)]) == 0
    capsys.readouterr()
    text = page.read_text()
    assert "<svg" in text and "controld" in text and "src=" not in text and "<script" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(transfers.read_text())
    assert {len(one["transfers"]) for one in runs} == {12}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--link", "fast"], "--link"),
        (["--speed", "0"], "--speed"),
        (["--peers", "0"], "--peers"),
        (["--noise", "10"], "--noise"),
        (["--mix", "chats=1"], "no class 'chats'"),
        (["--mix", "chat=x"], "no class and share"),
        (["--deployment", "other"], "--deployment"),
        (["--kv-bytes-per-token", "23040"], "--kv-bytes-per-token"),
        (["--profiles", "/nowhere.json"], "/nowhere.json"),
        (["--plot", "plot.txt"], "plot.txt"),
    ],
)
def test_what_makes_no_sense_is_refused(
    files: list[str], extra: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["replay", *files, *extra])
    except SystemExit as left:
        status = int(str(left.code))
    assert status in (1, 2)
    assert said in capsys.readouterr().err


def test_a_bad_trace_names_file_line_and_field(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(files[1])
    path.write_text(TRACE + "2023-11-16 18:16:00.0,many,5\n")
    assert main(["replay", *files]) == 1
    assert f"{path}:14: ContextTokens: 'many' is no number of tokens" in capsys.readouterr().err


def test_exported_profiles_are_used(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = packaged()
    assert all(profile["loss_samples"] > 0 and "study" in profile["provenance"] for profile in document["profiles"])
    usable = [profile for profile in document["profiles"] if profile["loss_upper_nats"] <= 0.02]
    useless = [profile for profile in document["profiles"] if profile["loss_upper_nats"] > 0.02]
    document["profiles"] = [*usable[:4], useless[0]]
    (tmp_path / "mine.json").write_text(json.dumps(document))
    assert main(["replay", *files, "--json", "--profiles", str(tmp_path / "mine.json")]) == 0
    assert answer(capsys)["replay"]["profiles"] == 4
    document["profiles"][2]["ratio"] = -1
    (tmp_path / "mine.json").write_text(json.dumps(document))
    assert main(["replay", *files, "--profiles", str(tmp_path / "mine.json")]) == 1
    assert "mine.json: profile" in capsys.readouterr().err


def test_a_demonstration_s_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "daemon" / "policies").mkdir(parents=True)
    (tmp_path / "daemon" / "policies" / "demo.yaml").write_text(POLICY.replace("nats: 0}", "nats: 0, pin: raw}"))
    rows = [{**profile, "pareto": True} for profile in packaged()["profiles"][:3]]
    (tmp_path / "candidates.json").write_text(json.dumps(rows))
    (tmp_path / "link.jsonl").write_text('{"second": 0, "rate_bits_per_s": 100000000, "phase": "medium"}\n')
    lines = [
        {
            "kind": "request",
            "second": float(second),
            "sample": {"phase": "medium", "arm": arm, "prompt_tokens": 100, "ttft_s": 3.0},
            "effect": {"service_class": service_class, "raw_bytes": 2_304_000, "wait_s": 0.0, "total_s": 0.2,
                       "encode_s": 0.01, "decode_s": 0.01, "arm_id": "raw"},
        }
        for second, (arm, service_class) in enumerate([("raw", "default"), ("controld", "chat")] * 3)
    ]  # fmt: skip
    (tmp_path / "client.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", "--log", str(tmp_path), "--json"]) == 0
    result = answer(capsys)
    assert set(result["phases"]["medium"]) == {"all", "raw", "controld"}
    assert result["phases"]["medium"]["raw"]["ttft"] == pytest.approx(1.0, abs=0.05)
    assert main(["replay", "--log", str(tmp_path)]) == 0
    assert "within 15 %: yes in every phase, yes for every arm" in capsys.readouterr().out
