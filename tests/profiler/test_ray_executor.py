"""Trials on a real local Ray: the same outcomes as in this process; a lost worker is a failed trial with a reason."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from controld.contract.clock import SystemClock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from controld.fleet import FleetServer
from controld.profiling.service import StudyService
from controld.store.sqlite import SqliteStore
from dataplanes.sglang.profiler.__main__ import main
from dataplanes.sglang.profiler.ray_executor import BenchSettings, Cluster, RayExecutorError, RayResources, RaySlot
from dataplanes.sglang.profiler.trial import TimingPlan, TrialRunner

PATIENCE_S = 300.0
SMALL: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
LENGTHS = tuple(range(64, 512, 16))
"""Enough for a trial to be in the middle of for seconds."""
LOSSY = Configuration({"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 0})


def task(trial_id: str = "t1", segments: int = 2, **changes: Any) -> TrialTask:
    values: dict[str, Any] = {
        "study_id": "s", "trial_id": trial_id, "workload": "dialogue", "lossy": LOSSY, "coders": ("none", "entropy"),
        "prompt_tokens": (64,), "segments_per_length": segments, "continuation_tokens": 32, **changes,
    }  # fmt: skip
    return TrialTask(**values)


def test_resources_are_read_as_ray_takes_them() -> None:
    read = RayResources.parse('{"num_cpus": 2, "num_gpus": 0.5, "memory": 1000, "resources": {"kv": 1}}')
    assert read.options() == {"num_cpus": 2.0, "num_gpus": 0.5, "memory": 1000, "resources": {"kv": 1.0}}
    assert RayResources.parse("{}").options() == {"num_cpus": 1.0, "num_gpus": 0.0}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "resources"),
        ("[1]", "resources"),
        ('{"cpus": 1}', "resources.cpus"),
        ('{"num_cpus": -1}', "resources.num_cpus"),
        ('{"num_cpus": "1"}', "resources.num_cpus"),
        ('{"num_gpus": NaN}', "resources.num_gpus"),
        ('{"num_cpus": true}', "resources.num_cpus"),
        ('{"num_cpus": 1.5}', "resources.num_cpus"),
        ('{"resources": 1}', "resources.resources"),
        ('{"resources": {"CPU": 1}}', "resources.resources.CPU"),
        ('{"resources": {"kv": null}}', "resources.resources.kv"),
    ],
)
def test_resources_that_are_wrong_are_named(text: str, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        RayResources.parse(text)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options", [["--trials-at-once", "2"], ["--executor", "ray", "--once", "a.json", "--out", "b.json"]]
)
def test_options_that_do_not_go_together_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "nowhere", *options])
    assert "--" in capsys.readouterr().err


def start_cluster(attempts: int = 3) -> Cluster:
    """Ray gives a node 30 s to start, which a busy machine may need longer for."""
    for attempt in range(attempts):
        try:
            return Cluster("local", RayResources.parse('{"num_cpus": 1}'), SMALL)
        except RayExecutorError as error:
            if attempt + 1 == attempts or "timed out" not in error.message:
                raise
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = start_cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def bench_settings(tiny_model_dir: Path, texts_dir: Path) -> BenchSettings:
    return BenchSettings(
        model_dir=tiny_model_dir,
        texts_dir=texts_dir,
        page_tokens=16,
        frame_bytes=64 * 512,
        artefacts_dir=None,
        timing=TimingPlan(codec_threads=1, evaluation_threads=1),
    )


@pytest.fixture(scope="module")
def slot(cluster: Cluster, bench_settings: BenchSettings) -> Iterator[RaySlot]:
    made = RaySlot(cluster, bench_settings)
    made.prepare(lambda: False, PATIENCE_S)
    yield made
    made.close()


def actor_processes(parent: int | None = None) -> set[int]:
    """The processes of actors below this one."""
    found = set()
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if any("ray::TrialActor" in part for part in process.cmdline()):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            pass
    return found


def never() -> bool:
    return False


class FirstNews:
    """Does something at the first progress."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.seen: list[TrialOutcome] = []

    def __call__(self, outcome: TrialOutcome) -> None:
        self.seen.append(outcome)
        if len(self.seen) == 1:
            self._act()


@pytest.mark.slow
def test_an_actor_measures_what_this_process_measures(slot: RaySlot, bench_settings: BenchSettings) -> None:
    outcome = slot.run(task(), lambda news: None, never)
    assert outcome.status is TrialStatus.MEASURED
    bench = bench_settings.bench()
    here = TrialRunner(bench.space, bench.bank_for, bench.codec_for, bench_settings.timing).run(task())
    assert [loss.loss_nats for loss in outcome.losses] == pytest.approx([loss.loss_nats for loss in here.losses])
    assert [(c.code, c.wire_bytes) for c in outcome.coders] == [(c.code, c.wire_bytes) for c in here.coders]
    assert outcome.corpus == here.corpus
    assert slot.place is not None and slot.place.model == bench.identity


@pytest.mark.slow
def test_cancel_reaches_the_trial_and_the_actor_stays(slot: RaySlot) -> None:
    before = actor_processes()
    cancelled = threading.Event()
    news = FirstNews(cancelled.set)
    outcome = slot.run(task("c1", segments=8, prompt_tokens=LENGTHS), news, cancelled.is_set)
    assert outcome.status is TrialStatus.CANCELLED
    assert 0 < len(outcome.losses) < 8 * len(LENGTHS)
    assert all(seen.status is TrialStatus.PROGRESS for seen in news.seen)
    assert slot.run(task("c2"), lambda news: None, never).status is TrialStatus.MEASURED
    assert actor_processes() == before


@pytest.mark.slow
def test_the_deadline_passes_through(slot: RaySlot) -> None:
    outcome = slot.run(task("d1", segments=8, prompt_tokens=LENGTHS, deadline_s=0.05), lambda news: None, never)
    assert outcome.status is TrialStatus.FAILED
    assert "trial.deadline" in outcome.detail


@pytest.mark.slow
def test_a_killed_worker_is_a_failed_trial_with_the_reason_and_the_next_one_is_measured(slot: RaySlot) -> None:
    (victim,) = actor_processes()
    news = FirstNews(lambda: os.kill(victim, signal.SIGKILL))
    outcome = slot.run(task("k1", segments=8, prompt_tokens=LENGTHS), news, never)
    assert outcome.status is TrialStatus.FAILED
    assert outcome.detail.startswith("ray.worker_lost: the Ray worker died in the trial")
    assert "\n" not in outcome.detail
    assert slot.run(task("k2"), lambda news: None, never).status is TrialStatus.MEASURED
    assert actor_processes() != {victim}


class Unreadable(Configuration):
    """Raises where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.slow
def test_an_exception_in_a_task_is_a_failed_trial_with_its_text_and_no_dead_worker(slot: RaySlot) -> None:
    outcome = slot.run(task("x1", lossy=Unreadable(LOSSY)), lambda news: None, never)
    assert outcome.status is TrialStatus.FAILED
    assert outcome.detail.startswith("ray.task_raised: ")
    assert "invalid literal for int() with base 10: 'no number'" in outcome.detail
    assert "\n" not in outcome.detail
    assert slot.run(task("x2"), lambda news: None, never).status is TrialStatus.MEASURED


@pytest.mark.slow
def test_an_actor_that_cannot_be_made_says_why(cluster: Cluster, bench_settings: BenchSettings, tmp_path: Path) -> None:
    broken = RaySlot(cluster, replace(bench_settings, model_dir=tmp_path))
    with pytest.raises(RayExecutorError, match=r"config\.json"):
        broken.prepare(never, PATIENCE_S)
    outcome = broken.run(task("b1"), lambda news: None, never)
    assert outcome.status is TrialStatus.FAILED
    assert "config.json" in outcome.detail


@pytest.mark.slow
def test_a_trial_that_waits_for_resources_can_be_cancelled(
    cluster: Cluster, slot: RaySlot, bench_settings: BenchSettings
) -> None:
    second, third = RaySlot(cluster, bench_settings), RaySlot(cluster, bench_settings)
    second.prepare(never, PATIENCE_S)
    try:
        cancelled = threading.Event()
        threading.Timer(1.0, cancelled.set).start()
        assert third.run(task("w1"), lambda news: None, cancelled.is_set).status is TrialStatus.CANCELLED
        outcome = third.run(task("w2", deadline_s=1.0), lambda news: None, never)
        assert outcome.status is TrialStatus.FAILED
        assert "resources" in outcome.detail
    finally:
        second.close()


@pytest.mark.slow
def test_resources_that_no_node_has_are_refused_at_once(cluster: Cluster) -> None:
    cluster.require_room()
    for text, name in (('{"num_cpus": 64}', "CPU 64"), ('{"resources": {"kv": 1}}', "kv 1")):
        cluster._resources = RayResources.parse(text)
        try:
            with pytest.raises(RayExecutorError, match=name):
                cluster.require_room()
        finally:
            cluster._resources = RayResources.parse("{}")


class House:
    """The daemon's part: store, fleet server and studies."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.fleet = FleetServer(
            store,
            on_trial_result=lambda session, outcome: self.service.trials.on_trial_result(session, outcome),
            on_session=lambda session: self.service.trials.on_session(session),
        )
        self.service = StudyService(store, self.fleet, SystemClock(), review_s=0.2, events_apart_s=0.02)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(await SqliteStore.open(tmp_path / "state"))
    await made.fleet.start([f"unix://{tmp_path}/fleet.sock"])
    await made.service.start()
    yield made
    await made.service.stop()
    await made.fleet.stop(grace_s=0.1)
    await made.store.close()


class Front:
    """The profiler with a Ray of its own, started again where Ray's node was too slow (see `start_cluster`)."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def keep_up(self) -> None:
        if self.process.poll() is not None:
            assert self._starts < 3 and "timed out" in self._log.read_text(), self._log.read_text()
            self._start()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self._log.read_text()


@pytest.fixture
def front(tmp_path: Path, tiny_model_dir: Path, texts_dir: Path) -> Iterator[Front]:
    command = [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(tiny_model_dir)]
    command += ["--texts", str(texts_dir), "--address", f"unix://{tmp_path}/fleet.sock", "--agent-id", "r"]
    command += ["--page-tokens", "16", "--frame-bytes", "32768"]
    command += ["--executor", "ray", "--ray-address", "local", "--trials-at-once", "2"]
    made = Front(command, tmp_path / "front.log")
    yield made
    made.stop()


@pytest.mark.slow
async def test_a_study_on_ray_survives_the_death_of_a_worker(house: House, front: Front) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(house.fleet.sessions()) < 2:
            front.keep_up()
            await asyncio.sleep(0.1)
    assert sorted(session.agent_id for session in house.fleet.sessions()) == ["r-0", "r-1"]
    study = await house.service.begin(
        {
            "plane": "sglang", "workload": "dialogue", "grid": "quick", "segments": 12, "lengths": [64, 500, 1000],
            "continuation_tokens": 32,
        }
    )  # fmt: skip
    killed = False
    async with asyncio.timeout(PATIENCE_S):
        async for state in house.service.events(study["id"]):
            if (
                not killed
                and state["trials_done"] >= 1
                and all(any(trial["agent"] == agent for trial in state["trials"]) for agent in ("r-0", "r-1"))
            ):
                killed = True
                os.kill(min(actor_processes(front.process.pid)), signal.SIGKILL)
            if state["state"] == "finished":
                break
    assert killed
    assert state["trials_by_state"] == {"measured": state["trials_total"]}
