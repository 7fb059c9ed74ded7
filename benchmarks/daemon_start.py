"""How soon the daemon is ready, and how much memory it takes: `python benchmarks/daemon_start.py [--runs N]`.

Ready means that `/readyz` answers 200: store open, policies in force, a first plan published, agents let in. Beside it
stands what no daemon in this language can beat: an interpreter that imports the same libraries and ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from dataplanes.sglang.demo.daemon import Daemon
from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import policy_text

LIBRARIES = "import grpc.aio, aiohttp.web, uvloop, pydantic, yaml, numpy, prometheus_client, google.protobuf"


def once() -> tuple[float, float]:
    """Seconds until ready, and resident megabytes then."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(Path(folder), {"policy.yaml": policy_text(DEMO, {})})
        began_s = time.perf_counter()
        daemon.start()
        ready_s = time.perf_counter() - began_s
        assert daemon.process is not None
        resident = psutil.Process(daemon.process.pid).memory_info().rss / 1e6
        daemon.stop()
    return ready_s, resident


def imports() -> float:
    """Seconds of an interpreter that only imports the daemon's libraries."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import gc; gc.disable(); {LIBRARIES}"], check=True)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="after one that fills the file cache (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/daemon_start.json"))
    arguments = parser.parse_args()
    once(), imports()
    ready, bound = [], []
    for _ in range(arguments.runs):
        ready.append(once())
        bound.append(imports())
    seconds = statistics.median(s for s, _ in ready)
    figures = {
        "ready_s": seconds,
        "imports_s": statistics.median(bound),
        "ready_over_imports": seconds / statistics.median(bound),
        "resident_mb": statistics.median(megabytes for _, megabytes in ready),
        "runs": arguments.runs,
        "python": platform.python_version(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1))
    print(
        f"ready after {figures['ready_s']:.2f} s (median of {arguments.runs}),"
        f" {figures['ready_over_imports']:.2f} times what importing its libraries takes;"
        f" {figures['resident_mb']:.0f} MB resident"
    )


if __name__ == "__main__":
    main()
