from __future__ import annotations

import json
from pathlib import Path

import pytest

from controld.cli.main import main

BROKEN = Path(__file__).parents[1] / "policy" / "broken"


def test_a_good_directory_is_described(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(policy_file.parent)]) == 0
    assert capsys.readouterr().out == f"{policy_file}: policy chat for sglang/chat: default\n"


def test_problems_are_lines_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(BROKEN)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "10 problems in 10 files"
    for line in lines[:-1]:
        file, line_number, column, _ = line.split(":", 3)
        assert Path(file).parent == BROKEN
        assert int(line_number) > 0
        assert int(column) > 0


def test_json_says_the_same(capsys: pytest.CaptureFixture[str], policy_file: Path) -> None:
    assert main(["check", "--json", str(BROKEN / "unit_missing.yaml")]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "policies": [],
        "problems": [
            {
                "file": str(BROKEN / "unit_missing.yaml"), "line": 15, "column": 13, "path": "classes[0].slo.ttft",
                "problem": '"300" has no unit', "hint": "write 300ms or 0.3s",
                "text": f'{BROKEN}/'
                'unit_missing.yaml:15:13: classes[0].slo.ttft: "300" has no unit (write 300ms or 0.3s)',
            }
        ],
        "warnings": [],
    }  # fmt: skip
    assert main(["check", "--json", str(policy_file)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "policies": [
            {
                "name": "chat", "file": str(policy_file), "kind": "sglang", "deployment": "chat",
                "tenants": [{"name": "default", "weight": 1.0, "guaranteed_share": 0.0, "share": 1.0}],
            }
        ],
        "problems": [],
        "warnings": [],
    }  # fmt: skip


def test_tenants_are_shown_with_what_they_get_and_an_unused_one_is_warned_of(
    policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = "tenants:\n  - {name: default, weight: 3, share: 10%}\n  - {name: idle, weight: 1}\nclasses:"
    policy_file.write_text(policy_file.read_text().replace("classes:", tenants, 1))
    assert main(["check", str(policy_file)]) == 0
    warning, policy, shares = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: {policy_file}:")
    assert 'tenants[1].name: no class uses the tenant "idle"' in warning
    assert policy == f"{policy_file}: policy chat for sglang/chat: default"
    assert shares == "  tenants, while all want more: default 75% (at least 10%), idle 25%"
    assert main(["check", "--json", str(policy_file)]) == 0
    assert [found["path"] for found in json.loads(capsys.readouterr().out)["warnings"]] == ["tenants[1].name"]


def test_files_are_checked_as_if_they_were_one_directory(
    policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(policy_file.read_text())
    assert main(["check", str(policy_file), str(other)]) == 1
    assert "selects the same planes as another policy" in capsys.readouterr().out
    assert main(["check", str(policy_file), str(policy_file.parent)]) == 0


def test_without_paths_it_follows_the_settings(
    config_file: Path, policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check"]) == 0
    assert str(config_file) in capsys.readouterr().out
    policy_file.write_text("kind: [\n")
    assert main(["check"]) == 1
    assert f"{policy_file}:2:1: not YAML" in capsys.readouterr().out


def test_a_settings_file_is_checked_as_one(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config_file)]) == 0
    config_file.write_text("kind: Daemon\nlog: {level: loud}\n")
    assert main(["check", str(config_file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{config_file}:1:1: apiVersion: is missing" in lines
    assert any(line.startswith(f'{config_file}:2:14: log.level: "loud" is not known') for line in lines)


def test_what_is_no_policy_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "policy.txt").write_text("x")
    assert main(["check", str(tmp_path / "policy.txt"), str(tmp_path / "absent.yaml"), str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "policy.txt: is not a policy file" in out
    assert "absent.yaml: cannot be read: No such file or directory" in out
    assert f"{tmp_path}: holds no policy" in out
