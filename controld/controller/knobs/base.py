"""What every knob has in common: arms, a context, a prior cost model, a switch cost and a guard.

Deciding, learning and explaining know nothing of KV or video. They see arms as rows of stage coefficients, a context as
arrays of sizes, bandwidths and loads, and a prediction as arrays of seconds. A knob supplies the model in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Stage(StrEnum):
    """The stages of a transfer whose predictions are corrected by what was observed."""

    ENCODE = "encode"
    BYTES = "bytes"
    WIRE = "wire"
    DECODE = "decode"


STAGES = tuple(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """What learning says of each arm and stage, as multipliers of the prior model. Each array has shape [arms, stages].

    Args:
        mean_log, variance: posterior of the log ratio observed / predicted.
        noise_variance: spread of single observations around it.
        observations: how many count, after discounting.
    """

    mean_log: Array
    variance: Array
    noise_variance: Array
    observations: Array

    @classmethod
    def none(cls, arms: int, *, prior_variance: float = 0.0, noise_variance: float = 0.0) -> Corrections:
        """Nothing learned: every ratio is 1."""
        shape = (arms, len(STAGES))
        return cls(
            mean_log=np.zeros(shape),
            variance=np.full(shape, prior_variance),
            noise_variance=np.full(shape, noise_variance),
            observations=np.zeros(shape),
        )

    def factors(self) -> Array:
        """Posterior-mean multipliers: the mean of a log-normal, exp(mean + variance / 2)."""
        return np.exp(self.mean_log + self.variance / 2)

    def lower_factors(self, z: float) -> Array:
        """Multipliers at `z` posterior standard deviations below the mean of the log."""
        return np.exp(self.mean_log - z * np.sqrt(self.variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModels:
    """The arms of one service class as coefficients; each array has shape [arms].

    Args:
        encode_a_s, encode_b_s_per_byte, decode_a_s, decode_b_s_per_byte: affine seconds of a transfer by its raw
            bytes; an arm that is not framed (raw) keeps its own overhead in the encode pair.
        wire_share: wire bytes / raw bytes; 0 for the arm that computes instead of moving anything.
        framed: whether the arm is cut into overlapping chunks.
        encode_c_s_per_byte2: quadratic term of the arm that computes, 0 for every other one.
    """

    encode_a_s: Array
    encode_b_s_per_byte: Array
    decode_a_s: Array
    decode_b_s_per_byte: Array
    wire_share: Array
    framed: NDArray[np.bool_]
    encode_c_s_per_byte2: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.encode_c_s_per_byte2):
            object.__setattr__(self, "encode_c_s_per_byte2", np.zeros(len(self.wire_share)))

    def __len__(self) -> int:
        return len(self.wire_share)

    def rows(self, index: NDArray[np.intp]) -> StageModels:
        """Some of the arms."""
        return StageModels(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where predictions are wanted: the outer product of three axes.

    Args:
        sizes_bytes: shape [S], positive.
        bandwidths_bytes_per_s: shape [B], positive and finite.
        loads: shape [L], raw bytes offered per second / bandwidth; not negative.
    """

    sizes_bytes: Array
    bandwidths_bytes_per_s: Array
    loads: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds and loads of every arm in every context; shapes broadcast to [arms, S, B, L].

    Args:
        encode_s, wire_s, decode_s: work of each stage, summed over chunks.
        service_s: from the first byte of work to the last acknowledgement.
        server_s: seconds that a transfer takes of each server, shape [servers, arms, S, B, 1].
        transfers_per_s: of all classes, shape [1, S, B, L]; times a share and `server_s` it is a server's offered work,
            and at 1 the server never rests.
        rho: the largest offered work of any server, other classes' work included.
        wait_s: expected wait before service; infinite where `rho` is at least 1.
        total_s: wait and service.
    """

    encode_s: Array
    wire_s: Array
    decode_s: Array
    service_s: Array
    server_s: Array
    transfers_per_s: Array
    rho: Array
    wait_s: Array
    total_s: Array


def queue(server_s: Array, transfers_per_s: Array, share: float, other_work: Array | None) -> tuple[Array, Array]:
    """The busiest server's offered work, and the expected wait at it: a queue with regular service (M/D/1).

    The wait is S rho / (2 (1 - rho)), where S is the mean service time over all classes, which is rho divided by the
    transfers per second; infinite where rho is at least 1. For the arguments see `Prediction` and `Knob.predict`.
    """
    offered = share * transfers_per_s
    if other_work is None:
        rho = offered * server_s.max(axis=0)
    else:
        first, *others = busiest_servers(server_s, other_work)
        rho = offered * server_s[first] + other_work[first]
        for index in others:
            np.maximum(rho, offered * server_s[index] + other_work[index], out=rho)
    # In place: an array of every arm in every cell is large, and a new one costs more than the arithmetic.
    wait = rho / np.maximum(transfers_per_s, 1e-12)
    wait *= rho
    room = np.subtract(1.0, rho)
    np.maximum(room, 0.0, out=room)
    room *= 2.0
    with np.errstate(divide="ignore"):
        # A server that never rests leaves no room: something over zero, which is infinite.
        wait /= room
    return rho, wait


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """A prediction's part that no load changes; for the shapes see `Prediction`."""

    encode_s: Array
    wire_s: Array
    decode_s: Array
    service_s: Array
    server_s: Array

    def under_load(self, context: Context, share: float, other_work: Array | None) -> Prediction:
        """With the waiting that the context's loads make. See `Knob.predict`."""
        size = context.sizes_bytes[None, :, None, None]
        bandwidth = context.bandwidths_bytes_per_s[None, None, :, None]
        transfers_per_s = context.loads[None, None, None, :] * (bandwidth / size)
        rho, wait = queue(self.server_s, transfers_per_s, share, other_work)
        return Prediction(
            encode_s=self.encode_s,
            wire_s=self.wire_s,
            decode_s=self.decode_s,
            service_s=self.service_s,
            server_s=self.server_s,
            transfers_per_s=transfers_per_s,
            rho=rho,
            wait_s=wait,
            total_s=wait + self.service_s,
        )


def busiest_servers(server_s: Array, other_work: Array | None) -> list[int]:
    """The servers that can be the busiest one in any cell: one that is nowhere busier than another is left out.

    So the usual connection that carries one transfer at a time stands for all servers. For the arguments see `queue`.
    """
    largest = int(np.argmax(server_s.reshape(len(server_s), -1).sum(axis=1)))

    def covered(index: int) -> bool:
        return bool(np.all(server_s[largest] >= server_s[index])) and (
            other_work is None or bool(np.all(other_work[largest] >= other_work[index]))
        )

    return [index for index in range(len(server_s)) if index == largest or not covered(index)]


class Knob(Protocol):
    """A thing to turn, with the prior model of what turning it costs."""

    @property
    def name(self) -> str:
        """Stable name, as shown in explanations."""
        ...

    @property
    def work_stages(self) -> tuple[str, ...]:
        """Names of the servers, in the order of `Prediction.server_s`."""
        ...

    @property
    def switch_cost_s(self) -> float:
        """Seconds that a change of arm costs the next transfer."""
        ...

    def to_document(self) -> dict[str, Any]:
        """The parameters, JSON-ready; with the name, what `tiers.knob_from_document` makes the knob of."""
        ...

    def at_rest(self, models: StageModels, factors: Array, context: Context) -> AtRest:
        """What every arm costs at every size and bandwidth on an idle link, and takes of each server."""
        ...

    def predict(
        self,
        models: StageModels,
        factors: Array,
        context: Context,
        *,
        share: float = 1.0,
        other_work: Array | None = None,
    ) -> Prediction:
        """Costs of every arm in every context: `at_rest` and `AtRest.under_load`.

        Args:
            factors: multipliers by arm and stage, shape [arms, stages].
            share: this class's share of the offered bytes.
            other_work: offered work of all other classes, shape [servers, 1, S, B, L].
        """
        ...

    def break_even_raw_s(
        self, models: StageModels, factors: Array, sizes_bytes: Array, *, margin: float
    ) -> Array | None:
        """From which size / bandwidth on an arm is quicker than raw by a factor of `margin`, and on every slower link.

        Args:
            factors: multipliers by arm and stage, shape [arms, stages].
            sizes_bytes: shape [sizes].

        Returns:
            Seconds, shape [arms, sizes], infinite where an arm is so on no link; None where a knob cannot tell for
            every load.
        """
        ...

    def stage_seconds(
        self, models: StageModels, arm: int, *, raw_bytes: float, wire_bytes: float, bandwidth: float
    ) -> dict[Stage, float]:
        """Uncorrected prediction of what one effect reports, stage by stage (`BYTES` in bytes), for learning.

        A stage that the arm does not have, or that cannot be predicted (unknown bandwidth), is absent.
        """
        ...
