from __future__ import annotations

import json
from pathlib import Path

import pytest

from controld.cli.main import main


def test_broken_files_are_refused_as_by_check_without_any_daemon(
    config_file: Path, policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy_file.write_text(policy_file.read_text() + "nonsense: 1\n")
    assert main(["check", str(policy_file)]) == 1
    checked = capsys.readouterr().out.splitlines()[0]
    for paths in ([str(policy_file)], [str(policy_file.parent)]):
        assert main(["diff", *paths]) == 1
        assert capsys.readouterr().err.splitlines() == [checked]
    assert main(["diff"]) == 1, "the directory of the settings file"
    assert "nonsense" in capsys.readouterr().err
    notes = policy_file.with_name("notes.txt")
    notes.write_text("no policy")
    assert main(["--json", "diff", str(notes)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["problem"] == "is not a policy file"


def test_without_a_daemon_nothing_can_be_compared(
    config_file: Path, policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(policy_file)]) == 1
    assert "no daemon listens" in capsys.readouterr().err
