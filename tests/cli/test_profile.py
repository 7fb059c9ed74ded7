"""Studies from the command line: started, watched over a daemon's death, paused, compared, shown."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controld.cli.main import main
from controld.cli.profile import EXAMPLES, _watch_lines, sparkline
from controld.cli.study_screen import study_screen
from controld.config import load_config
from controld.contract.space import Parameter, StrategySpace
from controld.contract.trial import CoderMeasurement, SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from controld.profiling.request import Budget
from dataplanes.agent import Agent, AgentIdentity

SPACE = StrategySpace(
    parameters=(
        Parameter(name="quantise", values=("nvfp4", "fp8_e4m3", "levels")),
        Parameter(name="step", values=tuple(range(1, 13)), ordered=True),
        Parameter(name="code", values=("entropy", "zstd"), lossy=False),
    )
)
BUDGET = 24


class Worker:
    """A real agent that makes its measurements up; it can be held in the middle of a trial."""

    def __init__(self, address: str) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.measured: list[tuple[str, int]] = []
        identity = AgentIdentity(
            deployment="chat", agent_id="w0", kind="sglang", role="profiler", model_name="tiny", model_fingerprint="m",
            device="cpu", torch_version="2", threads=1, space_json=SPACE.to_json(), tiers=("pd",),
        )  # fmt: skip
        self.agent = Agent(identity, address)
        self.agent.on_trial(self._measure)
        self.agent.start()
        self.agent.attached()

    def _measure(self, task: TrialTask, progress: Any, cancelled: Callable[[], bool]) -> TrialOutcome:
        del progress
        while not self.may_go_on.wait(0.01):
            if cancelled():
                return TrialOutcome(study_id=task.study_id, trial_id=task.trial_id, status=TrialStatus.CANCELLED)
        self.measured.append((task.lossy.config_id, task.first_segment))
        step = int(str(task.lossy["step"]))
        segments = range(task.first_segment, task.first_segment + task.segments_per_length)
        places = [(tokens, segment) for tokens in task.prompt_tokens for segment in segments]
        return TrialOutcome(
            study_id=task.study_id,
            trial_id=task.trial_id,
            status=TrialStatus.MEASURED,
            losses=tuple(
                SegmentLoss(prompt_tokens=t, segment=s, loss_nats=0.001 * step + 1e-5 * s, top1_agreement=0.9)
                for t, s in places
            ),
            coders=tuple(
                CoderMeasurement(
                    code=code, prompt_tokens=t, segment=s, raw_bytes=t * 1000, wire_bytes=t * 1000 // (step + 1),
                    encode_s=t * 1e-6, decode_s=t * 1e-6,
                )
                for code in task.coders
                for t, s in places
            ),
            seconds=0.1,
            corpus="made up",
        )  # fmt: skip


class House:
    """The daemon of a settings file as a process."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def start(self) -> None:
        self._process.start()
        assert main(["reload", "--wait", "--timeout", "30"]) == 0

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()


@pytest.fixture
def house(config_file: Path, policy_file: Path, serving_of: Any) -> Iterator[House]:
    del policy_file
    made = House(serving_of(config_file))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def worker(house: House, config_file: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Worker]:
    (address,) = (str(one) for one in load_config(config_file).fleet.listen)
    made = Worker(address)
    until(lambda: "w0" in said(capsys, "status", "--json"), "the worker is connected")
    yield made
    made.may_go_on.set()
    made.agent.close()


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + 120
    while not (met := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)
    return met


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_wrong_budget_is_named_and_a_grid_is_measured_watched_listed_and_compared(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    for budget in ("0", "soon", "3.5"):
        assert main(["profile", "--budget", budget]) == 1
        assert "budget" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["profile", "--grid", "--lengths", "64", "--segments", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count(": measured ") == len(worker.measured) == 3
    assert " finished: 3 measured; hypervolume 0." in shown.out
    (study,) = json.loads(said(capsys, "profile", "--list", "--json"))
    assert study["id"] in said(capsys, "profile", "--list")
    (compared,) = json.loads(said(capsys, "profile", "--compare", study["id"], "--json"))
    assert len(compared["hypervolume_by_trial"]) == 3
    table = said(capsys, "profile", "--compare", study["id"], study["id"])
    assert table.count(study["id"]) == 2 and "█" in table
    assert main(["profile", "--pause", study["id"]]) == 1
    assert "is finished" in capsys.readouterr().err


@pytest.mark.slow
def test_a_watcher_outlives_the_daemon_and_a_pause(
    house: House, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("botorch")
    worker.may_go_on.clear()
    study = json.loads(
        said(capsys, "profile", "--budget", str(BUDGET), "--lengths", "64", "--max-segments", "2", "--detach", "--json")
    )
    assert (study["state"], study["budget"], study["method"]) == ("running", BUDGET, "search")
    ended: list[int] = []
    watcher = threading.Thread(target=lambda: ended.append(main(["profile", "--follow", study["id"]])))
    watcher.start()
    until(lambda: json.loads(said(capsys, "profile", "--list", "--json"))[0]["trials_total"], "trials are chosen")
    assert json.loads(said(capsys, "profile", "--pause", study["id"], "--json"))["state"] == "paused"
    house.kill()
    house.start()
    assert json.loads(said(capsys, "profile", "--list", "--json"))[0]["state"] == "paused"
    worker.may_go_on.set()
    assert json.loads(said(capsys, "profile", "--resume", study["id"], "--detach", "--json"))["state"] == "running"
    watcher.join(300)
    assert ended == [0]
    assert len(worker.measured) == len(set(worker.measured)) == BUDGET
    (compared,) = json.loads(said(capsys, "profile", "--compare", study["id"], "--json"))
    assert (compared["stop_reason"], compared["trials_done"]) == ("budget", BUDGET)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--grid", "--restrict", "step=1"], "--restrict belongs to --budget"),
        (["--grid", "--seed", "3"], "--seed belongs to --budget"),
        (["--grid", "--seed", "0"], "--seed belongs to --budget"),
        (["--budget", "5", "--quick"], "--quick belongs to --grid"),
        (["--follow", "s", "--segments", "0"], "--segments belongs to --budget and --grid"),
        (["--list", "--workload", "general"], "--workload belongs to --budget and --grid"),
        (["--pause", "s", "--plane", "sglang"], "--plane belongs to --budget and --grid"),
        (["--resume", "s", "--max-segments", "3"], "--max-segments belongs to --budget"),
        (["--cancel", "s", "--quick"], "--quick belongs to --grid"),
        (["--compare", "s", "--model", "m"], "--model belongs to --budget and --grid"),
    ],
)
def test_options_of_another_action_are_refused(
    config_file: Path, options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *options]) == 1
    assert word in capsys.readouterr().err


def test_a_parameter_is_restricted_once(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--budget", "5", "--restrict", "step=1", "--restrict", "step=2"]) == 1
    assert "--restrict step is given twice" in capsys.readouterr().err


def test_the_budgets_of_the_examples_are_budgets() -> None:
    budgets = re.findall(r"--budget (\w+)", EXAMPLES)
    assert "30min" in budgets
    for text in budgets:
        Budget.from_json(int(text) if text.isdecimal() else text)


@pytest.mark.parametrize("options", [[], ["--grid", "--budget", "3"], ["--budget", "3", "--restrict", "step"]])
def test_wrong_usage_is_told_apart(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *options])
    assert ended.value.code == 2


def test_a_sparkline_has_the_height_of_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0], 1.0) == "▁▅█"
    assert sparkline([0.0, 0.0], 1e-9) == "▁▁"
    assert len(sparkline([0.1] * 500, 1.0)) == 60
    assert sparkline(list(range(1000)), 999.0)[-1] == "█"
    assert sparkline([], 1.0) == ""


def test_the_screen_fits_and_shows_budget_front_and_time() -> None:
    trial = {
        "id": "0001", "source": "model", "lossy": {"quantise": "nvfp4"}, "state": "running", "segments_done": 1,
        "segments_total": 2, "loss_nats": 0.01, "loss_se_nats": None, "seconds": 3.0,
    }  # fmt: skip
    point = {"label": "nvfp4 zstd", "loss_nats": 0.01, "ratio": 4.0, "seconds_per_byte": 2e-9}
    study = {
        "id": "s", "state": "running", "budget": 200, "trials_done": 30, "trials_total": 32, "age_s": 60.0,
        "segments_done": 60, "segments_total": 64, "eta_s": 100.0, "trials": [trial] * 18, "front": [point] * 50,
        "hypervolume": 0.5, "hypervolume_by_trial": [0.1, 0.3, 0.5], "detail": "2 of 32 trials were drawn at random",
        "medium": "kv",
        "seconds": {"measuring": 50.0, "search": 4.0, "waiting": 5.0},
    }  # fmt: skip
    out = Console(file=io.StringIO(), width=120)
    out.print(study_screen(study, 40))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) <= 40
    assert "30/200 trials" in text and "at most 100 s left" in text and "search 4 s" in text
    assert "hypervolume 0.5000  ▂▅█" in text
    assert "more on the front" in text and "drawn at random" in text


def test_lines_of_a_paused_study_say_so_and_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    states = [{"id": "s1", "state": state, "trials": []} for state in ("paused", "paused", "running", "finished")]
    _watch_lines(iter(states))
    assert capsys.readouterr().err.splitlines() == [
        "study s1 is paused: controld profile --resume s1",
        "study s1 goes on",
    ]
