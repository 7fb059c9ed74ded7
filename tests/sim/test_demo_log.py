"""A demonstration's log is predicted by what the raw arm says of everything but the transfer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.deciders.base import Situation
from controld.sim.deciders.fixed import StaticArm
from controld.sim.demo_log import PAYLOAD_SHARE, compare, read_demo_log
from controld.sim.engine import simulate
from controld.sim.link import LinkTruth
from controld.sim.record import Arrival, Choice

Build = Callable[..., Any]

PREFILL_S = {100: 0.2, 400: 0.9}
LINK = [json.dumps({"second": 10.0, "rate_bits_per_s": 100_000_000, "phase": "fast"}),
        json.dumps({"second": 20.0, "rate_bits_per_s": 10_000_000, "phase": "slow"})]  # fmt: skip


class AsLogged(StaticArm):
    """Raw for the class raw, the given arm for every other one."""

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        return Choice(RAW) if arrival.service_class == "raw" else super().choose(arrival, situation)


def line(second: float, phase: str, arm: str, tokens: int, transfer_s: float, arm_id: str, **sample: Any) -> str:
    return json.dumps({
        "kind": "request",
        "second": second,
        "sample": {
            "phase": phase, "arm": arm, "prompt_tokens": tokens, "ttft_s": PREFILL_S[tokens] + transfer_s, **sample,
        },
        "effect": {
            "service_class": arm, "raw_bytes": tokens * 20_000, "wait_s": 0.0, "total_s": transfer_s,
            "encode_s": 0.02, "decode_s": 0.01, "arm_id": arm_id,
        },
    })  # fmt: skip


def log_lines(arm_id: str, factor: float = 1.0) -> list[str]:
    """Two phases, both arms, two lengths; transfers take `factor` of what they should."""
    lines = [json.dumps({"kind": "attached", "agents": ["p"]})]
    for index, (phase, rate) in enumerate((("fast", 12.5e6), ("slow", 1.25e6))):
        goodput = rate * PAYLOAD_SHARE
        for step, tokens in enumerate((100, 400)):
            raw_bytes = tokens * 20_000
            at = 10.0 + 10 * index + 2 * step
            raw_s = 1.5e-3 + raw_bytes / goodput
            coded_s = 2e-3 + raw_bytes / 200e6 + raw_bytes / 6 / goodput + 2e-3 + raw_bytes / 300e6 + 5e-4
            lines.append(line(at, phase, "raw", tokens, raw_s, RAW))
            lines.append(line(at + 1, phase, "coded", tokens, coded_s * factor, arm_id))
    return lines


def test_a_log_that_the_world_wrote_is_predicted(world_of: Build, arms: tuple[str, ...]) -> None:
    log = read_demo_log(log_lines(arms[0]), LINK)
    assert log.schedule().rate(0.0, 3) == pytest.approx(12.5e6 * PAYLOAD_SHARE)
    assert log.schedule().rate(0.0, 4) == pytest.approx(1.25e6 * PAYLOAD_SHARE)
    world = world_of(link=LinkTruth(schedule=log.schedule()), chunk_bytes=1e9)
    result = compare(log, simulate(world, log.arrivals(), AsLogged(arms[0]), in_flight=1))
    assert result["within_15_percent"] is True
    assert set(result["phases"]) == {"fast", "slow"}
    assert result["all"]["requests"] == 8
    for phase in result["phases"].values():
        assert phase["coded"]["ttft"] == pytest.approx(1.0, abs=0.01)
        assert phase["coded"]["transfer"] == pytest.approx(1.0, abs=0.01)
        assert phase["coded"]["same_arm"] == 1.0


def test_a_log_that_it_does_not_predict_is_said_so(world_of: Build, arms: tuple[str, ...]) -> None:
    log = read_demo_log(log_lines(arms[0], factor=3.0), LINK)
    world = world_of(link=LinkTruth(schedule=log.schedule()), chunk_bytes=1e9)
    result = compare(log, simulate(world, log.arrivals(), AsLogged(arms[0]), in_flight=1))
    assert result["within_15_percent"] is False
    assert result["phases"]["slow"]["coded"]["transfer"] == pytest.approx(1 / 3, abs=0.01)
    assert result["phases"]["slow"]["raw"]["ttft"] == pytest.approx(1.0, abs=0.01)


def test_codecs_slower_than_profiled_are_said_so(world_of: Build, arms: tuple[str, ...]) -> None:
    log = read_demo_log(log_lines(arms[0]), LINK)
    world = world_of(link=LinkTruth(schedule=log.schedule()), chunk_bytes=1e9)
    run = simulate(world, log.arrivals(), AsLogged(arms[0]), in_flight=1)
    mine = sorted(record.encode_s for record in run.records if record.arm_id != RAW)
    factor = compare(log, run)["codec_seconds_over_profile"]["encode"]
    assert 0.02 / mine[-1] < factor < 0.02 / mine[0]


def test_requests_begin_as_long_after_one_another_as_they_did(world_of: Build, arms: tuple[str, ...]) -> None:
    log = read_demo_log(log_lines(arms[0]), LINK)
    gaps = [arrival.at_s for arrival in log.arrivals()]
    requests = log.requests
    for index in range(1, len(requests)):
        before_ended = requests[index - 1].second + requests[index - 1].ttft_s
        handed_over = requests[index].second + PREFILL_S[requests[index].prompt_tokens]
        assert gaps[index] == pytest.approx(max(0.0, handed_over - before_ended))


@pytest.mark.parametrize(
    ("client", "link", "field", "problem"),
    [
        (["{"], LINK, "client.jsonl:1", "not JSON"),
        (["[]"], LINK, "client.jsonl:1", "not a JSON object"),
        (['{"kind": "request"}'], LINK, "client.jsonl:1: sample", "missing"),
        ([line(1.0, "fast", "raw", 100, 1.0, RAW, ttft_s=-1.0)], LINK, "client.jsonl:1: sample: ttft_s", "negative"),
        ([line(1.0, "", "raw", 100, 1.0, RAW)], LINK, "client.jsonl:1: sample: phase", "not a text"),
        ([line(1.0, "fast", "coded", 100, 1.0, "a")], LINK, "client.jsonl", "no request of the raw arm"),
        ([line(1.0, "fast", "raw", 100, 1.0, RAW)], [], "link.jsonl", "nothing"),
        ([line(1.0, "fast", "raw", 100, 1.0, RAW)], ['{"second": 0, "rate_bits_per_s": 0}'],
         "link.jsonl:1: rate_bits_per_s", "not above 0"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused(client: list[str], link: list[str], field: str, problem: str) -> None:
    with pytest.raises(FieldError, match=problem) as raised:
        read_demo_log(client, link)
    assert raised.value.field == field
