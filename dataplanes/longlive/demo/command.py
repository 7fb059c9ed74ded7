"""`controld demo-video`: a video engine under a changing load, steered by a real daemon, on this machine's CPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError

if TYPE_CHECKING:
    from dataplanes.longlive.demo.plan import DemoPlan

SUMMARY = "show a video engine under a changing load, steered between chunks (CPU reference engine, minutes)"
EXAMPLES = """\
Has a profiling worker measure twelve settings of the CPU reference engine (once; kept beside the results), starts a
daemon and an engine in a process of its own, and lets a second stream arrive and memory shrink and recover. Prints one
line a phase and writes a plot, a video file and why each setting was chosen. All times are this machine's CPU; no GPU
is modelled.

examples:
  controld demo-video                      some three minutes; results in build/demo-video
  controld demo-video --phase-seconds 40   longer phases, steadier figures
"""

_LOOKS = 5
_TRIES = 2
"""Runs, where the target of the first was taken while the machine was busy with something else."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", type=Path, default=Path("build/demo-video"), help="results (default: %(default)s)")
    parser.add_argument("--phase-seconds", type=float, default=20.0, help="of each phase (default: %(default)g)")
    parser.add_argument("--checkpoint", default="", help="trained, untrained or a folder (default: trained, if there)")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 where every phase held its targets, else 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        return _run(out, arguments.checkpoint or _usual_checkpoint(), arguments.phase_seconds)
    except ControldError as error:
        print(f"controld demo-video: {error}", file=sys.stderr)
        return 1


def _usual_checkpoint() -> str:
    from dataplanes.longlive.reference.weights import TRAINED

    if (TRAINED / "dit.safetensors").exists():
        return "trained"
    print("no trained weights: the engine shows noise, and quality figures mean nothing")
    return "untrained"


def _run(out: Path, checkpoint: str, phase_s: float) -> int:
    import torch

    from dataplanes.longlive.demo.measuring import usual_profiles
    from dataplanes.longlive.demo.report import outpaces

    torch.set_num_threads(1)
    profiles = usual_profiles(out, checkpoint)
    for _ in range(_TRIES):
        plan, fps_of_one = _perform(out, checkpoint, phase_s, profiles)
        rows = [json.loads(line) for line in (out / "chunks.jsonl").read_text().splitlines()]
        if not outpaces(plan, rows, fps_of_one):
            return _conclude(out)
        print(f"one stream made over twice {fps_of_one:.1f} FPS: the target was taken in a slow moment")
    _conclude(out)
    return 1


def _perform(out: Path, checkpoint: str, phase_s: float, profiles: list[dict[str, Any]]) -> tuple[DemoPlan, float]:
    """Take the target and play every phase; the plan, and the rate that its target is from."""
    from dataplanes.longlive.demo.plan import make_plan, policy_text
    from dataplanes.longlive.profiler.timing import time_setting
    from dataplanes.longlive.reference.engine import ReferenceEngine
    from dataplanes.longlive.reference.setting import FULL
    from dataplanes.sglang.demo.daemon import Daemon

    engine = ReferenceEngine()
    # The slowest of several looks: a target that was taken in a lucky moment is held in none.
    looks = [time_setting(engine, FULL, checkpoint).reports for _ in range(_LOOKS)]
    chunk_s = max(sum(report.total_s for report in look) / len(look) for look in looks)
    fps_of_one = engine.capabilities().frames_per_chunk / chunk_s
    address = f"unix://{(out / 'daemon' / 'fleet.sock').resolve()}"
    plan = make_plan(profiles, address=address, checkpoint=checkpoint, fps_of_one=fps_of_one, phase_s=phase_s)
    print(f"one stream alone makes {fps_of_one:.1f} FPS under the full setting; the target is {plan.target_fps:g} each")
    (out / "plan.json").write_text(plan.to_json())
    # What an earlier run learned of this machine's moods is no part of this one.
    shutil.rmtree(out / "daemon", ignore_errors=True)
    with Daemon(out / "daemon", {"video.yaml": policy_text(plan)}) as daemon:
        outcome = daemon.request("POST", "/v1/candidates/import", json.loads((out / "profiles.json").read_text()))
        print(f"{outcome['profiles']} profiles, {outcome['stored']} new to the daemon")
        _play(out, daemon)
    return plan, fps_of_one


def _play(out: Path, daemon: Any) -> None:
    """The engine's process from its begin to its end. Raises: ControldError: it failed."""
    from dataplanes.longlive.demo.plan import AGENT_ID

    command = [sys.executable, "-m", "dataplanes.longlive.demo.stage", str(out / "plan.json"), str(out)]
    (out / "video.mp4").unlink(missing_ok=True)
    with (out / "engine.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ending "):
                name = line.removeprefix("ending ").strip()
                answer = daemon.get(f"/v1/engines/{AGENT_ID}/explain")
                (out / f"why {name}.txt").write_text(answer["text"] + "\n")
                print(f"{name}: {answer['reason']}", flush=True)
            elif line.startswith("no video: "):
                print(line.strip(), flush=True)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status:
        tail = (out / "engine.log").read_text()[-2000:]
        raise ControldError(f"the engine's process ended with {status}: {tail}", code="demo.engine_ended")


def _conclude(out: Path) -> int:
    from dataplanes.longlive.demo.plan import DemoPlan
    from dataplanes.longlive.demo.report import phase_results, verdict_line, write_plot

    plan = DemoPlan.from_json((out / "plan.json").read_text())
    rows = [json.loads(line) for line in (out / "chunks.jsonl").read_text().splitlines()]
    labels = {
        Configuration(each["configuration"]).config_id: _label(each["configuration"])
        for each in json.loads((out / "profiles.json").read_text())["profiles"]
    }
    results = phase_results(plan, rows)
    lines = [verdict_line(result, labels) for result in results]
    print("\n".join(("", *lines)))
    (out / "verdicts.txt").write_text("\n".join(lines) + "\n")
    files = [file for file in (out / "video.mp4",) if file.exists()]
    try:
        write_plot(out / "timeline.svg", plan, rows, labels)
        files.append(out / "timeline.svg")
    except ImportError as error:
        print(f"no plot: {error}")
    print("\n" + "  ".join(str(file) for file in files))
    knobs_move = len({one for result in results for one in result.setting_ids}) > 1
    held = len(results) == len(plan.phases) and all(
        each.holds_fps and each.holds_memory and each.changes for each in results
    )
    return 0 if held and knobs_move else 1


def _label(values: dict[str, Any]) -> str:
    weights = f" weights {values['weights']}" if values["weights"] != "bf16" else ""
    return f"{values['steps']} steps, KV {values['kv']}, window {values['window']}{weights}"


def main() -> None:
    """Without the `controld` command around it: `python -m dataplanes.longlive.demo.command`."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    configure(parser)
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
