"""The record of a transfer, its spans and its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm
from controld.contract.effect import Path, Verdict
from dataplanes.sglang.pd.requests import RequestBook, RequestFacts, transfer_id_of
from dataplanes.sglang.pd.transfer import Transfer, WireSpan, union_s

CODED = Configuration({"code": "zstd", "quantise": "none", "transform": "none"})


def transfer(arm: Arm) -> Transfer:
    return Transfer(
        transfer_id="t",
        room=1,
        session="h:1",
        service_class="chat",
        expected_bytes=100.0,
        arm=arm,
        table_version=3,
        explored=True,
        bandwidth_bytes_per_s=5.0,
        load=0.5,
    )


def test_overlapping_spans_count_once() -> None:
    spans = [WireSpan(0, 2, 1), WireSpan(1, 3, 1), WireSpan(1.5, 1.7, 1), WireSpan(5, 6, 1)]
    assert union_s(spans) == 4
    assert union_s([]) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_the_union_is_the_number_of_covered_instants(ends: list[tuple[int, int]]) -> None:
    spans = [WireSpan(min(pair), max(pair), 1) for pair in ends]
    covered = {second for span in spans for second in range(int(span.start_s), int(span.end_s))}
    assert union_s(spans) == len(covered)


@pytest.mark.parametrize(
    ("arm", "changes", "path", "verdict"),
    [
        (Arm(RAW), {}, Path.RAW, Verdict.UNVERIFIED),
        (Arm(CODED.config_id, CODED), {}, Path.CODED, Verdict.VERIFIED),
        (Arm(CODED.config_id, CODED), {"raw_reason": "no_staging_slots"}, Path.RAW_FALLBACK, Verdict.UNVERIFIED),
        (Arm(CODED.config_id, CODED), {"raw_reason": "nack:checksum", "nacked": True}, Path.RAW_FALLBACK, Verdict.NACK),
        (Arm(RAW), {"failed": True}, Path.FAILED, Verdict.ERROR),
    ],
)
def test_the_effect_says_how_the_bytes_went(arm: Arm, changes: dict[str, object], path: Path, verdict: Verdict) -> None:
    record = transfer(arm)
    for name, value in changes.items():
        setattr(record, name, value)
    record.begin_work(10.5, 10.0)
    record.end_work(12.5)
    effect = record.to_effect(finished_unix_s=99.0)
    assert (effect.path, effect.verdict) == (path, verdict)
    assert (effect.wait_s, effect.total_s, effect.explored, effect.load) == (0.5, 2.0, True, 0.5)


def test_waiting_for_its_turn_counts_and_waiting_for_the_model_does_not() -> None:
    record = transfer(Arm(RAW))
    record.begin_work(11.0, enqueued_s=10.0)  # one second in the queue
    record.end_work(12.0)
    record.begin_work(14.0, enqueued_s=10.0)  # a part of the same chunk: two seconds for another tenant's turn
    record.end_work(15.0)
    record.begin_work(20.5, enqueued_s=20.0)  # the next chunk of a chunked prefill came five seconds later
    record.end_work(21.0)
    effect = record.to_effect(finished_unix_s=99.0)
    assert (effect.wait_s, effect.total_s) == (3.5, 2.5)


def test_the_first_reason_stays() -> None:
    record = transfer(Arm(CODED.config_id, CODED))
    assert record.is_coded
    record.fall_back("first")
    record.fall_back("second")
    assert not record.is_coded
    assert record.raw_reason == "first"


@given(st.text(max_size=200), st.integers(-(2**63), 2**63 - 1))
def test_a_transfer_s_name_is_safe_in_a_url(request_id: str, room: int) -> None:
    facts = RequestFacts(request_id, None, None, 1)
    name = transfer_id_of(facts, room=room, receiver="10.0.0.1:1234")
    assert name.isascii()
    assert len(name) <= 80
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert name != transfer_id_of(facts, room=room, receiver="10.0.0.1:1235")


def test_the_book_forgets_and_stays_small() -> None:
    book = RequestBook()
    for room in range(25_000):
        book.note(room, RequestFacts(str(room), None, None, 1))
    assert book.find(0) is None
    assert book.find(24_999) == RequestFacts("24999", None, None, 1)
    book.forget(24_999)
    assert book.find(24_999) is None
