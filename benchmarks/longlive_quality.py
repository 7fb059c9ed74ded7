"""What precision and fewer steps cost in quality on held-out prompts, and what the history weighs.

Losses and motion are `QualityMeter`'s, against the toy world's truth. Settings are compared session by session: the
mean and the standard error of the difference to the setting that differs in the one thing that is asked about. Losses
of windows are not compared: a session is too short to tell those of 9 and 15 latent frames apart. Their bytes and times
are, in `longlive_windows`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controld.contract.configuration import Configuration, Value
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.quality import Quality, QualityMeter, standard_error
from dataplanes.longlive.reference.setting import CHUNK_LATENTS, FULL

PROMPT = "a yellow cross moves around"
SIGNIFICANT = 3.0
"""Standard errors from which on a difference is said to be one."""

BF16 = "bf16"
VAE_ALONE = "VAE alone"
W4A4: Mapping[str, Value] = {"weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain"}
W4A16: Mapping[str, Value] = {**W4A4, "activations": "bf16"}
W4A4_4OVER6: Mapping[str, Value] = {**W4A4, "block_rule": "4over6"}
FP8: Mapping[str, Value] = {"weights": "fp8", "activations": "fp8"}
LINEAR: Mapping[str, Mapping[str, Value]] = {
    BF16: {}, "fp8": FP8, "W4A16": W4A16, "W4A4": W4A4, "W4A4 4over6": W4A4_4OVER6,
}  # fmt: skip
HISTORIES: Mapping[str, Mapping[str, Value]] = {
    "KV fp8": {"kv": "fp8", "kv_smooth": "none"},
    "KV fp8 smooth": {"kv": "fp8", "kv_smooth": "token_mean"},
    "KV nvfp4": {"kv": "nvfp4", "kv_smooth": "none"},
    "KV nvfp4 smooth": {"kv": "nvfp4", "kv_smooth": "token_mean"},
}
STEPS = (1, 2, 4)
USUAL_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A setting to be measured.

    Args:
        name: unique.
        configuration: of the engine's space.
    """

    name: str
    configuration: Configuration

    @property
    def is_emulated(self) -> bool:
        """Whether a format below bf16 is in it: on a CPU that takes time and saves none."""
        return any(self.configuration[name] != BF16 for name in ("weights", "activations", "kv"))


def settings(*, quick: bool) -> list[Asked]:
    """All settings."""
    linear = (BF16, "W4A4") if quick else tuple(LINEAR)
    histories = tuple(name for name in HISTORIES if not quick or name != "KV fp8 smooth")
    found = [
        Asked(name=linear_name(name, steps), configuration=_changed({**LINEAR[name], "steps": steps}))
        for steps in (STEPS[1:] if quick else STEPS)
        for name in linear
    ]
    found += [Asked(name=name, configuration=_changed(HISTORIES[name])) for name in histories]
    if not quick:
        small = {**W4A4, **HISTORIES["KV nvfp4 smooth"]}
        fewer: dict[str, Value] = {**small, "steps": 2}
        found += [
            Asked(name="W4A4, KV nvfp4 smooth", configuration=_changed(small)),
            Asked(name="W4A4, KV nvfp4 smooth, 2 steps", configuration=_changed(fewer)),
        ]
    return found


def comparisons(names: Container[str]) -> list[tuple[str, str]]:
    """Pairs (setting, what it is compared with) that differ in one thing, of those that were measured."""
    usual = linear_name(BF16, USUAL_STEPS)
    fewer = [(linear_name(name, steps), linear_name(name, USUAL_STEPS)) for name in LINEAR for steps in STEPS[:-1]]
    lower = [(linear_name(name, steps), linear_name(BF16, steps)) for steps in STEPS for name in LINEAR if name != BF16]
    histories = [(name, usual) for name in HISTORIES]
    smoothing = [(name, name.removesuffix(" smooth")) for name in HISTORIES if name.endswith(" smooth")]
    found = [*fewer, *lower, *histories, *smoothing]
    return [pair for pair in found if all(name in names for name in pair)]


def linear_name(linear: str, steps: int) -> str:
    """As `W4A4, 2 steps`."""
    return f"{linear}, {steps} step{'s' if steps > 1 else ''}"


def _changed(change: Mapping[str, Value]) -> Configuration:
    return Configuration({**FULL, **change})


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A paired difference of two settings on the same prompts, the first minus the second.

    Args:
        mean: over sessions.
        error: standard error of the mean; infinite for one session.
    """

    mean: float
    error: float

    @property
    def sigmas(self) -> float:
        """The mean in standard errors; 0 where both are 0, for the two are the same then."""
        if self.error == 0:
            return 0.0 if self.mean == 0 else math.copysign(math.inf, self.mean)
        return self.mean / self.error

    @property
    def is_significant(self) -> bool:
        """Whether chance is out of the question."""
        return abs(self.sigmas) > SIGNIFICANT


def loss_difference(one: Quality, other: Quality) -> Difference:
    """Of the losses. Raises: ValueError: over different prompts."""
    mean, error = one.excess(other)
    return Difference(mean=mean, error=error)


def motion_difference(one: Quality, other: Quality) -> Difference:
    """Of the motion. Raises: ValueError: over different prompts."""
    pairs = list(zip(one.segments, other.segments, strict=True))
    if any(mine.segment != theirs.segment for mine, theirs in pairs):
        raise ValueError("other: has other segments")
    found = [mine.motion - theirs.motion for mine, theirs in pairs]
    return Difference(mean=math.fsum(found) / len(found), error=standard_error(found))


def measure(asked: Sequence[Asked], sessions: int, checkpoint: str) -> Iterator[tuple[str, Quality]]:
    """Names and qualities in order, after those of the VAE alone, below which no setting gets."""
    meter = QualityMeter(checkpoint)
    yield VAE_ALONE, meter.reconstruct(range(sessions))
    for one in asked:
        yield one.name, meter.measure(one.configuration, range(sessions))


def setting_row(quality: Quality, asked: Asked | None) -> dict[str, Any]:
    """One setting as it is written; without `asked` the VAE alone."""
    row: dict[str, Any] = {
        "name": VAE_ALONE if asked is None else asked.name,
        "sessions": len(quality.segments),
        "loss": quality.loss,
        "loss_error": quality.standard_error,
        "motion": quality.motion,
        "losses": [round(segment.loss, 6) for segment in quality.segments],
    }
    if asked is not None:
        row |= {"configuration": dict(asked.configuration), "is_emulated": asked.is_emulated}
    return row


def comparison_row(name: str, against: str, known: Mapping[str, Quality]) -> dict[str, Any]:
    """One comparison as it is written."""
    one, other = known[name], known[against]
    return {
        "name": name,
        "against": against,
        "loss": _difference_row(loss_difference(one, other)),
        "motion": _difference_row(motion_difference(one, other)),
    }


def _difference_row(difference: Difference) -> dict[str, Any]:
    sigmas = difference.sigmas
    return {
        "mean": difference.mean,
        "error": difference.error,
        "sigmas": sigmas if math.isfinite(sigmas) else None,
        "is_significant": difference.is_significant,
    }


def measure_history_bytes(checkpoint: str) -> dict[str, Any]:
    """Bytes that the engine holds of one session's history when its window is full, and bf16's over them."""
    held = {BF16: _held_bytes(FULL, checkpoint)}
    held |= {name: _held_bytes(_changed(change), checkpoint) for name, change in HISTORIES.items()}
    return {
        "bytes": held,
        "ratio": {name: held[BF16] / count for name, count in held.items()},
    }


def _held_bytes(configuration: Configuration, checkpoint: str) -> int:
    engine = ReferenceEngine()
    engine.load(LoadSpec(checkpoint=checkpoint, setting=Configuration({**configuration, "steps": 1, "vae": "batch"})))
    window = configuration["window"]
    assert isinstance(window, int)
    chunks = window // CHUNK_LATENTS + 1
    engine.open(SessionSpec(session_id="clip", prompt=PROMPT, chunks=chunks))
    reports = [engine.step("clip").report for _ in range(chunks)]
    engine.unload()
    return reports[-1].memory.kv_bytes
