"""A real demonstration's log run again: does the simulator predict the times to first token that were measured?

The client's log holds every request with its phase, arm and TTFT, and the effect of its transfer; the link's log holds
the nominal rates. Each request is simulated on the arm's class of the demonstration's own policy, one at a time. What
the transfer does not explain (prefill above all) is taken from the raw arm: the median, by phase and prompt length, of
TTFT less wait and transfer. So raw is right on average by construction; the other arms are predictions. Codecs share
their machine with the model, so their times are the profiles' times a factor for encoding and one for decoding, which
the pinned arms tell (`codec_factors`); that of controld's own transfers stays a prediction.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.record import Arrival, Run
from controld.sim.schedule import RatePoint, RateSchedule

PAYLOAD_SHARE = 1448 / 1514
"""Of a shaped link's bytes: full TCP segments with timestamps in Ethernet frames."""

WITHIN = 0.15
"""How near a prediction must be to count as right."""

_CODE = "demo_log.malformed"
_LARGEST = 1e15
"""Of any number in a log; above it is no second and no byte that anybody measured."""
_ENOUGH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One request as it was measured. Seconds; bytes."""

    second: float
    phase: str
    arm: str
    service_class: str
    prompt_tokens: int
    raw_bytes: int
    ttft_s: float
    transfer_s: float
    encode_s: float
    decode_s: float
    arm_id: str

    @property
    def outside_s(self) -> float:
        """What of the TTFT the transfer does not explain."""
        return self.ttft_s - self.transfer_s


@dataclass(frozen=True, slots=True)
class DemoLog:
    """The requests in their order, and the link's nominal rates as (second, bytes per second)."""

    requests: tuple[LoggedRequest, ...]
    rates: tuple[tuple[float, float], ...]

    def arrivals(self) -> list[Arrival]:
        """For `simulate(..., in_flight=1)`: the next request comes when the one before is done, and so are the rest."""
        ends = [request.second + request.ttft_s for request in self.requests]
        begins = [self.requests[0].second, *ends[:-1]]
        return [
            Arrival(
                at_s=max(0.0, request.second + request.outside_s - before),
                raw_bytes=request.raw_bytes,
                service_class=request.service_class,
            )
            for request, before in zip(self.requests, begins, strict=True)
        ]

    def schedule(self) -> RateSchedule:
        """The link's goodput by the number of requests begun."""
        points: list[RatePoint] = []
        for index, request in enumerate(self.requests):
            before = [rate for second, rate in self.rates if second <= request.second]
            rate = (before[-1] if before else self.rates[0][1]) * PAYLOAD_SHARE
            if not points or points[-1].bytes_per_s != rate:
                points.append(RatePoint(float(index), rate))
        return RateSchedule(tuple(points), by_transfers=True)


def read_demo_log(client_lines: Iterable[str], link_lines: Iterable[str]) -> DemoLog:
    """The two logs of a demonstration.

    Raises:
        FieldError: a line or field is not what it should be, named by file, line and field; or nothing to compare.
    """
    requests = []
    for at, record in _objects(client_lines, "client.jsonl"):
        if record.get("kind") == "request":
            requests.append(_request(record, at))
    rates = [
        (_number(record, "second", at), _number(record, "rate_bits_per_s", at, above=0.0) / 8)
        for at, record in _objects(link_lines, "link.jsonl")
    ]
    if not requests or not rates:
        raise FieldError("client.jsonl" if rates else "link.jsonl", "holds nothing to compare with", code=_CODE)
    if not any(request.arm == RAW for request in requests):
        raise FieldError("client.jsonl", "has no request of the raw arm, which tells what prefill takes", code=_CODE)
    requests.sort(key=lambda request: request.second)
    return DemoLog(tuple(requests), tuple(sorted(rates)))


def codec_factors(log: DemoLog, profiles: Iterable[Profile], classes: Collection[str]) -> tuple[float, float]:
    """How many times their profiles' seconds encoding and decoding took: medians over the transfers of some classes.

    1 where these classes coded nothing.
    """
    known = {profile.arm_id: profile for profile in profiles}
    encode, decode = [], []
    for request in log.requests:
        profile = known.get(request.arm_id)
        if profile is not None and request.service_class in classes:
            encode.append(request.encode_s / profile.encode.seconds(request.raw_bytes))
            decode.append(request.decode_s / profile.decode.seconds(request.raw_bytes))
    return (median(encode), median(decode)) if encode else (1.0, 1.0)


def compare(log: DemoLog, run: Run) -> dict[str, Any]:
    """Predicted over observed, by phase and arm, JSON-ready.

    `ttft` and `transfer` are medians of the ratio; `ttft_sum` is the ratio of the sums, in which noise of single
    requests cancels; `within` is the share of requests whose predicted TTFT is within 15 %; `same_arm` that of
    requests for which the simulated controller chose the arm that the real one did. `within_15_percent` says whether
    the median TTFT of every phase is, `within_15_percent_by_arm` whether that of every arm in every phase is.
    """
    outside = _Outside(log.requests)
    rows: dict[tuple[str, str], list[tuple[float, float, float, float, bool]]] = defaultdict(list)
    for request, record in zip(log.requests, run.records, strict=True):
        predicted_s = outside.seconds(request) + record.total_s
        rows[request.phase, request.arm].append(
            (predicted_s, request.ttft_s, record.total_s, request.transfer_s, record.arm_id == request.arm_id)
        )
    phases = list(dict.fromkeys(request.phase for request in log.requests))
    arms = list(dict.fromkeys(request.arm for request in sorted(log.requests, key=lambda one: one.arm)))
    by_phase = {
        phase: {
            "all": _ratios([row for arm in arms for row in rows[phase, arm]]),
            **{arm: _ratios(rows[phase, arm]) for arm in arms if rows[phase, arm]},
        }
        for phase in phases
    }
    return {
        "phases": by_phase,
        "all": _ratios([row for group in rows.values() for row in group]),
        "within_15_percent": all(_is_near(phase["all"]) for phase in by_phase.values()),
        "within_15_percent_by_arm": all(_is_near(one) for phase in by_phase.values() for one in phase.values()),
    }


def _is_near(ratios: dict[str, Any]) -> bool:
    return bool(abs(ratios["ttft"] - 1) <= WITHIN)


def _ratios(rows: Sequence[tuple[float, float, float, float, bool]]) -> dict[str, Any]:
    ratios = [predicted / observed for predicted, observed, _, _, _ in rows]
    return {
        "requests": len(rows),
        "ttft": median(ratios),
        "ttft_sum": sum(row[0] for row in rows) / sum(row[1] for row in rows),
        "within": sum(abs(ratio - 1) <= WITHIN for ratio in ratios) / len(ratios),
        "transfer": median(row[2] / row[3] for row in rows),
        "same_arm": sum(row[4] for row in rows) / len(rows),
    }


class _Outside:
    """Seconds beside the transfer, as the raw arm has them.

    By phase and prompt length where raw served that length three times in the phase; else by length; and for lengths
    that raw never served, in proportion to the nearest.
    """

    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        seen: dict[tuple[str, int], list[float]] = defaultdict(list)
        for request in requests:
            if request.arm == RAW:
                for phase in (request.phase, ""):
                    seen[phase, request.prompt_tokens].append(request.outside_s)
        self._known = {key: median(values) for key, values in seen.items() if key[0] == "" or len(values) >= _ENOUGH}

    def seconds(self, request: LoggedRequest) -> float:
        """Of a request like this one."""
        tokens = request.prompt_tokens
        found = self._known.get((request.phase, tokens), self._known.get(("", tokens)))
        if found is None:
            nearest = min((key[1] for key in self._known), key=lambda other: abs(math.log(other / tokens)))
            found = self._known["", nearest] * tokens / nearest
        return found


def _request(record: dict[str, Any], at: str) -> LoggedRequest:
    sample, effect = (_object(record, name, at) for name in ("sample", "effect"))
    return LoggedRequest(
        second=_number(record, "second", at),
        phase=_text(sample, "phase", f"{at}: sample"),
        arm=_text(sample, "arm", f"{at}: sample"),
        service_class=_text(effect, "service_class", f"{at}: effect"),
        prompt_tokens=int(_number(sample, "prompt_tokens", f"{at}: sample", above=0.0)),
        raw_bytes=int(_number(effect, "raw_bytes", f"{at}: effect", above=0.0)),
        ttft_s=_number(sample, "ttft_s", f"{at}: sample", above=0.0),
        transfer_s=_number(effect, "wait_s", f"{at}: effect") + _number(effect, "total_s", f"{at}: effect", above=0.0),
        encode_s=_number(effect, "encode_s", f"{at}: effect"),
        decode_s=_number(effect, "decode_s", f"{at}: effect"),
        arm_id=_text(effect, "arm_id", f"{at}: effect"),
    )


def _objects(lines: Iterable[str], file: str) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FieldError(f"{file}:{number}", f"not JSON: {error}", code=_CODE) from error
        if not isinstance(record, dict):
            raise FieldError(f"{file}:{number}", "not a JSON object", code=_CODE)
        yield f"{file}:{number}", record


def _object(record: dict[str, Any], name: str, at: str) -> dict[str, Any]:
    value = record.get(name)
    if not isinstance(value, dict):
        raise FieldError(f"{at}: {name}", "is missing or not an object", code=_CODE)
    return value


def _number(record: dict[str, Any], name: str, at: str, *, above: float | None = None) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise FieldError(f"{at}: {name}", f"{str(value)[:40]} is not a finite non-negative number", code=_CODE)
    if above is not None and value <= above:
        raise FieldError(f"{at}: {name}", f"{value!r} is not above {above:g}", code=_CODE)
    return float(value)


def _text(record: dict[str, Any], name: str, at: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise FieldError(f"{at}: {name}", f"{value!r} is not a text", code=_CODE)
    return value
