"""What each tenant's transfers carried and how much they were slowed down, from their effects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controld.contract.decision import DEFAULT_CLASS
from controld.contract.effect import Effect, Half, Path
from controld.controller.evaluate import usable_arms
from controld.controller.fairness import idle_seconds, jain_index, relative_weights, weighted_slowdown
from controld.controller.knobs.base import Context
from controld.controller.plan import Plan, TablePlan
from controld.fleet.published import Selector
from controld.planning.plane import selector_of
from controld.policy.model import Policy

HALF_LIFE_S: Final = 300.0
_LEAST_EVIDENCE: Final = 0.5
_LARGEST_SLOWDOWN: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """One tenant of one policy.

    Args:
        share: what it gets of a link while all want more.
        transfers, raw_bytes, wire_bytes: since the daemon started.
        slowdown: mean over its recent transfers of their time, waiting included, over what the plan expects of the
            class's fastest arm alone on an idle link; None where there were none.
    """

    name: str
    weight: float
    share: float
    transfers: int
    raw_bytes: int
    wire_bytes: int
    slowdown: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReport:
    """All tenants of one policy.

    Args:
        jain_index: of the recent slowdowns, each weighted as in `controller.fairness`; None with fewer than two tenants
            that had transfers.
    """

    selector: Selector
    tenants: tuple[TenantRecord, ...]
    jain_index: float | None


@dataclass(slots=True)
class _Account:
    transfers: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    slowdowns: float = 0.0
    evidence: float = 0.0
    at_s: float = field(default=-math.inf)

    def fade(self, now_s: float) -> None:
        factor = math.exp2(-max(0.0, now_s - self.at_s) / HALF_LIFE_S)
        self.slowdowns *= factor
        self.evidence *= factor
        self.at_s = max(self.at_s, now_s)


class TenantLedger:
    """Accounts of the tenants that policies name; in memory, since the daemon started. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[Selector, str], _Account] = {}

    def observe(self, policy: Policy, plan: Plan | None, effect: Effect, now_s: float) -> None:
        """Take in the effect of a transfer of this policy's planes; only the sender's half counts."""
        if effect.half is not Half.SENDER:
            return
        service_class = policy.service_class(effect.service_class) or policy.service_class(DEFAULT_CLASS)
        if service_class is None:
            return
        account = self._accounts.setdefault((selector_of(policy), service_class.tenant), _Account())
        account.fade(now_s)
        account.transfers += 1
        account.raw_bytes += effect.raw_bytes
        account.wire_bytes += effect.wire_bytes
        slowdown = None if plan is None else slowdown_of(plan, service_class.name, effect)
        if slowdown is not None:
            account.slowdowns += slowdown
            account.evidence += 1.0

    def report(self, policies: Sequence[Policy], now_s: float) -> list[TenantReport]:
        """One for each policy, in their order; what no policy names any more is forgotten."""
        named = {(selector_of(policy), tenant.name) for policy in policies for tenant in policy.tenants}
        self._accounts = {key: account for key, account in self._accounts.items() if key in named}
        return [self._report(policy, now_s) for policy in policies]

    def _report(self, policy: Policy, now_s: float) -> TenantReport:
        selector, shares = selector_of(policy), policy.tenant_shares
        records = []
        for tenant in policy.tenants:
            account = self._accounts.get((selector, tenant.name), _Account())
            account.fade(now_s)
            known = account.evidence >= _LEAST_EVIDENCE
            records.append(
                TenantRecord(
                    name=tenant.name,
                    weight=tenant.weight,
                    share=shares[tenant.name],
                    transfers=account.transfers,
                    raw_bytes=account.raw_bytes,
                    wire_bytes=account.wire_bytes,
                    slowdown=account.slowdowns / account.evidence if known else None,
                )
            )
        return TenantReport(selector=selector, tenants=tuple(records), jain_index=_jain(records))


def _jain(records: Sequence[TenantRecord]) -> float | None:
    slowdowns: Mapping[str, float] = {r.name: r.slowdown for r in records if r.slowdown is not None}
    if len(slowdowns) < 2:
        return None
    weights = relative_weights({record.name: record.weight for record in records if record.name in slowdowns})
    return jain_index(
        [max(0.0, float(weighted_slowdown(np.array(value), weights[name]))) for name, value in slowdowns.items()]
    )


def slowdown_of(plan: Plan, service_class: str, effect: Effect) -> float | None:
    """Waiting and work of a transfer over what it would take alone; None where that is not known, or it failed."""
    table = plan.table(effect.tier, effect.link_group)
    if table is None or effect.path is Path.FAILED or effect.raw_bytes <= 0 or effect.bandwidth_bytes_per_s <= 0:
        return None
    idle_s = _idle_s(table, service_class, effect.raw_bytes, effect.bandwidth_bytes_per_s)
    if idle_s is None or not 0 < idle_s < math.inf:
        return None
    return min((effect.wait_s + effect.total_s) / idle_s, _LARGEST_SLOWDOWN)


def _idle_s(table: TablePlan, service_class: str, raw_bytes: float, bandwidth_bytes_per_s: float) -> float | None:
    item = next((item for item in table.classes if item.goal.name == service_class), None)
    if item is None:
        return None
    context = Context(
        sizes_bytes=np.array([float(raw_bytes)]),
        bandwidths_bytes_per_s=np.array([bandwidth_bytes_per_s]),
        loads=np.array([0.0]),
    )
    prediction = table.knob.predict(item.models, item.corrections.factors(), context)
    return float(idle_seconds(prediction, usable_arms(item))[0, 0, 0])
