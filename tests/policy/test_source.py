from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from controld.policy.last_good import LastGoodFile
from controld.policy.model import PolicySet
from controld.policy.problem import PolicyErrors
from controld.policy.source import PolicySource


@pytest.fixture
def directory(tmp_path: Path, good: str) -> Path:
    path = tmp_path / "policies"
    path.mkdir()
    (path / "chat.yaml").write_text(good)
    return path


def kept(tmp_path: Path) -> LastGoodFile:
    return LastGoodFile(tmp_path / "state" / "last_good_policies.json")


def test_good_bad_good_keeps_the_last_good_and_goes_on(directory: Path, good: str) -> None:
    file = directory / "chat.yaml"
    source = PolicySource(directory)
    assert (source.load_initial().generation, source.current.generation) == (1, 1)
    before = source.current

    file.write_text(good.replace("300ms", "300"))
    refused = source.reload()
    assert (refused.accepted, refused.changed, refused.generation) == (False, False, 1)
    assert [str(p) for p in refused.problems] == [
        f'{file}:15:17: classes[0].slo.ttft: "300" has no unit (write 300ms or 0.3s)'
    ]
    assert source.current is before
    assert source.problems == refused.problems

    file.write_text(good)
    same = source.reload()
    assert (same.accepted, same.changed, same.generation) == (True, False, 1)
    assert source.problems == ()

    file.write_text("")
    assert not source.reload().accepted
    file.write_text(good.replace("weight: 3", "weight: 4"))
    other = source.reload()
    assert (other.accepted, other.changed, other.generation) == (True, True, 2)
    assert source.current.policies[0].tenants[0].weight == 4


def test_a_change_without_meaning_is_no_change(directory: Path, good: str) -> None:
    source = PolicySource(directory)
    first = source.load_initial()
    (directory / "chat.yaml").rename(directory / "renamed.yaml")
    (directory / "renamed.yaml").write_text("# a comment\n" + good.replace("weight: 3", "weight: 3.0"))
    second = source.reload()
    assert (second.accepted, second.changed) == (True, False)
    assert (second.generation, second.content_hash) == (first.generation, first.content_hash)


def test_one_broken_file_refuses_all_of_them(directory: Path, good: str) -> None:
    source = PolicySource(directory)
    source.load_initial()
    (directory / "chat.yaml").write_text(good.replace("weight: 3", "weight: 4"))
    (directory / "new.yaml").write_text("kind: Policy\n")
    assert not source.reload().accepted
    assert source.current.policies[0].tenants[0].weight == 3


def test_the_generation_survives_a_restart(directory: Path, tmp_path: Path, good: str) -> None:
    source = PolicySource(directory, kept(tmp_path))
    source.load_initial()
    (directory / "chat.yaml").write_text(good.replace("weight: 3", "weight: 4"))
    assert source.reload().generation == 2

    restarted = PolicySource(directory, kept(tmp_path))
    outcome = restarted.load_initial()
    assert (outcome.generation, outcome.changed) == (2, False)
    assert restarted.current.content_hash == source.current.content_hash

    (directory / "chat.yaml").write_text(good)
    changed_meanwhile = PolicySource(directory, kept(tmp_path)).load_initial()
    assert (changed_meanwhile.generation, changed_meanwhile.changed) == (3, True)


def test_a_restart_with_broken_files_serves_the_last_good(directory: Path, tmp_path: Path, good: str) -> None:
    PolicySource(directory, kept(tmp_path)).load_initial()
    (directory / "chat.yaml").write_text("kind: [")
    source = PolicySource(directory, kept(tmp_path))
    outcome = source.load_initial()
    assert (outcome.accepted, outcome.generation) == (False, 1)
    assert source.current.for_plane("sglang", "chat") is not None
    (directory / "chat.yaml").write_text(good)
    assert source.reload().accepted


def test_a_first_start_with_broken_files_is_refused(directory: Path, tmp_path: Path) -> None:
    (directory / "chat.yaml").write_text("kind: [")
    with pytest.raises(PolicyErrors):
        PolicySource(directory, kept(tmp_path)).load_initial()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4096,
        b'{"format": 1, "gen',
        b"[]",
        b'{"format": 99}',
        b"\xff\xfe",
        b'{"format": 1, "generation": -3}',
    ],
)
def test_a_damaged_memory_is_set_aside(directory: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "state" / "last_good_policies.json"
    file.parent.mkdir()
    file.write_bytes(content)
    source = PolicySource(directory, LastGoodFile(file))
    assert source.load_initial().generation == 1
    assert file.with_suffix(".damaged").read_bytes() == content
    assert json.loads(file.read_text())["generation"] == 1


def test_a_disk_that_refuses_does_not_stop_a_reload(directory: Path, tmp_path: Path, good: str) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    source = PolicySource(directory, kept(tmp_path))
    source.load_initial()
    (directory / "chat.yaml").write_text(good.replace("weight: 3", "weight: 4"))
    assert source.reload().generation == 2


def test_a_pipe_among_the_files_keeps_the_last_good_and_does_not_hold_up_a_reload(directory: Path) -> None:
    source = PolicySource(directory)
    source.load_initial()
    before = source.current
    os.mkfifo(directory / "pipe.yaml")
    assert source.is_touched() is not None
    assert [problem.problem for problem in source.reload().problems] == ["is not a regular file"]
    assert source.is_touched() is None
    assert source.current is before
    (directory / "pipe.yaml").unlink()
    assert source.reload().accepted


def test_listeners_hear_what_is_in_force(directory: Path) -> None:
    heard: list[PolicySet] = []
    source = PolicySource(directory)
    source.subscribe(heard.append)
    source.load_initial()
    assert heard == []
    source.announce()
    assert heard == [source.current]


def test_each_state_of_the_files_is_tried_once(directory: Path, good: str) -> None:
    source = PolicySource(directory)
    source.load_initial()
    assert source.is_touched() is None
    file = directory / "chat.yaml"
    file.write_text("kind: [")
    assert source.is_touched() is not None
    source.reload()
    assert source.is_touched() is None
    file.unlink()
    assert source.is_touched() is not None
    source.reload()
    assert source.is_touched() is None
    file.write_text(good)
    assert source.is_touched() is not None


def test_damaged_last_good_policies_are_set_aside_and_said(directory: Path, tmp_path: Path) -> None:
    PolicySource(directory, kept(tmp_path)).load_initial()
    file = tmp_path / "state" / "last_good_policies.json"
    whole = file.read_text()
    healthy = PolicySource(directory, kept(tmp_path))
    healthy.load_initial()
    assert healthy.last_good_problem == ""
    file.write_text(whole[: len(whole) // 2])
    source = PolicySource(directory, kept(tmp_path))
    assert source.load_initial().accepted
    assert "damaged" in source.last_good_problem and "last_good_policies.damaged" in source.last_good_problem
    assert source.reload().accepted
    assert source.last_good_problem, "as long as this process lives"
