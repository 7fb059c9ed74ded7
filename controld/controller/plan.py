"""A plan: decision tables with everything that explains them.

A plan keeps the *inputs* of each decision (a few numbers for each arm), the grid, the mixtures and the arms that were
in use before; a cell is explained by deciding it again. So a plan is small, and is stored as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controld.candidates.profile import StageTime
from controld.contract.configuration import Configuration
from controld.contract.decision import Arm, DecisionTable, Mixture
from controld.contract.errors import FieldError
from controld.controller.goals import Candidate, ClassGoal, ClassInput, Objective
from controld.controller.grid import Grid
from controld.controller.knobs.base import Knob
from controld.controller.knobs.tiers import knob_from_document
from controld.controller.posterior import StageCorrection

_FORMAT = 1
_THE_WINNER = -2

Indices = NDArray[np.signedinteger[Any]]


def compact(indices: Indices) -> Indices:
    """Equal indices in the fewest bytes: a plan has tens of thousands of cells, and there may be a thousand plans."""
    fits = len(indices) == 0 or int(indices.max()) <= np.iinfo(np.int16).max
    return indices.astype(np.int16 if fits else np.int32)


@dataclass(frozen=True)
class TablePlan:
    """One table.

    Args:
        classes: goals and candidates, in the table's order.
        arms: the table's arms; raw is the first.
        mixtures: the distinct mixtures.
        cells: index of each cell's mixture, flat, shape [classes * S * B * L].
        in_use: index into `arms` of what was in use before in each cell, -1 for nothing; same shape.
    """

    tier: str
    link_group: str
    grid: Grid
    knob: Knob
    classes: tuple[ClassInput, ...]
    arms: tuple[Arm, ...]
    mixtures: tuple[Mixture, ...]
    cells: Indices
    in_use: Indices
    prior_bandwidth_bytes_per_s: float = 0.0
    guard_sample: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What names a table."""
        return self.tier, self.link_group

    @cached_property
    def winners(self) -> Indices:
        """Index into `arms` of each cell's choice: the heaviest of its mixture; shape of `cells`."""
        return _winners(self.mixtures, self.cells)

    def decision_table(self, version: int) -> DecisionTable:
        """As it is published."""
        return DecisionTable(
            tier=self.tier,
            link_group=self.link_group,
            version=version,
            classes=tuple(item.goal.name for item in self.classes),
            size_edges_bytes=self.grid.size_edges_bytes,
            bandwidth_edges_bytes_per_s=self.grid.bandwidth_edges_bytes_per_s,
            load_edges=self.grid.load_edges,
            arms=self.arms,
            mixtures=self.mixtures,
            cells=tuple(self.cells.tolist()),
            prior_bandwidth_bytes_per_s=self.prior_bandwidth_bytes_per_s,
            guard_sample=self.guard_sample,
        )

    def publishes_same_as(self, other: TablePlan) -> bool:
        """Whether a data plane would draw the same arms from both."""
        return (
            self.key == other.key
            and self.grid == other.grid
            and self.prior_bandwidth_bytes_per_s == other.prior_bandwidth_bytes_per_s
            and self.guard_sample == other.guard_sample
            and [item.goal.name for item in self.classes] == [item.goal.name for item in other.classes]
            and self.arms == other.arms
            and self.mixtures == other.mixtures
            and np.array_equal(self.cells, other.cells)
        )

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tier": self.tier,
            "link_group": self.link_group,
            "grid": asdict(self.grid),
            "knob": {"name": self.knob.name, **self.knob.to_document()},
            "classes": [_class_document(item) for item in self.classes],
            "arms": [[arm.arm_id, None if arm.configuration is None else dict(arm.configuration)] for arm in self.arms],
            "mixtures": [
                [list(m.arms), list(m.weights), *([m.raw_below_s, m.raw_below_s_per_byte] if m.is_split else [])]
                for m in self.mixtures
            ],
            "cells": _run_lengths(self.cells),
            # Mostly the choice itself, and then one long run says so.
            "in_use": _run_lengths(np.where(self.in_use == self.winners, _THE_WINNER, self.in_use)),
            "prior_bandwidth_bytes_per_s": self.prior_bandwidth_bytes_per_s,
            "guard_sample": self.guard_sample,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TablePlan:
        """The inverse of `to_document`; raises KeyError, TypeError or ValueError on anything else."""
        configurations = {
            arm_id: None if values is None else Configuration(values) for arm_id, values in document["arms"]
        }
        mixtures = tuple(
            Mixture(tuple(arms), tuple(weights), *raw_below) for arms, weights, *raw_below in document["mixtures"]
        )
        cells = _from_run_lengths(document["cells"])
        in_use = _from_run_lengths(document["in_use"])
        return cls(
            tier=document["tier"],
            link_group=document["link_group"],
            grid=Grid(**{name: tuple(edges) for name, edges in document["grid"].items()}),
            knob=knob_from_document(document["knob"]),
            classes=tuple(_class_from_document(item, configurations) for item in document["classes"]),
            arms=tuple(Arm(arm_id, configuration) for arm_id, configuration in configurations.items()),
            mixtures=mixtures,
            cells=cells,
            in_use=compact(np.where(in_use == _THE_WINNER, _winners(mixtures, cells), in_use)),
            prior_bandwidth_bytes_per_s=document["prior_bandwidth_bytes_per_s"],
            guard_sample=document.get("guard_sample", 0.0),
        )


@dataclass(frozen=True)
class Plan:
    """All tables of one deployment, decided together.

    Args:
        policy_generation: of the policy set that it follows.
        decided_unix_s: when.
    """

    tables: tuple[TablePlan, ...]
    policy_generation: int = 0
    decided_unix_s: float = 0.0

    def table(self, tier: str, link_group: str) -> TablePlan | None:
        """The table of a tier and link group."""
        return next((table for table in self.tables if table.key == (tier, link_group)), None)

    def to_json(self) -> str:
        """Compact JSON from which `from_json` makes an equal plan."""
        return json.dumps(
            {
                "format": _FORMAT,
                "policy_generation": self.policy_generation,
                "decided_unix_s": self.decided_unix_s,
                "tables": [table.to_document() for table in self.tables],
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse what `to_json` wrote.

        Raises:
            FieldError: not a plan of this format.
        """
        try:
            document = json.loads(text)
            if document["format"] != _FORMAT:
                raise ValueError(f"format {document['format']} is not {_FORMAT}")
            return cls(
                tables=tuple(TablePlan.from_document(table) for table in document["tables"]),
                policy_generation=document["policy_generation"],
                decided_unix_s=document["decided_unix_s"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FieldError("plan", f"not a plan: {error}", code="plan.malformed") from error


def plan_equal(old: Plan | None, new: Plan) -> bool:
    """Whether publishing `new` after `old` would change nothing in any data plane."""
    return (
        old is not None
        and len(old.tables) == len(new.tables)
        and all(a.publishes_same_as(b) for a, b in zip(old.tables, new.tables, strict=True))
    )


_CANDIDATE_PLAIN = (
    "arm_id", "label", "loss_mean_nats", "wire_share", "foreign", "out_reason",
)  # fmt: skip


def _class_document(item: ClassInput) -> dict[str, Any]:
    goal = {field.name: getattr(item.goal, field.name) for field in fields(item.goal)}
    goal["outside"] = [item.goal.outside.a_s, item.goal.outside.b_s_per_byte]
    return {
        "goal": goal,
        "candidates": [
            {
                **{name: getattr(candidate, name) for name in _CANDIDATE_PLAIN},
                "loss_upper_nats": candidate.loss_upper_nats if candidate.loss_upper_nats < np.inf else None,
                "encode": [candidate.encode.a_s, candidate.encode.b_s_per_byte],
                "decode": [candidate.decode.a_s, candidate.decode.b_s_per_byte],
                **({"encode_c": candidate.encode_c_s_per_byte2} if candidate.encode_c_s_per_byte2 else {}),
                "corrections": [
                    [c.mean_log, c.variance, c.noise_variance, c.observations] for c in candidate.corrections
                ],
            }
            for candidate in item.candidates
        ],
    }


def _class_from_document(document: Mapping[str, Any], configurations: Mapping[str, Configuration | None]) -> ClassInput:
    goal = dict(document["goal"])
    goal["objective"] = Objective(goal["objective"])
    goal["outside"] = StageTime(*goal["outside"])
    candidates = []
    for item in document["candidates"]:
        upper = item["loss_upper_nats"]
        candidates.append(
            Candidate(
                **{name: item[name] for name in _CANDIDATE_PLAIN},
                configuration=configurations[item["arm_id"]],
                loss_upper_nats=float("inf") if upper is None else upper,
                encode=StageTime(*item["encode"]),
                decode=StageTime(*item["decode"]),
                encode_c_s_per_byte2=item.get("encode_c", 0.0),
                corrections=tuple(StageCorrection(*numbers) for numbers in item["corrections"]),
            )
        )
    return ClassInput(ClassGoal(**goal), tuple(candidates))


def _winners(mixtures: Sequence[Mixture], cells: Indices) -> Indices:
    return compact(np.array([mixture.arms[0] for mixture in mixtures], dtype=np.intp))[cells]


def _run_lengths(values: Indices) -> list[list[int]]:
    return [[int(value), sum(1 for _ in run)] for value, run in groupby(values.tolist())]


def _from_run_lengths(runs: Sequence[Sequence[int]]) -> Indices:
    values, counts = ([run[index] for run in runs] for index in (0, 1))
    return compact(np.repeat(np.array(values, dtype=np.intp), np.array(counts, dtype=np.intp)))
