"""What happens when SGLang has moved on, and what the plugin does without a daemon's address."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from dataplanes.sglang.pd.engine import MAX_DESCRIPTORS, BoundedEngine
from dataplanes.sglang.pd.faults import FAULT_VARIABLE, Faults
from dataplanes.sglang.pd.manager import build_unhooked_class
from dataplanes.sglang.pd.signature import describe, manager_drift, surroundings_drift


class Moved:
    """A manager that has one of the methods, changed."""

    def send_kvcache(self, mooncake_session_id: str, pages: Any) -> int:
        return 0


def test_a_changed_or_missing_method_is_named() -> None:
    problems = manager_drift(Moved)
    assert any(problem.startswith("Moved.send_kvcache(self, mooncake_session_id, pages)") for problem in problems)
    assert any("Moved.transfer_worker(missing)" in problem for problem in problems)


def test_missing_fields_are_named() -> None:
    @dataclasses.dataclass
    class Chunk:
        room: int

    class Queue:
        def create_sender(self, req: Any) -> bool:
            return True

    problems = surroundings_drift(chunk=Chunk, transfer_info=Chunk, bootstrap_queue=Queue)
    assert len(problems) == 3
    assert "num_kv_tokens" in problems[0]
    assert "create_sender(self, req)" in problems[2]


def test_parameters_are_described_by_name_kind_and_default() -> None:
    def function(first: int, second: int = 2, *rest: int, third: int, fourth: int = 4, **more: int) -> None: ...

    assert describe(function) == "first, second=, *rest, *, third, fourth=, **more"


def test_an_unhooked_manager_is_sglang_s_own_and_tells_why() -> None:
    told: list[str] = []

    class Plane:
        refusal = ""

        def start(self) -> None:
            told.append(self.refusal)

    class Stock:
        def __init__(self, args: Any, mode: Any, server_args: Any, is_mla: bool = False) -> None:
            self.args = args

        def send_kvcache(self) -> str:
            return "stock"

    unhooked = build_unhooked_class(Stock, lambda *_: Plane(), "SGLang moved on")  # type: ignore[arg-type,return-value]
    manager = unhooked(1, 2, 3)
    assert manager.send_kvcache() == "stock"
    assert told == ["SGLang moved on"]


def test_an_unhooked_manager_serves_even_if_nobody_can_be_told() -> None:
    class Stock:
        def __init__(self, *args: Any) -> None: ...

    def broken(*_: Any) -> Any:
        raise OSError("no daemon, no threads")

    build_unhooked_class(Stock, broken, "reason")(1, 2, 3)


class CountingEngine:
    def __init__(self, fail_batch: int = -1) -> None:
        self.sizes: list[int] = []
        self._fail_batch = fail_batch

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], sizes: list[int]) -> int:
        self.sizes.append(len(sizes))
        return -1 if len(self.sizes) - 1 == self._fail_batch else 0

    def get_session_id(self) -> str:
        return "h:1"


def test_large_batches_are_written_in_parts_and_timed() -> None:
    inner, spans = CountingEngine(), []
    engine = BoundedEngine(inner, lambda start_s, end_s, size: spans.append((end_s >= start_s, size)))
    assert engine.batch_transfer_sync("h:2", [0] * 2280, [0] * 2280, [3] * 2280) == 0
    assert inner.sizes == [MAX_DESCRIPTORS, MAX_DESCRIPTORS, 280]
    assert spans == [(True, 3000), (True, 3000), (True, 840)]
    assert engine.get_session_id() == "h:1"


def test_a_failing_part_ends_the_batch() -> None:
    inner, spans = CountingEngine(fail_batch=1), []
    engine = BoundedEngine(inner, lambda *span: spans.append(span))
    assert engine.batch_transfer_sync("h:2", [0] * 2280, [0] * 2280, [3] * 2280) == -1
    assert len(inner.sizes) == 2
    assert len(spans) == 1


@pytest.mark.parametrize("text", ["flip_byte", "flip_byte:x", "zero:1", "flip_byte:1,zero_decode"])
def test_an_unknown_fault_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="is no fault"):
        Faults.from_environment({FAULT_VARIABLE: text})


def test_the_plugin_is_inert_without_an_address() -> None:
    """It must not even import SGLang's registry, torch or gRPC's stubs for a server that nobody steers."""
    code = (
        "import os, sys; os.environ.pop('CONTROLD_ADDRESS', None)\n"
        "from dataplanes.sglang.plugin import register\n"
        "register()\n"
        "assert not {'torch', 'sglang', 'grpc'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
