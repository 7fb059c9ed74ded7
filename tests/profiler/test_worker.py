"""Real workers in processes of their own, the real fleet server, a real store, and kill -9 on either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.profile import Profile
from controld.contract.clock import SystemClock
from controld.fleet import FleetServer
from controld.profiling.service import StudyService
from controld.store.sqlite import SqliteStore

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "dialogue",
    "grid": "quick",
    "segments": 3,
    "lengths": [64, 200],
    "continuation_tokens": 32,
}

# Trials long enough to be caught in the middle of, on a fast machine too.
LONG_REQUEST: dict[str, Any] = {**REQUEST, "segments": 12, "lengths": [64, 200, 1000]}

StartWorker = Callable[[], "subprocess.Popen[bytes]"]


class House:
    """The daemon's part in this story: store, fleet server and studies."""

    def __init__(self, state_dir: Path, address: str) -> None:
        self._state_dir = state_dir
        self._address = address
        self.service: StudyService

    async def open(self) -> None:
        self.store = await SqliteStore.open(self._state_dir)
        self.fleet = FleetServer(
            self.store,
            on_trial_result=lambda session, outcome: self.service.trials.on_trial_result(session, outcome),
            on_session=lambda session: self.service.trials.on_session(session),
        )
        self.service = StudyService(self.store, self.fleet, SystemClock(), review_s=0.2, events_apart_s=0.02)
        await self.fleet.start([self._address])
        await self.service.start()

    async def close(self) -> None:
        await self.service.stop()
        await self.fleet.stop(grace_s=0.1)
        await self.store.close()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.02)

    async def study_until(self, study_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            async for state in self.service.events(study_id):
                if condition(state):
                    return state
        raise AssertionError(f"the study ended first: {await self.service.get(study_id)}")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path / "state", f"unix://{tmp_path}/fleet.sock")
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def start_worker(tmp_path: Path, tiny_model_dir: Path, texts_dir: Path) -> Iterator[StartWorker]:
    workers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(tiny_model_dir)]
        command += ["--texts", str(texts_dir), "--address", f"unix://{tmp_path}/fleet.sock", "--agent-id", "w0"]
        command += ["--evaluation-threads", "1", "--page-tokens", "16", "--frame-bytes", "32768"]
        with (tmp_path / f"worker{len(workers)}.log").open("wb") as log:
            workers.append(
                subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
        return workers[-1]

    yield start
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


async def test_a_study_by_a_real_worker_gives_profiles(house: House, start_worker: StartWorker) -> None:
    worker = start_worker()
    await house.until(lambda: house.fleet.sessions())
    (session,) = house.fleet.sessions()
    assert (session.identity.kind, session.identity.role) == ("sglang", "profiler")
    study = await house.service.begin(REQUEST)
    study = await house.study_until(study["id"], lambda state: state["state"] == "finished")
    assert study["trials_by_state"] == {"measured": study["trials_total"]}
    profiles = [Profile.from_json(record.document) for record in await house.store.profiles.list(workload="dialogue")]
    assert len(profiles) == sum(len(trial["coders"]) for trial in study["trials"])
    by_lossy = {profile.configuration.lossy_id: profile for profile in profiles}
    (lossless,) = (p for p in by_lossy.values() if p.configuration["quantise"] == "none")
    assert (lossless.loss_mean_nats, lossless.loss_upper_nats) == (0.0, 0.0)
    assert all(profile.model_fingerprint == session.identity.model_fingerprint for profile in profiles)
    assert {profile.sender_hardware for profile in profiles} == {session.identity.hardware}
    worker.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait, 60) == 0


async def test_a_worker_killed_in_a_trial_costs_nothing_but_time(house: House, start_worker: StartWorker) -> None:
    worker = start_worker()
    await house.until(lambda: house.fleet.sessions())
    study = await house.service.begin(LONG_REQUEST)
    await house.study_until(
        study["id"],
        lambda state: state["trials_done"] >= 1 and any(t["segments_done"] for t in state["trials"] if t["agent"]),
    )
    worker.kill()
    await asyncio.to_thread(worker.wait)
    assert (await house.service.get(study["id"]))["state"] == "running"
    start_worker()
    end = await house.study_until(study["id"], lambda state: state["state"] == "finished")
    assert end["trials_by_state"] == {"measured": end["trials_total"]}


async def test_a_restarted_daemon_takes_what_the_worker_measured_meanwhile(
    house: House, start_worker: StartWorker
) -> None:
    start_worker()
    await house.until(lambda: house.fleet.sessions())
    study = await house.service.begin(LONG_REQUEST)
    await house.study_until(study["id"], lambda state: state["trials_done"] >= 1)
    assert (await house.service.get(study["id"]))["state"] == "running"
    await house.close()
    await asyncio.sleep(0.5)
    await house.open()
    end = await house.study_until(study["id"], lambda state: state["state"] == "finished")
    assert end["trials_by_state"] == {"measured": end["trials_total"]}
    assert end["trials_total"] == study["trials_total"]


async def test_cancelling_a_study_stops_the_worker_in_its_trial(house: House, start_worker: StartWorker) -> None:
    start_worker()
    await house.until(lambda: house.fleet.sessions())
    study = await house.service.begin({**LONG_REQUEST, "grid": "full"})
    await house.study_until(study["id"], lambda state: any(t["segments_done"] for t in state["trials"]))
    cancelled = await house.service.cancel(study["id"])
    assert cancelled["state"] == "cancelled"
    await house.until(lambda: not house.service.trials._assignments)
    after = await house.service.begin({**REQUEST, "segments": 2, "lengths": [64]})
    end = await house.study_until(after["id"], lambda state: state["state"] == "finished")
    assert end["trials_by_state"] == {"measured": end["trials_total"]}


def test_a_wrong_model_folder_is_said_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(tmp_path), "--address", "unix:///x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "config.json" in done.stderr
