"""A profile: a configuration with its measured objectives."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from controld.candidates.document import fields_of, read_json_object
from controld.candidates.statistics import upper_bound_95
from controld.contract.configuration import Configuration
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from controld.contract.errors import FieldError

_FORMAT = 1

MAX_LOSS_NATS = 1e6
MAX_ERROR_LOG_SD = 1e3
MIN_RATIO, MAX_RATIO = 1e-3, 1e6
MAX_STAGE_A_S = 86_400.0
MAX_STAGE_B_S_PER_BYTE = 1.0
MIN_TRANSFER_BYTES, MAX_TRANSFER_BYTES = 1.0, 1e15
MAX_COUNT = 2**31 - 1
MAX_UNIX_S = 253_402_300_799.0
"""The last second of the year 9999: what calendars can show."""

_TEXTS = ("workload", "model_fingerprint", "arm_id", "sender_hardware", "receiver_hardware", "corpus", "provenance")


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage as an affine function of raw bytes: `a + b * V` for a transfer of V bytes.

    It is cut into frames as the data plane cuts it, so what a frame costs beside its bytes is part of `b`.
    """

    a_s: float
    b_s_per_byte: float

    def __post_init__(self) -> None:
        for name in ("a_s", "b_s_per_byte"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(f"stage_time.{name}", f"{value} is not a finite non-negative number")

    def seconds(self, raw_bytes: float) -> float:
        """Seconds for `raw_bytes`."""
        return self.a_s + self.b_s_per_byte * raw_bytes


NO_TIME = StageTime(0.0, 0.0)


def fit_stage_time(raw_bytes: ArrayLike, seconds: ArrayLike, weights: ArrayLike | None = None) -> StageTime:
    """Non-negative weighted least squares of `seconds ~ a + b * raw_bytes`.

    Timing noise grows with the time itself, so without given weights the squared *relative* error is minimised (weights
    1/fit², iterated three times; weighing by 1/observation² would favour whatever happened to be fast).

    Args:
        raw_bytes: shape [n], positive.
        seconds: shape [n], non-negative; pairs with a non-finite member are left out.
        weights: shape [n], non-negative; None for relative errors.

    Raises:
        FieldError: no usable pair.
    """
    volumes, times = np.asarray(raw_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    usable = np.isfinite(volumes) & np.isfinite(times) & (volumes > 0) & (times >= 0)
    if not usable.any():
        raise FieldError("stage_time", "no usable pair of bytes and seconds")
    given = None if weights is None else np.asarray(weights, dtype=np.float64)[usable]
    volumes, times = volumes[usable], times[usable]
    current = np.ones_like(volumes) if given is None else given
    fitted = StageTime(0.0, 0.0)
    for _ in range(1 if given is not None else 4):
        fitted = _fit_once(volumes, times, current)
        prediction = fitted.a_s + fitted.b_s_per_byte * volumes
        current = 1.0 / np.maximum(prediction, 1e-9) ** 2
    return fitted


def _fit_once(volumes: np.ndarray, times: np.ndarray, weights: np.ndarray) -> StageTime:
    total = float(weights.sum())
    if total <= 0:
        raise FieldError("stage_time", "all weights are zero")
    mean_volume, mean_time = float(weights @ volumes) / total, float(weights @ times) / total
    spread = float(weights @ (volumes - mean_volume) ** 2)
    proportional = float(weights @ (volumes * times)) / float(weights @ volumes**2)
    # With (nearly) one size only, slope and intercept cannot be told apart: proportional is the safe reading.
    if spread <= 1e-9 * total * mean_volume**2:
        return StageTime(0.0, proportional)
    slope = float(weights @ ((volumes - mean_volume) * (times - mean_time))) / spread
    intercept = mean_time - slope * mean_volume
    # Two variables: when one leaves the feasible region, the optimum lies on that axis.
    if slope < 0:
        return StageTime(mean_time, 0.0)
    if intercept < 0:
        return StageTime(0.0, proportional)
    return StageTime(intercept, slope)


@dataclass(frozen=True, slots=True)
class QualityKey:
    """What quality depends on, and nothing else."""

    model_fingerprint: str
    workload: str
    lossy_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A configuration with what was measured of it.

    Every number has a limit far beyond what any machine does, so that all that is worked out of it is finite: losses up
    to 1e6 nats, ratios from 1e-3 to 1e6, a median transfer from one byte to 1e15 (a petabyte), stages of up to a day
    plus one second per byte (none at all for what costs no time), dates up to the year 9999, counts below 2^31.

    Args:
        arm_id: the configuration's id.
        loss_mean_nats, loss_se_nats, loss_samples: mean, standard error over segments and their number at the worst
            prompt length (the one with the largest mean).
        loss_upper_nats: one-sided 95 % upper bound (Student's t), the largest over the prompt lengths; infinite where
            fewer than two segments were measured; worked out from the three fields above where not given.
        ratio: raw bytes / wire bytes, headers and side data included.
        encode, decode: seconds of a transfer by its raw bytes, summed over its frames.
        median_transfer_bytes: V*, the workload's median transfer, at which the latency objective is taken.
        provenance: where it came from (study and trial).
        error_mean: geometric mean over segments of one frame's reconstruction error, as effects state it, at the prompt
            length where it is largest; 0 where every frame was exact.
        error_log_sd: standard deviation of the logarithms of these errors.
        error_samples: in how many segments it was measured; 0: in none, and the other two say nothing.

    Raises:
        FieldError: the id is another configuration's, or a number is out of range; the field is named.
    """

    configuration: Configuration
    workload: str
    model_fingerprint: str
    loss_mean_nats: float
    loss_se_nats: float
    loss_samples: int
    worst_prompt_tokens: int
    ratio: float
    encode: StageTime
    decode: StageTime
    median_transfer_bytes: float
    arm_id: str = ""
    loss_upper_nats: float = math.nan
    sender_hardware: str = ""
    receiver_hardware: str = ""
    measured_unix_s: float = 0.0
    corpus: str = ""
    provenance: str = ""
    error_mean: float = 0.0
    error_log_sd: float = 0.0
    error_samples: int = 0

    def __post_init__(self) -> None:
        if not self.arm_id:
            object.__setattr__(self, "arm_id", self.configuration.config_id)
        if self.arm_id != self.configuration.config_id:
            raise FieldError("profile.arm_id", f"{self.arm_id} is not {self.configuration.config_id}")
        for name, value, low, high in (
            ("loss_mean_nats", self.loss_mean_nats, 0.0, MAX_LOSS_NATS),
            ("loss_se_nats", self.loss_se_nats, 0.0, MAX_LOSS_NATS),
            ("loss_samples", self.loss_samples, 0, MAX_COUNT),
            ("worst_prompt_tokens", self.worst_prompt_tokens, 0, MAX_COUNT),
            ("ratio", self.ratio, MIN_RATIO, MAX_RATIO),
            ("encode.a_s", self.encode.a_s, 0.0, MAX_STAGE_A_S),
            ("encode.b_s_per_byte", self.encode.b_s_per_byte, 0.0, MAX_STAGE_B_S_PER_BYTE),
            ("decode.a_s", self.decode.a_s, 0.0, MAX_STAGE_A_S),
            ("decode.b_s_per_byte", self.decode.b_s_per_byte, 0.0, MAX_STAGE_B_S_PER_BYTE),
            ("median_transfer_bytes", self.median_transfer_bytes, MIN_TRANSFER_BYTES, MAX_TRANSFER_BYTES),
            ("measured_unix_s", self.measured_unix_s, 0.0, MAX_UNIX_S),
            ("error_mean", self.error_mean, 0.0, MAX_RECONSTRUCTION_ERROR),
            ("error_log_sd", self.error_log_sd, 0.0, MAX_ERROR_LOG_SD),
            ("error_samples", self.error_samples, 0, MAX_COUNT),
        ):
            # Written so that NaN is refused too.
            if not low <= value <= high:
                raise FieldError(f"profile.{name}", f"{value!s:.40} is not in {low:g}..{high:g}")
        if math.isnan(self.loss_upper_nats):
            bound = upper_bound_95(self.loss_mean_nats, self.loss_se_nats, self.loss_samples)
            object.__setattr__(self, "loss_upper_nats", bound)
        if self.loss_upper_nats < self.loss_mean_nats:
            raise FieldError("profile.loss_upper_nats", "is below the mean")

    @property
    def quality_key(self) -> QualityKey:
        """Profiles with equal keys share one quality measurement."""
        return QualityKey(self.model_fingerprint, self.workload, self.configuration.lossy_id)

    @property
    def latency_objective(self) -> float:
        """(encode + decode seconds at V*) / V*, seconds per byte."""
        volume = self.median_transfer_bytes
        return (self.encode.seconds(volume) + self.decode.seconds(volume)) / volume

    @property
    def bytes_objective(self) -> float:
        """Wire bytes / raw bytes."""
        return 1.0 / self.ratio

    @property
    def objectives(self) -> tuple[float, float, float]:
        """(loss in nats, seconds per byte, wire bytes / raw bytes), all to be minimised."""
        return self.loss_mean_nats, self.latency_objective, self.bytes_objective

    def to_document(self) -> dict[str, Any]:
        """A JSON-ready mapping; an infinite upper bound is null."""
        document = asdict(self)
        document["configuration"] = dict(self.configuration)
        if math.isinf(self.loss_upper_nats):
            document["loss_upper_nats"] = None
        return {"format": _FORMAT, **document}

    @staticmethod
    def document_format() -> int:
        """The `format` of documents that `to_document` writes and `from_document` reads."""
        return _FORMAT

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Profile:
        """The profile that `to_document` described.

        Raises:
            FieldError: another format, a missing, unknown or impossible field.
        """
        values = dict(document)
        if values.pop("format", None) != _FORMAT:
            raise FieldError("profile.format", f"is not {_FORMAT}")
        for name in _TEXTS:
            if not isinstance(values.get(name, ""), str):
                raise FieldError(f"profile.{name}", "is not a text")
        with fields_of("profile"):
            upper = values.pop("loss_upper_nats")
            return cls(
                **{
                    **values,
                    "configuration": Configuration(values["configuration"]),
                    "encode": StageTime(**values["encode"]),
                    "decode": StageTime(**values["decode"]),
                    "loss_upper_nats": math.inf if upper is None else upper,
                }
            )

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Parse what `to_json` wrote. Raises: FieldError."""
        return cls.from_document(read_json_object(text, "profile"))


def objective_matrix(profiles: Sequence[Profile]) -> np.ndarray:
    """Objectives of profiles, shape [n, 3]: loss, seconds per byte, bytes ratio."""
    return np.array([profile.objectives for profile in profiles], dtype=np.float64).reshape(len(profiles), 3)
