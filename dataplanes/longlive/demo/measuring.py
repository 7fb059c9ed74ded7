"""The settings that the demo has to choose from, measured through a daemon by a profiling worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError
from controld.contract.space import StrategySpace
from dataplanes.longlive import settings
from dataplanes.longlive.demo.plan import DEPLOYMENT, PROFILING_POLICY
from dataplanes.longlive.profiler.identity import hardware_name, model_fingerprint
from dataplanes.longlive.profiler.trial import WORKLOAD
from dataplanes.longlive.reference.setting import FULL, SPACE
from dataplanes.sglang.demo.daemon import Daemon, DaemonError

SEGMENTS = 8
_WORKER_S = 60.0
_LOOK_S = 0.5


def demo_space() -> StrategySpace:
    """What the worker of the demo can measure: frames are decoded beside the next chunk, on one rank."""
    return SPACE.restrict({settings.VAE: ("async",), settings.RANKS: (1,)})


def usual_profiles(folder: Path, checkpoint: str) -> list[dict[str, Any]]:
    """Profiles of the quick grid, the full setting's first: those that are there from before, else measured now.

    Args:
        folder: where `profiles.json` is kept.
        checkpoint: of the engine.

    Raises:
        ControldError: the study came to nothing.
    """
    path = folder / "profiles.json"
    if path.exists():
        kept: list[dict[str, Any]] = json.loads(path.read_text())["profiles"]
        here = model_fingerprint(checkpoint), hardware_name()
        if kept and all((each["model_fingerprint"], each["hardware"]) == here for each in kept):
            return kept
    document = _measured(folder, checkpoint)
    profiles: list[dict[str, Any]] = document["profiles"]
    profiles.sort(key=lambda each: Configuration(each["configuration"]) != FULL)
    if not profiles or Configuration(profiles[0]["configuration"]) != FULL:
        raise ControldError("the full setting was not measured", code="demo.no_profiles", hint=f"see {folder}")
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return profiles


def _measured(folder: Path, checkpoint: str) -> dict[str, Any]:
    """The daemon's export."""
    # An earlier run's store would bring its studies and profiles of other weights along.
    shutil.rmtree(folder / "profiling", ignore_errors=True)
    with (
        Daemon(folder / "profiling", {"video.yaml": PROFILING_POLICY}) as daemon,
        _worker(folder, checkpoint, daemon) as worker,
    ):
        study = _begun(daemon, worker)
        print(f"measuring {study['trials_total']} settings, {SEGMENTS} held-out clips each", flush=True)
        told: set[str] = set()
        while study["state"] == "running":
            time.sleep(_LOOK_S)
            worker.require_alive()
            study = daemon.get(f"/v1/studies/{study['id']}")
            for trial in study["trials"]:
                if trial["state"] == "measured" and trial["id"] not in told:
                    told.add(trial["id"])
                    place = f"[{len(told)}/{study['trials_total']}]"
                    print(f"{place} {_words(trial['lossy'])}: loss {trial['loss']:+.4f}, {trial['seconds']:.0f} s")
        if study["state"] != "finished":
            raise ControldError(f"the study is {study['state']}", code="demo.no_profiles", hint=f"see {folder}")
        export: dict[str, Any] = daemon.get("/v1/candidates/export?kind=video")
        return export


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    log: Path

    def require_alive(self) -> None:
        """Raises: ControldError: it has ended; says with what words."""
        status = self.process.poll()
        if status is not None:
            said = self.log.read_text(errors="replace")[-2000:]
            raise ControldError(f"the profiling worker ended with {status}: {said}", code="demo.worker_ended")


@contextmanager
def _worker(folder: Path, checkpoint: str, daemon: Daemon) -> Iterator[_Worker]:
    space = folder / "space.json"
    space.write_text(demo_space().to_json())
    command = [
        *(sys.executable, "-m", "dataplanes.longlive.profiler", "--address", daemon.fleet_address),
        *("--deployment", DEPLOYMENT, "--checkpoint", checkpoint, "--space", str(space)),
    ]
    path = folder / "worker.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield _Worker(process, path)
    finally:
        process.terminate()
        process.wait()


def _begun(daemon: Daemon, worker: _Worker) -> dict[str, Any]:
    """The study, as soon as the worker is there."""
    body = {"plane": "longlive", "workload": WORKLOAD, "grid": "quick", "segments": SEGMENTS}
    deadline_s = time.monotonic() + _WORKER_S
    while True:
        try:
            study: dict[str, Any] = daemon.request("POST", "/v1/studies", body)
            return study
        except DaemonError as error:
            worker.require_alive()
            if "study.no_profiler" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(_LOOK_S)


def _words(lossy: dict[str, Any]) -> str:
    return f"{lossy['steps']} steps, KV {lossy['kv']}, window {lossy['window']}"
