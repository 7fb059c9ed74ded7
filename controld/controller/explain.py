"""Why an arm was chosen: every arm of a cell with its numbers and its verdict, joined with what then happened."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from controld.contract.decision import DEFAULT_CLASS
from controld.contract.effect import Effect
from controld.contract.errors import ControldError
from controld.controller.choice import NEAR
from controld.controller.evaluate import Evaluation
from controld.controller.finite import finite
from controld.controller.goals import Candidate, ClassInput, Objective
from controld.controller.knobs.base import STAGES, Context, Stage
from controld.controller.plan import TablePlan
from controld.controller.sweeps import evaluate_classes


class ArmVerdict(StrEnum):
    """What became of an arm in a cell."""

    CHOSEN = "chosen"
    QUALITY = "loss_above_limit"
    PINNED = "pinned_off"
    NOT_ASKED_FOR = "not_asked_for"
    OVER_CAP = "over_cap"
    UNSTABLE = "unstable"
    SLOWER_THAN_RAW = "slower_than_raw"
    MISSES_SLO = "misses_slo"
    UNFAIR = "slows_a_tenant_down"
    NEAR = "near_but_not_chosen"
    BEATEN = "beaten"


class ExplanationError(ControldError):
    """There is nothing to explain: the cell or class does not exist."""


@dataclass(frozen=True, slots=True)
class LearnedFactor:
    """A stage's correction and the (discounted) observations behind it."""

    stage: str
    factor: float
    observations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmExplanation:
    """One arm in one cell.

    Seconds at the middle of the cell; `wait_s`, `total_s` are infinite for an unstable arm. `energy_j` is estimated,
    from the coefficients of `energy`.
    """

    arm_id: str
    label: str
    loss_mean_nats: float
    loss_upper_nats: float
    ratio: float
    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    total_s: float
    lower_total_s: float
    energy_j: float
    rho: float
    weight: float
    verdict: ArmVerdict
    text: str
    corrections: tuple[LearnedFactor, ...]
    foreign: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CellExplanation:
    """One cell: what was asked, what every arm would have cost, what won by how much.

    Args:
        size_bytes, bandwidth_bytes_per_s, load: (low, high) of the bins; 0 and infinity at the rims.
        middle: (bytes, bytes per second, load) at which arms were compared.
        arms: the chosen one first, then by total time, then those that are out.
        margin: total time of the best other arm that passed all gates / the winner's; infinite where there is none.
    """

    tier: str
    link_group: str
    service_class: str
    tenant: str
    objective: Objective
    max_quality_loss_nats: float
    slo_s: float | None
    slo_percentile: float
    cell: int
    size_bytes: tuple[float, float]
    bandwidth_bytes_per_s: tuple[float, float]
    load: tuple[float, float]
    middle: tuple[float, float, float]
    arms: tuple[ArmExplanation, ...]
    winner: str
    margin: float

    def arm(self, arm_id: str) -> ArmExplanation | None:
        """One of the arms."""
        return next((arm for arm in self.arms if arm.arm_id == arm_id), None)

    def to_document(self) -> dict[str, Any]:
        """JSON-ready: infinities are null."""
        document: dict[str, Any] = finite(asdict(self))
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds stage by stage, predicted or observed."""

    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferExplanation:
    """A cell's explanation joined with a transfer: what was drawn, what was expected of it, what happened.

    Args:
        predicted: for the drawn arm at the transfer's own bytes, bandwidth and load; None where the arm is not known.
        cell: None where no table was consulted.
    """

    effect: Effect
    table_version: int
    cell: CellExplanation | None
    predicted: StageSeconds | None
    receiver: Effect | None = None

    def to_document(self) -> dict[str, Any]:
        """JSON-ready: infinities are null."""
        document: dict[str, Any] = finite(
            {
                "transfer_id": self.effect.transfer_id,
                "table_version": self.table_version,
                "drawn": self.effect.arm_id,
                "explored": self.effect.explored,
                "decision": None if self.cell is None else self.cell.to_document(),
                "predicted": None if self.predicted is None else asdict(self.predicted),
                "observed": asdict(self.effect),
                "receiver": None if self.receiver is None else asdict(self.receiver),
            }
        )
        return document


def find_cell(
    table: TablePlan, service_class: str, size_bytes: float, bandwidth_bytes_per_s: float, load: float
) -> int:
    """The cell a draw would use; an unknown class is `default`.

    Raises:
        ExplanationError: neither the class nor `default` is in the table.
    """
    names = [item.goal.name for item in table.classes]
    name = service_class if service_class in names else DEFAULT_CLASS
    if name not in names:
        raise ExplanationError(f"no class {service_class!r} and no default", code="explain.class_unknown")
    grid = table.grid
    bins = (
        np.searchsorted(grid.size_edges_bytes, size_bytes, side="right"),
        np.searchsorted(grid.bandwidth_edges_bytes_per_s, bandwidth_bytes_per_s, side="right"),
        np.searchsorted(grid.load_edges, load, side="right"),
    )
    return int(np.ravel_multi_index((names.index(name), *map(int, bins)), (len(names), *grid.shape)))


def explain_cell(table: TablePlan, cell: int) -> CellExplanation:
    """Decide one cell again and say why. Pure: depends on the plan only.

    Raises:
        ExplanationError: no such cell.
    """
    grid, shape = table.grid, (len(table.classes), *table.grid.shape)
    if not 0 <= cell < len(table.cells):
        raise ExplanationError(f"no cell {cell}", code="explain.cell_unknown", hint=f"0 to {len(table.cells) - 1}")
    class_index, size, bandwidth, load = (int(i) for i in np.unravel_index(cell, shape))
    points = grid.points.at(size, bandwidth, load)
    in_use = table.in_use.reshape(shape)[:, size, bandwidth, load]
    incumbents = [
        np.full((1, 1, 1), _row_of(item, table.arms[arm].arm_id if arm >= 0 else None), dtype=np.intp)
        for item, arm in zip(table.classes, in_use, strict=True)
    ]
    evaluation = evaluate_classes(table.classes, table.knob, points, incumbents)[class_index]
    item = table.classes[class_index]
    winner_row = int(evaluation.winner[0, 0, 0])
    mixture = table.mixtures[table.cells[cell]]
    weights = {table.arms[arm].arm_id: weight for arm, weight in zip(mixture.arms, mixture.weights, strict=True)}
    arms = [
        _explain_arm(table, item, evaluation, row, winner_row, int(incumbents[class_index][0, 0, 0]), weights)
        for row in range(len(item.candidates))
    ]
    rivals = [arm.total_s for arm in arms if arm.verdict in (ArmVerdict.NEAR, ArmVerdict.BEATEN)]
    chosen = arms[winner_row]
    edges = grid.bin_edges(size, bandwidth, load)
    return CellExplanation(
        tier=table.tier,
        link_group=table.link_group,
        service_class=item.goal.name,
        tenant=item.goal.tenant,
        objective=item.goal.objective,
        max_quality_loss_nats=item.goal.max_quality_loss_nats,
        slo_s=item.goal.slo_s,
        slo_percentile=item.goal.slo_percentile,
        cell=cell,
        size_bytes=edges[0],
        bandwidth_bytes_per_s=edges[1],
        load=edges[2],
        middle=(float(points.size[0]), float(points.bandwidth[0]), float(points.load[0])),
        arms=tuple(sorted(arms, key=lambda arm: (arm is not chosen, arm.verdict in _OUT, arm.total_s))),
        winner=chosen.arm_id,
        margin=min(rivals) / chosen.total_s if rivals and math.isfinite(chosen.total_s) else math.inf,
    )


def explain_transfer(table: TablePlan | None, effect: Effect, *, receiver: Effect | None = None) -> TransferExplanation:
    """Join a transfer's effect with the table it was drawn from.

    Args:
        table: the table of `effect.table_version`; None where none was consulted (the lease was over, or no bandwidth
            was known), and then the effect's reason says why.
        effect: the sender's half.
        receiver: the receiver's half, for audit.
    """
    cell = predicted = None
    if table is not None and effect.table_version > 0:
        size = effect.expected_bytes or float(effect.raw_bytes)
        index = find_cell(table, effect.service_class, size, effect.bandwidth_bytes_per_s, effect.load)
        cell = explain_cell(table, index)
        item = next(i for i in table.classes if i.goal.name == cell.service_class)
        row = _row_of(item, effect.arm_id)
        if row >= 0 and effect.raw_bytes > 0 and effect.bandwidth_bytes_per_s > 0:
            predicted = predict_arm(table, item, row, effect.raw_bytes, effect.bandwidth_bytes_per_s, effect.load)
    return TransferExplanation(
        effect=effect, table_version=effect.table_version, cell=cell, predicted=predicted, receiver=receiver
    )


def predict_arm(
    table: TablePlan, item: ClassInput, row: int, size_bytes: float, bandwidth_bytes_per_s: float, load: float
) -> StageSeconds:
    """What one arm is expected to cost at one exact point (its class taken as all of the load)."""
    context = Context(
        sizes_bytes=np.array([size_bytes]),
        bandwidths_bytes_per_s=np.array([bandwidth_bytes_per_s]),
        loads=np.array([load]),
    )
    p = table.knob.predict(item.models, item.corrections.factors(), context)
    values = (p.encode_s, p.wire_s, p.decode_s, p.wait_s, p.total_s)
    encode, wire, decode, wait, total = (float(value[row, 0, 0, 0]) for value in values)
    return StageSeconds(encode_s=encode, wire_s=wire, decode_s=decode, wait_s=wait, total_s=total)


_OUT = (ArmVerdict.QUALITY, ArmVerdict.PINNED, ArmVerdict.NOT_ASKED_FOR)


def _row_of(item: ClassInput, arm_id: str | None) -> int:
    return next((row for row, candidate in enumerate(item.candidates) if candidate.arm_id == arm_id), -1)


def _explain_arm(
    table: TablePlan,
    item: ClassInput,
    evaluation: Evaluation,
    row: int,
    winner_row: int,
    incumbent_row: int,
    weights: dict[str, float],
) -> ArmExplanation:
    candidate, prediction = item.candidates[row], evaluation.prediction

    def at(values: np.ndarray) -> float:
        return float(values[row, 0, 0, 0])

    weight = weights.get(candidate.arm_id, 0.0)
    verdict, text = _verdict(table, item, evaluation, row, winner_row, incumbent_row)
    if verdict is ArmVerdict.CHOSEN:
        text = f"chosen, weight {weight:.3g}: {text}"
    elif weight > 0:
        text = f"{text}; explored, weight {weight:.2g}"
    return ArmExplanation(
        arm_id=candidate.arm_id,
        label=candidate.label,
        loss_mean_nats=candidate.loss_mean_nats,
        loss_upper_nats=candidate.loss_upper_nats,
        ratio=_ratio(candidate),
        encode_s=at(prediction.encode_s),
        wire_s=at(prediction.wire_s),
        decode_s=at(prediction.decode_s),
        wait_s=at(prediction.wait_s),
        total_s=at(prediction.total_s),
        lower_total_s=at(evaluation.lower_s),
        energy_j=at(evaluation.joules),
        rho=at(prediction.rho),
        weight=weight,
        verdict=verdict,
        text=text,
        corrections=tuple(
            LearnedFactor(stage.value, correction.factor, correction.observations)
            for stage, correction in zip(STAGES, candidate.corrections, strict=True)
        ),
        foreign=candidate.foreign,
    )


def _verdict(
    table: TablePlan, item: ClassInput, evaluation: Evaluation, row: int, winner_row: int, incumbent_row: int
) -> tuple[ArmVerdict, str]:
    """The first gate that stopped the arm, in the order of the gates; numbers included."""
    goal, candidate, cell = item.goal, item.candidates[row], (0, 0, 0)
    rank, winner_rank = float(evaluation.rank_s[row][cell]), float(evaluation.rank_s[winner_row][cell])
    raw_rank = float(evaluation.rank_s[0][cell])
    if row == winner_row:
        return ArmVerdict.CHOSEN, _why_chosen(item, evaluation, row, incumbent_row)
    if row == 0 and _is_split(evaluation):
        return ArmVerdict.NEAR, "takes what is below that line"
    if not evaluation.quality_ok[row]:
        upper = "unknown" if math.isinf(candidate.loss_upper_nats) else f"{candidate.loss_upper_nats:.4g}"
        return (
            ArmVerdict.QUALITY,
            f"out: loss {candidate.loss_mean_nats:.4g} (ub {upper}) above limit {goal.max_quality_loss_nats:g}",
        )
    if candidate.out_reason:
        return ArmVerdict.PINNED, f"out: pinned off, {candidate.out_reason}"
    if not evaluation.available[row] or goal.only_arm is not None:
        return ArmVerdict.NOT_ASKED_FOR, f"out: this class uses {goal.only_arm} only"
    if not evaluation.within_cap[row][cell] and evaluation.within_cap[winner_row][cell]:
        return (
            ArmVerdict.OVER_CAP,
            f"overload: leaves the other classes too little room, {_busiest(table, evaluation, row)}",
        )
    if not evaluation.stable[row][cell] and evaluation.stable[winner_row][cell]:
        return ArmVerdict.UNSTABLE, f"unstable: {_busiest(table, evaluation, row)}"
    if goal.objective is Objective.LATENCY and not evaluation.never_worse[row][cell]:
        if rank > raw_rank:
            return ArmVerdict.SLOWER_THAN_RAW, f"{rank / raw_rank:.3g}x raw's time"
        return ArmVerdict.SLOWER_THAN_RAW, "slower than raw at an end of this cell"
    if not evaluation.meets_slo[row][cell] and evaluation.meets_slo[winner_row][cell]:
        return (
            ArmVerdict.MISSES_SLO,
            f"misses the SLO: P{goal.slo_percentile:g} {_seconds(float(evaluation.tail_s[row][cell]))} and the rest"
            f" above {_seconds(goal.slo_s or 0.0)}",
        )
    if not evaluation.fair[row][cell]:
        with_it, least = (float(evaluation.largest_slowdown[r][cell]) for r in (row, winner_row))
        return ArmVerdict.UNFAIR, f"slows a tenant down: largest weighted slowdown {with_it:.3g}, not {least:.3g}"
    if evaluation.near[row][cell]:
        worse = candidate.loss_mean_nats > item.candidates[winner_row].loss_mean_nats
        return ArmVerdict.NEAR, f"within {NEAR - 1:.0%}: {'worse quality' if worse else 'the arm in use stays'}"
    if goal.objective is Objective.LATENCY:
        return ArmVerdict.BEATEN, f"{rank / winner_rank:.3g}x slower"
    cost, least = float(evaluation.cost[row][cell]), float(evaluation.cost[winner_row][cell])
    if least <= 0:
        return ArmVerdict.BEATEN, f"{goal.objective.value} {cost:.3g} instead of none"
    return ArmVerdict.BEATEN, f"{cost / least:.3g}x the {goal.objective.value}"


def _why_chosen(item: ClassInput, evaluation: Evaluation, row: int, incumbent_row: int) -> str:
    cell = (0, 0, 0)
    if _is_split(evaluation):
        below_s, below_s_per_byte = float(evaluation.raw_below_s[cell]), float(evaluation.raw_below_s_per_byte[cell])
        return (
            f"the fastest of this cell where bytes / bandwidth >= {below_s:.3g} s + {below_s_per_byte * 1e6:.3g} s/MB,"
            " raw below that line"
        )
    if item.goal.only_arm is not None:
        return "the only arm of this class" if row else f"{item.goal.only_arm} is out"
    if not evaluation.stable[row][cell]:
        return "no arm is stable: the least work"
    if not evaluation.meets_slo[row][cell]:
        return "no arm meets the SLO: the least violation"
    unfair = np.flatnonzero(~evaluation.fair[:, 0, 0, 0] & (evaluation.cost[:, 0, 0, 0] < evaluation.cost[row][cell]))
    if len(unfair):
        return f"fair: keeps the largest weighted slowdown at {float(evaluation.largest_slowdown[row][cell]):.3g}"
    near = [other for other in np.flatnonzero(evaluation.near[:, 0, 0, 0]).tolist() if other != row]
    passing = evaluation.available & evaluation.quality_ok
    if not near:
        if passing.sum() == 1 and row == 0:
            return "no other arm passes the gates"
        names = {
            Objective.LATENCY: "the fastest",
            Objective.BYTES: "the fewest bytes",
            Objective.ENERGY: "least energy",
        }
        return names.get(item.goal.objective, "the best quality")
    if any(item.candidates[other].loss_mean_nats > item.candidates[row].loss_mean_nats for other in near):
        return f"within {NEAR - 1:.0%} of the best, better quality"
    return f"within {NEAR - 1:.0%} of the best, in use" if row == incumbent_row else "the fastest of equals"


def _is_split(evaluation: Evaluation) -> bool:
    """Whether raw keeps a part of the cell."""
    return bool(evaluation.raw_below_s[0, 0, 0] != 0 or evaluation.raw_below_s_per_byte[0, 0, 0] != 0)


def _busiest(table: TablePlan, evaluation: Evaluation, row: int) -> str:
    stage = table.knob.work_stages[int(np.argmax(evaluation.prediction.server_s[:, row, 0, 0, 0]))]
    return f"{float(evaluation.prediction.rho[row, 0, 0, 0]):.3g} of what {stage} can do"


def _ratio(candidate: Candidate) -> float:
    """Raw bytes / wire bytes as corrected; infinite for the arm that moves none."""
    share = candidate.wire_share * candidate.corrections[STAGES.index(Stage.BYTES)].factor
    return 1.0 / share if share > 0 else math.inf


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
