"""The checked-in protobuf code is what the schema gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("fleet_pb2.py", "fleet_pb2.pyi", "fleet_pb2_grpc.py")


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "generate_rpc.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, timeout=60)
    for name in GENERATED:
        fresh = (tmp_path / "controld/contract/rpc" / name).read_text()
        kept = (ROOT / "controld/contract/rpc" / name).read_text()
        if fresh != kept:
            pytest.fail(f"{name} is not what the schema gives: run `python scripts/generate_rpc.py`")
