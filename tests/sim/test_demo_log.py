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
from controld.sim.demo_log import PAYLOAD_SHARE, codec_factors, compare, read_demo_log
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
    assert result["within_15_percent"] is result["within_15_percent_by_arm"] is True
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
    assert result["within_15_percent_by_arm"] is False
    assert result["phases"]["slow"]["coded"]["transfer"] == pytest.approx(1 / 3, abs=0.01)
    assert result["phases"]["slow"]["raw"]["ttft"] == pytest.approx(1.0, abs=0.01)


def test_how_much_slower_codecs_are_is_told_by_the_classes_that_are_named(profile: Build) -> None:
    # 20 ms and 10 ms where the profile says 1 ms + V / 600 MB/s and 1 ms + V / 800 MB/s: of 2 and of 8 MB.
    one = profile()
    log = read_demo_log(log_lines(one.arm_id), LINK)
    encode = [0.02 / (1e-3 + size / 600e6) for size in (2e6, 8e6)]
    decode = [0.01 / (1e-3 + size / 800e6) for size in (2e6, 8e6)]
    assert codec_factors(log, [one], ["coded"]) == (pytest.approx(sum(encode) / 2), pytest.approx(sum(decode) / 2))
    assert codec_factors(log, [one], ["raw"]) == (1.0, 1.0)
    assert codec_factors(log, [], ["coded"]) == (1.0, 1.0)


def test_prefill_is_the_raw_arm_s_of_the_phase_where_it_is_known_well(world_of: Build, arms: tuple[str, ...]) -> None:
    # Prefill takes longer in the second phase; raw served that length three times in each.
    lines = []
    for index, (phase, prefill_s) in enumerate((("fast", 1.0), ("slow", 3.0))):
        for turn in range(3):
            at = 10.0 + 10 * index + turn
            lines.append(line(at, phase, "raw", 100, 0.2, RAW, ttft_s=prefill_s + 0.2))
            lines.append(line(at + 0.5, phase, "coded", 100, 0.1, arms[0], ttft_s=prefill_s + 0.1))
    log = read_demo_log(lines, LINK)
    world = world_of(1e9)
    result = compare(log, simulate(world, log.arrivals(), AsLogged(arms[0]), in_flight=1))
    for phase, prefill_s in (("fast", 1.0), ("slow", 3.0)):
        transfer_s = 2e6 / 200e6 + 2e6 / 300e6
        predicted = (prefill_s + transfer_s) / (prefill_s + 0.1)
        assert result["phases"][phase]["coded"]["ttft"] == pytest.approx(predicted, abs=0.01)


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
