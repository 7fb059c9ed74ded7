"""The order in which a worker takes chunks from SGLang's own queue, and that none is ever lost."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from controld.contract.fair_queue import Tenancy
from dataplanes.sglang.pd.fair_order import FairOrder, OrderParts, Waiting, split_chunk

TENANCY = Tenancy({"acme": 3.0, "bell": 1.0}, {"chat": "acme", "batch": "bell"})


@dataclass(frozen=True)
class Chunk:
    room: int
    name: str
    raw_bytes: int = 1000


class Counts(Counter[str]):
    def count(self, name: str, n: int = 1) -> None:
        self[name] += n


class Worker:
    """What a transfer worker is to an order."""

    def __init__(self, queue: Any) -> None:
        self.tenancy = TENANCY
        self.taken: list[Any] = []
        self.counts = Counts()
        self.wire_bytes = 0
        self.describe: Callable[[Any], Waiting] = lambda chunk: Waiting(
            room=chunk.room, service_class=chunk.name, raw_bytes=chunk.raw_bytes
        )
        self.split: Callable[[Any], Sequence[Any]] = lambda chunk: (chunk,)
        self.order = FairOrder(
            queue,
            OrderParts(
                describe=lambda chunk: self.describe(chunk),
                split=lambda chunk: self.split(chunk),
                tenancy=lambda: self.tenancy,
                wire_bytes=lambda: self.wire_bytes,
                on_take=self.taken.append,
                counting=self.counts,
            ),
        )

    def take(self, number: int) -> list[Any]:
        return [self.order.get() for _ in range(number)]


@pytest.fixture(scope="module")
def fast_queue() -> type[Any]:
    """SGLang's `FastQueue`, cut out of its file: importing the package takes half a minute."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt/disaggregation/common/utils.py").read_text()
    start = source.index("class FastQueue:")
    module = ModuleType("fast_queue")
    body = source[start : source.index("\nclass ", start)]
    exec("import threading\nfrom collections import deque\n" + body, module.__dict__)
    found: type[Any] = module.FastQueue
    return found


@pytest.fixture
def queue(fast_queue: type[Any]) -> Any:
    return fast_queue()


@pytest.fixture
def worker(queue: Any) -> Worker:
    return Worker(queue)


def test_tenants_take_turns_by_weight(queue: Any, worker: Worker) -> None:
    for room in range(40):
        queue.put(Chunk(room, "batch"))
    for room in range(100, 140):
        queue.put(Chunk(room, "chat"))
    worker.wire_bytes = 1000
    assert Counter(chunk.name for chunk in worker.take(40)) == {"chat": 30, "batch": 10}
    assert worker.taken[:2] == [None, worker.taken[1]] and worker.taken.count(None) == 40
    assert not worker.counts


def test_without_weights_the_order_of_arrival_stays(queue: Any, worker: Worker) -> None:
    worker.tenancy = Tenancy({}, TENANCY.tenant_of_class)
    chunks = [Chunk(room, "batch" if room % 3 else "chat", room) for room in range(30)]
    for chunk in chunks:
        queue.put(chunk)
    assert worker.take(30) == chunks


def test_chunks_of_a_room_keep_their_order_even_where_its_class_changes(queue: Any, worker: Worker) -> None:
    first, second = Chunk(1, "batch", 9000), Chunk(1, "chat", 1)
    for chunk in (first, second, Chunk(2, "chat", 500)):
        queue.put(chunk)
    order = worker.take(3)
    assert order.index(first) < order.index(second)


def test_a_codec_that_helps_counts(queue: Any, worker: Worker) -> None:
    worker.tenancy = Tenancy({"acme": 1.0, "bell": 1.0}, TENANCY.tenant_of_class)
    for room in range(60):
        queue.put(Chunk(room, "batch"))
        queue.put(Chunk(1000 + room, "chat"))
    names = []
    for _ in range(60):
        names.append(worker.order.get().name)
        worker.wire_bytes = 250 if names[-1] == "chat" else 1000
    # Four coded transfers are on the wire what one raw one is.
    assert 3.5 <= names.count("chat") / names.count("batch") <= 4.5


def test_a_large_transfer_lets_others_through_between_its_parts(queue: Any, worker: Worker) -> None:
    def in_tens(chunk: Chunk) -> list[Chunk]:
        return [replace(chunk, raw_bytes=chunk.raw_bytes // 10)] * 10

    worker.split, worker.tenancy = in_tens, Tenancy({"acme": 1.0, "bell": 1.0}, TENANCY.tenant_of_class)
    for chunk in (Chunk(1, "batch", 100_000), Chunk(2, "batch", 100_000), Chunk(3, "chat", 20_000)):
        queue.put(chunk)
    rooms = []
    for _ in range(30):
        taken = worker.order.get()
        worker.wire_bytes = taken.raw_bytes
        rooms.append(taken.room)
    assert rooms.index(3) <= 1
    assert len(rooms) - rooms[::-1].index(3) < 14, "it is done before the first large one is"
    assert [room for room in rooms if room != 3] == [1] * 10 + [2] * 10
    # Nobody shares: nothing is cut.
    worker.tenancy = Tenancy()
    queue.put(Chunk(1, "batch", 100_000))
    assert worker.take(1) == [Chunk(1, "batch", 100_000)]


@dataclass(frozen=True)
class KvChunk:
    """The fields of SGLang's `TransferKVChunk` that are cut."""

    room: int
    prefill_kv_indices: Sequence[int]
    index_slice: slice
    is_last_chunk: bool
    prefill_aux_index: int | None
    state_indices: list[int] | None
    num_kv_tokens: int | None = None
    wait_event: object | None = None
    indices_event: object | None = None


def test_parts_of_a_chunk_are_chunks_and_together_the_whole() -> None:
    whole = KvChunk(7, list(range(50, 90)), slice(10, 50), True, 3, [1], num_kv_tokens=40 * 16 - 20)
    parts = split_chunk(whole, first_token=10 * 16, page_tokens=16, part_tokens=256)
    # Cut where the request's tokens are multiples of 256: pages 16, 32 and 48 of it.
    assert [part.index_slice for part in parts] == [slice(10, 16), slice(16, 32), slice(32, 48), slice(48, 50)]
    assert [page for part in parts for page in part.prefill_kv_indices] == list(whole.prefill_kv_indices)
    assert [part.num_kv_tokens for part in parts] == [96, 256, 256, 12]
    assert [part.is_last_chunk for part in parts] == [False, False, False, True]
    assert [part.prefill_aux_index for part in parts] == [None, None, None, 3]
    assert [part.state_indices for part in parts] == [None, None, None, [1]]


@pytest.mark.parametrize(
    "chunk",
    [
        KvChunk(7, list(range(16)), slice(0, 16), True, 3, None),
        KvChunk(7, [], slice(0, 0), True, 3, None),
        KvChunk(7, list(range(99)), slice(0, 99), True, 3, None, wait_event=object()),
        KvChunk(7, list(range(99)), slice(0, 99), False, None, None, indices_event=object()),
        KvChunk(7, list(range(99)), slice(0, 99), True, 3, None, num_kv_tokens=0),
    ],
)
def test_a_small_chunk_and_one_that_waits_for_the_model_stay_whole(chunk: KvChunk) -> None:
    assert list(split_chunk(chunk, first_token=0, page_tokens=16, part_tokens=256)) == [chunk]


def test_the_worker_ends_after_what_came_before(queue: Any, worker: Worker) -> None:
    chunks = {Chunk(1, "batch"), Chunk(2, "chat")}
    for item in (*chunks, None):
        queue.put(item)
    queue.put(Chunk(3, "chat"))
    assert set(worker.take(2)) == chunks
    assert worker.take(2) == [None, None]


def test_an_idle_worker_waits_for_the_next_chunk(queue: Any, worker: Worker) -> None:
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(worker.order.get()))
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive()
    worker.order.put(Chunk(1, "chat"))
    waiting.join(60.0)
    assert got == [Chunk(1, "chat")]


def test_whatever_fails_nothing_is_lost_and_the_oldest_goes_first(queue: Any, worker: Worker) -> None:
    described = worker.describe

    def fails_on_the_tenth(chunk: Any) -> Waiting:
        if chunk.room == 10:
            raise ValueError("no such room")
        return described(chunk)

    worker.describe = fails_on_the_tenth
    worker.wire_bytes = 1000
    chunks = [Chunk(room, "batch" if room < 15 else "chat") for room in range(30)]
    for chunk in chunks:
        queue.put(chunk)
    assert worker.take(30) == chunks
    assert worker.counts["pd.fair_order_given_up"] == 1
    # Nothing waits: from here on tenants share again.
    for chunk in chunks[12:]:
        queue.put(chunk)
    assert Counter(chunk.name for chunk in worker.take(8)) == {"chat": 6, "batch": 2}
    assert worker.counts["pd.fair_order_given_up"] == 1


def test_a_fair_queue_that_breaks_later_loses_nothing(
    queue: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [Chunk(room, "batch" if room % 2 else "chat") for room in range(10)]
    for chunk in chunks:
        queue.put(chunk)
    first = worker.take(3)
    monkeypatch.setattr("controld.contract.fair_queue.FairQueue.pop", lambda self: 1 / 0)
    rest = worker.take(7)
    assert rest == [chunk for chunk in chunks if chunk not in first]


def test_a_queue_of_another_make_is_taken_from_in_its_own_order(worker: Worker) -> None:
    import queue as standard

    plain: standard.Queue[Any] = standard.Queue()
    other = Worker(plain)
    chunks = [Chunk(room, "batch" if room < 15 else "chat") for room in range(30)]
    for chunk in chunks:
        plain.put(chunk)
    assert other.take(30) == chunks
    assert other.counts == {"pd.queue_opaque": 1}
