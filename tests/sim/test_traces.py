"""Published traces are read as they are; what is none is refused with its line and field."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from controld.contract.errors import FieldError
from controld.sim.traces import TraceRequest, arrivals_of, read_trace

DATA = Path(os.environ.get("CONTROLD_TRACES", "data/traces"))

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48,0,10
2023-11-16 18:15:47.18,879,55
"""
MOONCAKE = [
    {"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
    {"timestamp": 3500.5, "input_length": 7322, "output_length": 0, "hash_ids": []},
]


def test_azure_in_the_order_of_time_from_zero_without_empty_prompts() -> None:
    requests = read_trace(AZURE.splitlines(keepends=True), "azure.csv")
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(374, 44), (879, 55), (396, 109)]
    assert [r.at_s for r in requests] == pytest.approx([0.0, 0.49941, 4.314579], abs=1e-5)


def test_mooncake_in_seconds() -> None:
    requests = read_trace([json.dumps(line) + "\n" for line in MOONCAKE], "m.jsonl")
    assert requests == [TraceRequest(0.0, 6758, 500), TraceRequest(3.0005, 7322, 0)]


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm() -> None:
    text = "\ufeff" + AZURE.replace("\n", "\r\n")
    assert read_trace(text.splitlines(keepends=True), "a.csv") == read_trace(AZURE.splitlines(), "a.csv")


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("", "f", "is empty"),
        ("a,b,c\n1,2,3\n", "f:1", "no known kind"),
        ("TIMESTAMP,ContextTokens\n", "f:1", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "f", "no request"),
        (AZURE + "2023-11-16 18:15:51,1\n", "f:6", "2 columns, not 3"),
        (AZURE + "yesterday,1,2\n", "f:6: TIMESTAMP", "no moment"),
        (AZURE + "2023-11-16 18:15:51.x,1,2\n", "f:6: TIMESTAMP", "no moment"),
        (AZURE + "2023-11-16 18:15:51,-1,2\n", "f:6: ContextTokens", "no number of tokens"),
        (AZURE + "2023-11-16 18:15:51,1,2.5\n", "f:6: GeneratedTokens", "no number of tokens"),
        (AZURE + "2023-11-16 18:15:46.²,1,2\n", "f:6: TIMESTAMP", "no moment"),
        (AZURE + "2023-11-16 18:15:46+05:00,1,2\n", "f:6: TIMESTAMP", "time zone"),
        (AZURE + f"2023-11-16 18:15:51,{'9' * 5000},2\n", "f:6: ContextTokens", "no number of tokens"),
        (AZURE + "2023-11-16 18:15:51,٣,2\n", "f:6: ContextTokens", "no number of tokens"),
        (AZURE + "x" * 140_000 + ",1,2\n", "f", "no CSV"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", "f:1", "ContextTokens twice"),
        ('{"timestamp": 1e308, "input_length": 2, "output_length": 3}\n', "f:1: timestamp", "not from 0"),
        (f'{{"timestamp": {"9" * 400}, "input_length": 2, "output_length": 3}}\n', "f:1: timestamp", "not from 0"),
        ('{"timestamp": 1, "timestamp": 2, "input_length": 2, "output_length": 3}\n', "f:1", "comes twice"),
        ('{"timestamp": 1\n', "f:1", "not JSON"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n[1]\n', "f:2", "not a JSON object"),
        ('{"timestamp": 1, "output_length": 3}\n', "f:1: input_length", "missing"),
        ('{"timestamp": "1", "input_length": 2, "output_length": 3}\n', "f:1: timestamp", "not a number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}\n', "f:1: input_length", "not a number"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}\n', "f:1: timestamp", "nan is not from 0"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 3}\n', "f:1: input_length", "no number of tokens"),
        ('{"timestamp": 1, "input_length": 2, "output_length": -3}\n', "f:1: output_length", "-3 is not from 0"),
    ],
)
def test_what_is_no_trace_is_refused_with_line_and_field(text: str, field: str, problem: str) -> None:
    with pytest.raises(FieldError, match=problem) as raised:
        read_trace(text.splitlines(keepends=True), "f")
    assert raised.value.field == field
    assert raised.value.code == "trace.malformed"


def test_requests_become_transfers() -> None:
    requests = [TraceRequest(float(index), 100 + index, 1) for index in range(400)]
    arrivals = arrivals_of(
        requests, bytes_per_token=1000, speed=4.0, mix={"chat": 3, "batch": 1}, tenants={"chat": "acme"}, peers=3
    )
    assert [a.at_s for a in arrivals[:3]] == [0.0, 0.25, 0.5]
    assert [a.raw_bytes for a in arrivals[:3]] == [100_000, 101_000, 102_000]
    assert [a.peer for a in arrivals[:4]] == [0, 1, 2, 0]
    chat = [a for a in arrivals if a.service_class == "chat"]
    assert 260 < len(chat) < 340
    assert {a.tenant for a in chat} == {"acme"}
    assert {a.tenant for a in arrivals if a.service_class == "batch"} == {"default"}
    assert arrivals_of(requests, bytes_per_token=1.0, seed=1) == arrivals_of(requests, bytes_per_token=1.0, seed=1)


@pytest.mark.parametrize("changes", [{"speed": 0.0}, {"bytes_per_token": -1.0}, {"peers": 0}, {"mix": {"a": -1.0}}])
def test_impossible_numbers_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FieldError):
        arrivals_of([TraceRequest(0.0, 1, 1)], **{"bytes_per_token": 1.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["azure_2023_conv.csv", "mooncake_conversation_4000.jsonl"])
def test_the_published_files_are_read_whole(name: str) -> None:
    file = DATA / name
    if not file.exists():
        pytest.skip("the published traces are not here (CONTROLD_TRACES)")
    lines = file.read_text().splitlines()
    requests = read_trace(lines, name)
    header = 1 if name.endswith(".csv") else 0
    assert len(requests) == len([line for line in lines if line]) - header
    assert requests[0].at_s == 0.0 and requests[-1].at_s > 600
