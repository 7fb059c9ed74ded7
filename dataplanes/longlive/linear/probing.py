"""Which back end carries which precision here: a self-test against the definition and a measurement beside bf16.

What a library says that it can do is not enough: kernels that are declared and not registered, a scale layout of
another architecture, and FP8 that is slower than bf16 on the very device that has it were all met in the field.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from controld.contract.errors import FieldError
from dataplanes.longlive import settings
from dataplanes.longlive.linear.backend import LinearBackend, Offer, Probe
from dataplanes.longlive.linear.emulated import EmulatedBackend, by_definition
from dataplanes.longlive.linear.four_over_six import FourOverSixBackend
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.longlive.linear.te import TransformerEngineBackend
from dataplanes.longlive.linear.torchao_fp8 import TorchaoFP8Backend

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """The layer that a measurement runs.

    Args:
        rows: tokens at a time.
        inputs: length of a row.
        outputs: of the layer.
        repeats: measurements, of which the fastest counts.
    """

    rows: int
    inputs: int
    outputs: int
    repeats: int = 5


SMALL = ProbeSize(rows=256, inputs=256, outputs=256)
"""A layer of the CPU reference engine's order."""
LONGLIVE = ProbeSize(rows=7040, inputs=3072, outputs=3072)
"""LongLive-2.0's attention projections, a chunk at a time."""

_SELF_TEST = ProbeSize(rows=50, inputs=256, outputs=128)
"""Rows that fill no tile."""
_PEAK = 2.96875
"""A bf16 number with large prime factors: scales of bf16 numbers are then no ties, which libraries resolve each in its
own way."""


def all_backends() -> tuple[LinearBackend, ...]:
    """One of each, those for speed first."""
    return TransformerEngineBackend(), FourOverSixBackend(), TorchaoFP8Backend(), EmulatedBackend()


@dataclass(frozen=True, slots=True)
class Offers:
    """What probing found.

    Args:
        probes: one for each back end and precision.
        backends: by name.
    """

    probes: tuple[Probe, ...]
    backends: Mapping[str, LinearBackend]

    def backend_for(self, precision: LinearPrecision) -> LinearBackend:
        """The fastest that is offered for speed, else one for memory.

        Raises:
            FieldError: none is offered; the hint has each one's reason.
        """
        known = [probe for probe in self.probes if probe.precision == precision]
        offered = [probe for probe in known if probe.offer is not Offer.NOTHING]
        if not offered:
            reasons = "; ".join(f"{probe.backend}: {probe.reason}" for probe in known)
            raise FieldError("precision", f"no back end offers {precision} here", hint=reasons)
        best = max(offered, key=lambda probe: (probe.offer is Offer.SPEED, probe.speed_ratio or 0.0))
        return self.backends[best.backend]

    @property
    def offered(self) -> dict[str, str]:
        """Names of back ends with "speed" or "memory": the `backends` of an engine's capabilities."""
        found: dict[str, str] = {}
        for probe in self.probes:
            if probe.offer is not Offer.NOTHING and found.get(probe.backend) != Offer.SPEED.value:
                found[probe.backend] = probe.offer.value
        return found

    @property
    def precisions(self) -> frozenset[LinearPrecision]:
        """What some back end offers."""
        return frozenset(probe.precision for probe in self.probes if probe.offer is not Offer.NOTHING)

    @property
    def left_out(self) -> dict[str, str]:
        """`weights=value` that no back end offers at any inputs, with the reasons."""
        offered = {precision.weights for precision in self.precisions} | {Precision.BF16}
        reasons: dict[str, dict[str, str]] = {}
        for probe in self.probes:
            if probe.precision.weights not in offered:
                name = f"{settings.WEIGHTS}={probe.precision.weights.value}"
                reasons.setdefault(name, {})[probe.backend] = probe.reason
        return {
            name: "; ".join(f"{backend}: {reason}" for backend, reason in by_backend.items())
            for name, by_backend in reasons.items()
        }


def probe_all(
    device: torch.device,
    *,
    backends: Sequence[LinearBackend] | None = None,
    precisions: Iterable[LinearPrecision] | None = None,
    size: ProbeSize | None = None,
) -> Offers:
    """Probe every back end at every precision that it may carry.

    Args:
        device: where layers will run.
        backends: None: all of them.
        precisions: None: all that a back end has.
        size: what is measured; None: LongLive's layer on CUDA, a small one elsewhere.
    """
    chosen = all_backends() if backends is None else tuple(backends)
    wanted = None if precisions is None else frozenset(precisions)
    probes = [
        probe(backend, precision, device, size=size)
        for backend in chosen
        for precision in sorted(backend.precisions if wanted is None else backend.precisions & wanted, key=str)
    ]
    return Offers(tuple(probes), {backend.name: backend for backend in chosen})


def probe(
    backend: LinearBackend,
    precision: LinearPrecision,
    device: torch.device,
    *,
    size: ProbeSize | None = None,
    clock: Callable[[], float] | None = None,
) -> Probe:
    """Self-test and measure; a back end that raises has failed, and the log has the whole error.

    Args:
        backend: which.
        precision: one of its own.
        device: where layers will run.
        size: what is measured; None: LongLive's layer on CUDA, a small one elsewhere.
        clock: in seconds; None: on a CPU the process's own time, which other work on the machine does not touch.
    """
    refusal = backend.refusal(precision, device)
    error = ratio = None
    if refusal is None:
        try:
            error = self_test_error(backend, precision, device)
            if error <= backend.error_bound:
                ratio = speed_ratio(backend, precision, device, size or _size_for(device), clock)
        except Exception as problem:  # noqa: BLE001 - foreign code at a process edge
            _LOG.warning("linear back end %s failed its probe at %s", backend.name, precision, exc_info=True)
            refusal = f"failed: {type(problem).__name__}: {problem}"
    offer, reason = judged(error, ratio, bound=backend.error_bound, is_emulated=backend.is_emulated)
    return Probe(
        backend=backend.name,
        precision=precision,
        passed=error is not None and error <= backend.error_bound,
        error=error,
        speed_ratio=ratio,
        offer=offer if refusal is None else Offer.NOTHING,
        is_emulated=backend.is_emulated,
        reason=reason if refusal is None else refusal,
    )


def judged(error: float | None, ratio: float | None, *, bound: float, is_emulated: bool) -> tuple[Offer, str]:
    """What for, and why."""
    if error is None or not error <= bound:
        return Offer.NOTHING, f"self-test: {error} off the result by definition, more than {bound}"
    if is_emulated:
        return Offer.MEMORY, "emulated"
    if ratio is None or not ratio > 1.0:
        return Offer.NOTHING, f"slower than bf16: {'unknown' if ratio is None else f'{ratio:.2f}'} of its speed"
    return Offer.SPEED, f"{ratio:.2f} of the speed of bf16"


def self_test_error(backend: LinearBackend, precision: LinearPrecision, device: torch.device) -> float:
    """Root mean square of the distance from the result by definition on a CPU, over that result's.

    Every row of the inputs has the same peak, so that one scale for all rows and one for each are the same.
    """
    x, weight, bias = _layer(_SELF_TEST, torch.device("cpu"))
    x = x.clamp(-_PEAK, _PEAK)
    x[:, 0] = _PEAK
    expected = by_definition(x, weight, bias, precision)
    quantised = backend.quantise_weight(weight.to(device), precision)
    result = backend.linear(x.to(device), quantised, bias.to(device)).cpu().double()
    return float((result - expected).norm() / expected.norm())


def speed_ratio(
    backend: LinearBackend,
    precision: LinearPrecision,
    device: torch.device,
    size: ProbeSize,
    clock: Callable[[], float] | None = None,
) -> float:
    """Seconds of bf16 over seconds of the back end: the fastest of each, measured in turns."""
    clock = clock or (time.process_time if device.type == "cpu" else time.perf_counter)
    x, weight, bias = _layer(size, device)
    quantised = backend.quantise_weight(weight, precision)
    runs: tuple[Callable[[], Tensor], ...] = (
        lambda: functional.linear(x, weight, bias),
        lambda: backend.linear(x, quantised, bias),
    )
    best = [float("inf")] * len(runs)
    # The first turn warms up and is measured like the others: only the fastest counts.
    for _ in range(size.repeats + 1):
        for index, run in enumerate(runs):
            _wait(device)
            start = clock()
            run()
            _wait(device)
            best[index] = min(best[index], clock() - start)
    return best[0] / best[1]


def _layer(size: ProbeSize, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((size.rows, size.inputs), (size.outputs, size.inputs), (size.outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return x, weight / size.inputs**0.5, bias


def _size_for(device: torch.device) -> ProbeSize:
    return LONGLIVE if device.type == "cuda" else SMALL


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
