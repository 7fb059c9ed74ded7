"""The worker process with a small engine of plain arithmetic in it: who dies, who is told, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controld.contract.configuration import Configuration
from controld.contract.video import MemorySplit, Transition
from dataplanes.longlive.adapter.worker_engine import WorkerDiedError, WorkerEngine
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec

from .conftest import DOUBLE

# A process of its own with torch in it takes seconds to start.
pytestmark = pytest.mark.slow

Make = Callable[..., WorkerEngine]
ONE = Configuration({"steps": 4, "ranks": 1})
TWO = Configuration({"steps": 2, "ranks": 2})
FOUR = Configuration({"steps": 4, "ranks": 4})
SPEC = LoadSpec(checkpoint="x", setting=ONE)


def small(make_worker: Make, **keywords: str) -> WorkerEngine:
    more = {"step_deadline_s": 60.0} if "deadline" not in keywords else {"step_deadline_s": 0.5}
    keywords.pop("deadline", None)
    return make_worker(factory="small_engine:make", keywords=keywords, **more)


def wait_for(file: Path) -> list[int]:
    limit = time.monotonic() + 150
    while not file.exists():
        assert time.monotonic() < limit, "the engine never began"
        time.sleep(0.01)
    return [int(pid) for pid in file.read_text().split()]


def is_gone(pid: int) -> bool:
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def seen_meanwhile(engine: WorkerEngine, call: Callable[[], object]) -> set[frozenset[str]]:
    """What another thread is told of the open sessions while a call is under way."""
    seen: set[frozenset[str]] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.001):
            seen.add(engine.sessions())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        call()
    finally:
        is_over.set()
        looking.join()
    return seen


def test_an_engine_in_a_worker_is_the_engine(make_worker: Make) -> None:
    engine = small(make_worker)
    found = engine.capabilities()
    assert (found.engine, found.transitions["ranks"], found.left_out) == (
        "small",
        Transition.RESTART,
        {"ranks=8": "too many"},
    )
    assert found.space.count() == 6
    assert engine.load(SPEC) == MemorySplit(weights_bytes=100)
    engine.open(SessionSpec(session_id="a", prompt="four", chunks=2))
    first = engine.step("a")
    engine.push_prompt("a", "longer")
    second = engine.step("a")
    assert [int(one.frames[0, 0, 0, 0]) for one in (first, second)] == [4, 6]
    assert (first.report.session_chunk, second.report.session_chunk, second.is_last) == (0, 1, True)
    assert engine.close("a").tolist() == [[[[255, 255, 255]]]]
    with pytest.raises(EngineError, match="unknown session"):
        engine.step("a")
    assert engine.unload() == MemorySplit()


def test_a_worker_killed_mid_chunk_is_told_with_its_sessions_and_a_load_starts_another(
    make_worker: Make, tmp_path: Path
) -> None:
    engine = small(make_worker, fault="child", touches=str(tmp_path / "began"))
    engine.load(SPEC)
    for name in ("b", "a"):
        engine.open(SessionSpec(session_id=name, prompt="x"))
    raised: list[EngineError] = []

    def step() -> None:
        with pytest.raises(WorkerDiedError) as caught:
            engine.step("a")
        raised.append(caught.value)

    thread = threading.Thread(target=step)
    thread.start()
    pids = wait_for(tmp_path / "began")
    os.kill(pids[0], signal.SIGKILL)
    thread.join(timeout=120)
    (error,) = raised
    assert isinstance(error, WorkerDiedError)
    assert error.code == "engine.worker_died"
    assert error.lost_sessions == engine.lost_sessions == ("a", "b")
    assert "SIGKILL" in error.message and "lost sessions: a, b" in error.message
    assert all(map(is_gone, pids)), "what the engine started is gone, too"
    for call in (lambda: engine.step("a"), lambda: engine.apply(ONE, 1)):
        with pytest.raises(WorkerDiedError):
            call()
    engine._settings = replace(engine._settings, keywords={})
    assert engine.load(SPEC) == MemorySplit(weights_bytes=100)
    assert engine.lost_sessions == ()
    engine.open(SessionSpec(session_id="a", prompt="x"))
    assert len(engine.step("a").frames) == 2


def test_sessions_of_a_worker_that_died_while_nobody_called_it_are_not_open_any_more(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    for name in ("a", "b"):
        engine.open(SessionSpec(session_id=name, prompt="x"))
    assert engine.sessions() == {"a", "b"}
    engine.kill()
    limit = time.monotonic() + 60
    while engine.sessions():
        assert time.monotonic() < limit
        time.sleep(0.01)
    with pytest.raises(WorkerDiedError, match="lost sessions: a, b"):
        engine.step("a")
    with pytest.raises(WorkerDiedError, match="session b was lost with its worker"):
        engine.step("b")
    assert engine.sessions() == frozenset()


def test_sessions_that_a_load_gives_up_do_not_come_back_while_the_next_worker_starts(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    os.kill(engine.worker_pid or 0, signal.SIGKILL)
    limit = time.monotonic() + 60
    while engine.sessions():
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert seen_meanwhile(engine, lambda: engine.load(SPEC)) == {frozenset()}


def test_sessions_stay_open_over_a_restart(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.apply(TWO, 1)
    before = engine.worker_pid
    assert seen_meanwhile(engine, lambda: engine.step("a")) == {frozenset({"a"})}
    assert engine.worker_pid != before


def test_a_worker_that_ends_by_itself_is_told_with_what_it_last_printed(make_worker: Make) -> None:
    engine = small(make_worker, fault="exit")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    with pytest.raises(WorkerDiedError, match="status 3; it last printed: last words"):
        engine.step("a")


def test_a_worker_that_does_not_answer_in_time_is_ended(make_worker: Make, tmp_path: Path) -> None:
    engine = small(make_worker, fault="hang", touches=str(tmp_path / "began"), deadline="short")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    with pytest.raises(WorkerDiedError, match=r"did not answer step within 0\.5 s"):
        engine.step("a")
    assert not engine.is_running()


def test_a_call_under_way_can_be_broken_off_from_another_thread(make_worker: Make, tmp_path: Path) -> None:
    engine = small(make_worker, fault="hang", touches=str(tmp_path / "began"))
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    killer = threading.Thread(target=lambda: (wait_for(tmp_path / "began"), engine.kill()))
    killer.start()
    with pytest.raises(WorkerDiedError):
        engine.step("a")
    killer.join()


def test_a_fault_in_the_engine_s_own_code_is_told_and_the_worker_lives(make_worker: Make) -> None:
    engine = small(make_worker, fault="raise")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    with pytest.raises(EngineError, match="ValueError: a bug in the engine's own code") as caught:
        engine.step("a")
    assert caught.value.code == "engine.failed"
    assert engine.is_running()


def test_an_engine_that_cannot_go_on_in_its_process_costs_the_worker(make_worker: Make) -> None:
    engine = small(make_worker, fault="device")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    with pytest.raises(WorkerDiedError, match="the device failed; lost sessions: a"):
        engine.step("a")
    assert not engine.is_running()


def test_no_worker_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    code = f"""
from dataplanes.longlive.adapter.worker_engine import WorkerEngine
from dataplanes.longlive.adapter.worker_process import WorkerSettings
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from controld.contract.configuration import Configuration
path = {str(DOUBLE / "engines")!r}
engine = WorkerEngine(WorkerSettings(factory="small_engine:make", environment={{"PYTHONPATH": path}},
    keywords={{"fault": "child", "touches": {str(tmp_path / "began")!r}}}))
engine.load(LoadSpec(checkpoint="x", setting=Configuration({{"steps": 4, "ranks": 1}})))
engine.open(SessionSpec(session_id="a", prompt="x"))
engine.step("a")
"""
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        pids = wait_for(tmp_path / "began")
    finally:
        owner.kill()
        owner.wait()
    assert all(map(is_gone, pids))


def test_a_factory_that_refuses_is_told(make_worker: Make) -> None:
    engine = make_worker(factory="small_engine:refuse", keywords={})
    with pytest.raises(EngineError, match=r"longlive\.toml\.checkout: is no folder"):
        engine.capabilities()
    broken = make_worker(factory="no_such_module:make", keywords={})
    with pytest.raises(EngineError, match="no_such_module"):
        broken.load(SPEC)


def test_a_restart_opens_the_sessions_again_and_counts_on(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="four", chunks=4))
    engine.step("a")
    engine.push_prompt("a", "longer")
    engine.step("a")
    engine.push_prompt("a", "longest", at_chunk=3)
    before = engine.worker_pid
    engine.apply(TWO, 5)
    assert engine.worker_pid == before, "nothing happens before the safe point"
    result = engine.step("a")
    assert engine.worker_pid != before
    (applied,) = result.applied
    assert (applied.version, applied.setting_id, applied.chunk) == (5, TWO.config_id, 2)
    assert (applied.transition, applied.keeps_kv, dict(applied.refused)) == (Transition.RESTART, False, {})
    assert applied.seconds > 0
    report = result.report
    assert (report.chunk, report.session_chunk, report.first_frame_s, report.setting_id) == (2, 2, 0.0, TWO.config_id)
    # What the old worker's decoder held comes first.
    assert result.frames[:, 0, 0, 0].tolist() == [255, 7, 7]
    assert not result.is_last
    assert engine.step("a").is_last
    engine.apply(Configuration({"steps": 4, "ranks": 2}), 6)
    engine.open(SessionSpec(session_id="b", prompt="x"))
    after = engine.step("b")
    assert [(one.version, one.chunk) for one in after.applied] == [(6, 4)]


def test_an_engine_that_keeps_history_over_a_restart_does_it_by_itself(make_worker: Make) -> None:
    engine = small(make_worker, keeps="yes")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    before = engine.worker_pid
    engine.apply(TWO, 1)
    assert engine.step("a").applied[0].setting_id == TWO.config_id
    assert engine.worker_pid == before


def test_a_restart_that_fails_goes_back_to_what_was_there(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.step("a")
    engine.apply(FOUR, 1)
    result = engine.step("a")
    (applied,) = result.applied
    assert applied.setting_id == ONE.config_id == result.report.setting_id
    assert dict(applied.refused) == {"ranks": "no memory for 4 ranks"}


def test_a_worker_killed_while_it_loads_for_a_restart_is_told_as_dead_and_a_load_starts_another(
    make_worker: Make, tmp_path: Path
) -> None:
    engine = small(make_worker, fault="hang_load", touches=str(tmp_path / "began"))
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.step("a")
    engine.apply(TWO, 7)
    killer = threading.Thread(target=lambda: os.kill(wait_for(tmp_path / "began")[0], signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerDiedError, match=r"died during load: signal SIGKILL.*lost sessions: a") as caught:
        engine.step("a")
    killer.join()
    assert caught.value.lost_sessions == engine.lost_sessions == ("a",)
    (answer,) = caught.value.applied
    assert (answer.version, answer.setting_id, answer.chunk) == (7, ONE.config_id, 1), "whoever asked is told, too"
    assert set(answer.refused) == {"steps", "ranks"} and "SIGKILL" in answer.refused["ranks"]
    assert not engine.is_running()
    for call in (lambda: engine.step("a"), lambda: engine.apply(ONE, 8)):
        with pytest.raises(WorkerDiedError):
            call()
    assert engine.load(SPEC) == MemorySplit(weights_bytes=100)
    engine.open(SessionSpec(session_id="b", prompt="x"))
    result = engine.step("b")
    assert (result.report.chunk, result.report.setting_id, result.applied) == (1, ONE.config_id, ())


def test_a_restart_that_cannot_go_back_either_is_told_with_its_sessions(make_worker: Make, tmp_path: Path) -> None:
    engine = small(make_worker, fault="no_way_back", touches=str(tmp_path / "loaded"))
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.apply(FOUR, 1)
    with pytest.raises(WorkerDiedError, match="somebody else took the memory; lost sessions: a") as caught:
        engine.step("a")
    assert "no memory for 4 ranks" in caught.value.applied[0].refused["ranks"]
    assert not engine.is_running()
    (tmp_path / "loaded").unlink()
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    assert engine.step("a").report.chunk == 0


def test_a_worker_that_does_not_come_up_for_a_restart_is_told_with_its_sessions(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.apply(TWO, 1)
    engine._settings = replace(engine._settings, start_deadline_s=0.01)
    with pytest.raises(WorkerDiedError, match=r"within 0\.01 s.*lost sessions: a"):
        engine.step("a")
    with pytest.raises(WorkerDiedError, match="lost with its worker"):
        engine.step("a")


def test_a_session_that_a_restarted_engine_has_no_room_for_is_told_and_the_others_go_on(make_worker: Make) -> None:
    engine = small(make_worker, fault="full")
    engine.load(SPEC)
    for name in ("a", "b"):
        engine.open(SessionSpec(session_id=name, prompt="x"))
    engine.apply(TWO, 3)
    with pytest.raises(EngineError, match="no memory for another cache") as caught:
        engine.step("a")
    assert caught.value.code == "engine.out_of_memory"
    assert [(one.version, one.setting_id) for one in caught.value.applied] == [(3, TWO.config_id)]
    with pytest.raises(EngineError, match="unknown session"):
        engine.step("a")
    result = engine.step("b")
    assert (result.report.setting_id, result.report.session_chunk, result.applied) == (TWO.config_id, 0, ())


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.step("a"),
        lambda engine: engine.push_prompt("a", "longer"),
        lambda engine: engine.close("a"),
    ],
    ids=["step", "push_prompt", "close"],
)
@pytest.mark.parametrize(
    ("fault", "code"),
    [("full", "engine.out_of_memory"), ("close", "engine.decoder_failed")],
    ids=["not opened again", "not closed"],
)
def test_a_session_that_another_one_s_step_lost_in_a_restart_is_told_why_when_it_is_next_asked_for(
    make_worker: Make, fault: str, code: str, ask: Callable[[WorkerEngine], object]
) -> None:
    engine = small(make_worker, fault=fault)
    engine.load(SPEC)
    for name in ("a", "b"):
        engine.open(SessionSpec(session_id=name, prompt="x"))
    engine.apply(TWO, 3)
    assert [one.version for one in engine.step("b").applied] == [3]
    assert engine.sessions() == {"b"}, "before anybody asks for it"
    with pytest.raises(EngineError) as caught:
        ask(engine)
    assert (caught.value.code, caught.value.applied) == (code, ())
    with pytest.raises(EngineError) as caught:
        ask(engine)
    assert caught.value.code == "engine.unknown_session", "told once"
    assert len(engine.step("b").frames) == 2


@pytest.mark.parametrize("forget", ["open", "load"])
def test_why_a_session_was_lost_in_a_restart_is_not_told_of_another_clip_of_its_name(
    make_worker: Make, forget: str
) -> None:
    engine = small(make_worker, fault="close")
    engine.load(SPEC)
    for name in ("a", "b"):
        engine.open(SessionSpec(session_id=name, prompt="x"))
    engine.apply(TWO, 3)
    engine.step("b")
    if forget == "load":
        engine.load(SPEC)
        with pytest.raises(EngineError, match="unknown session"):
            engine.step("a")
    engine.open(SessionSpec(session_id="a", prompt="x"))
    assert engine.step("a").report.session_chunk == 0
    with pytest.raises(EngineError, match="the decoder failed"):
        engine.close("a")
    with pytest.raises(EngineError, match="unknown session"):
        engine.step("a")


def test_an_older_version_is_stale_over_a_restart_too(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    engine.apply(TWO, 5)
    with pytest.raises(EngineError, match="older than 5") as caught:
        engine.apply(ONE, 4)
    assert caught.value.code == "engine.stale"
    engine.step("a")
    with pytest.raises(EngineError, match="older than 5"):
        engine.apply(ONE, 4)


def test_after_a_crash_chunks_count_on_and_versions_begin_anew(make_worker: Make) -> None:
    engine = small(make_worker)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    assert [engine.step("a").report.chunk for _ in range(2)] == [0, 1]
    engine.apply(TWO, 42)
    engine.kill()
    with pytest.raises(WorkerDiedError):
        engine.step("a")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="b", prompt="x"))
    engine.apply(Configuration({"steps": 2, "ranks": 1}), 41)
    result = engine.step("b")
    assert (result.report.chunk, result.report.session_chunk) == (2, 0)
    assert [(one.version, one.chunk) for one in result.applied] == [(41, 2)]
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="c", prompt="x"))
    assert engine.step("c").report.chunk == 3, "the same worker goes on counting by itself"


@pytest.mark.parametrize(("fault", "code"), [("chunk", "engine.decoder_failed"), ("raise", "engine.failed")])
def test_a_chunk_that_fails_costs_its_session_only(make_worker: Make, fault: str, code: str) -> None:
    engine = small(make_worker, fault=fault)
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="bad", chunks=5))
    with pytest.raises(EngineError) as caught:
        engine.step("a")
    assert caught.value.code == code
    with pytest.raises(EngineError, match="unknown session") as caught:
        engine.step("a")
    assert caught.value.code == "engine.unknown_session"
    # Neither side keeps it, whether or not the engine closed it by itself.
    engine.open(SessionSpec(session_id="a", prompt="good"))


def test_out_of_memory_at_load_costs_the_worker_so_that_all_memory_is_back(make_worker: Make) -> None:
    engine = small(make_worker)
    with pytest.raises(EngineError, match="no memory for 4 ranks") as caught:
        engine.load(replace(SPEC, setting=FOUR))
    assert caught.value.code == "engine.out_of_memory"
    assert not engine.is_running()
    assert engine.load(SPEC) == MemorySplit(weights_bytes=100)


def test_two_workers_at_once_do_not_disturb_each_other(make_worker: Make) -> None:
    one, other = small(make_worker), small(make_worker)
    for engine in (one, other):
        engine.load(SPEC)
        engine.open(SessionSpec(session_id="a", prompt="x"))
    assert one.worker_pid != other.worker_pid
    one.step("a")
    one.kill()
    with pytest.raises(WorkerDiedError):
        one.step("a")
    assert other.step("a").report.chunk == 0


def test_what_the_worker_prints_goes_to_the_log(make_worker: Make, tmp_path: Path) -> None:
    engine = make_worker(factory="small_engine:make", keywords={"fault": "exit"}, log=tmp_path / "worker.log")
    engine.load(SPEC)
    engine.open(SessionSpec(session_id="a", prompt="x"))
    with pytest.raises(WorkerDiedError):
        engine.step("a")
    assert (tmp_path / "worker.log").read_text() == "last words\n"
