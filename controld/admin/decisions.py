"""The decisions part of the admin API: transfers, why each went as it did, and what would be decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from controld.admin.backend import DecisionFilter, HypotheticalContext, Json
from controld.admin.candidates import Candidates
from controld.admin.problem import NotFoundError, UnavailableError
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.contract.effect import Half
from controld.contract.errors import FieldError
from controld.controller.explain import explain_cell, explain_transfer, find_cell
from controld.controller.explain_text import cell_text, transfer_text
from controld.controller.plan import Plan, TablePlan
from controld.fleet.published import Selector
from controld.planning.planner import Planner
from controld.store.errors import GoneError
from controld.store.errors import NotFoundError as NotStoredError
from controld.store.interface import Store
from controld.store.records import EffectColumn, EffectCount, EffectFilter, EffectRecord


class Decisions:
    """Implements `DecisionBackend`.

    Args:
        store: effects and published versions.
        planner: the plans in force.
        candidates: the profiles that there are.
    """

    def __init__(self, store: Store, planner: Planner, candidates: Candidates) -> None:
        self._store = store
        self._planner = planner
        self._candidates = candidates

    async def listing(self, wanted: DecisionFilter) -> Json:
        where = EffectFilter(service_class=wanted.service_class, arm_id=wanted.arm_id)
        sender = EffectFilter(service_class=wanted.service_class, arm_id=wanted.arm_id, half=Half.SENDER)
        records = await self._store.effects.recent(wanted.limit, where)
        columns = (EffectColumn.ARM_ID, EffectColumn.PATH, EffectColumn.VERDICT, EffectColumn.REASON)
        counts = await self._store.effects.counts(columns, sender)
        return {
            "decisions": [_effect(record) for record in records],
            "counts": count_rows(columns, counts),
        }

    async def explain(self, transfer_id: str) -> Json:
        records = await self._store.effects.by_transfer(transfer_id)
        halves = {record.effect.half: record.effect for record in records}
        sender = halves.get(Half.SENDER)
        if sender is None:
            raise NotFoundError(f"no transfer {transfer_id}", hint="controld explain lists the newest ones")
        table = None
        if sender.table_version > 0:
            plan = await self._plan_of(sender.table_version)
            table = plan.table(sender.tier, sender.link_group)
        explanation = explain_transfer(table, sender, receiver=halves.get(Half.RECEIVER))
        return {"text": transfer_text(explanation), **explanation.to_document()}

    async def _plan_of(self, version: int) -> Plan:
        try:
            record = await self._store.versions.get(version)
        except GoneError as error:
            raise NotFoundError(f"table version {version} is not kept any more", gone=True) from error
        except NotStoredError as error:
            raise NotFoundError(f"table version {version} was never published here") from error
        return Plan.from_json(record.explanations_json)

    async def explain_hypothetical(self, context: HypotheticalContext) -> Json:
        selector, table = self._table(context)
        classes = [item.goal.name for item in table.classes]
        if context.service_class not in classes:
            raise FieldError(
                "class", f"there is no class {context.service_class!r}", hint=f"one of {', '.join(classes)}"
            )
        cell = find_cell(table, context.service_class, context.size_bytes, context.bandwidth_bytes_per_s, context.load)
        explanation = explain_cell(table, cell)
        note = await self._why_raw_alone(table, context.service_class) if len(explanation.arms) == 1 else ""
        return {
            "text": cell_text(explanation) + (f"\n{note}" if note else ""),
            "note": note,
            "kind": selector.kind,
            "deployment": selector.deployment,
            **explanation.to_document(),
        }

    async def _why_raw_alone(self, table: TablePlan, service_class: str) -> str:
        """What a reader should know where raw is the only arm."""
        workload = next(item.goal.workload for item in table.classes if item.goal.name == service_class)
        stored = await self._candidates.count(ProfileFilter(kind=ProfileKind.KV, workload=workload))
        if not stored:
            return f"no profile of workload {workload} is stored (controld profile --workload {workload})"
        return (
            f"none of the {stored} stored profiles of workload {workload} is an arm: they are of another model than the"
            " planes serve, no serving plane was ever connected, or their artefacts are missing (controld status)"
        )

    def _table(self, context: HypotheticalContext) -> tuple[Selector, TablePlan]:
        plans = self._planner.plans
        if context.deployment is not None:
            plans = {s: plan for s, plan in plans.items() if s.deployment == context.deployment}
        found = [(s, table) for s, plan in plans.items() for table in plan.tables if table.tier == context.tier]
        if not found:
            raise UnavailableError(
                f"no plan for tier {context.tier}" + (f" of {context.deployment}" if context.deployment else ""),
                hint="a policy must name the tier",
            )
        if len(found) > 1:
            names = ", ".join(selector.deployment for selector, _ in found)
            raise FieldError("deployment", "is missing and there are several", hint=f"one of {names}")
        return found[0]


def count_rows(columns: Sequence[EffectColumn], counts: Iterable[EffectCount]) -> list[Json]:
    """Transfers counted by columns."""
    return [
        {
            **dict(zip((column.value for column in columns), count.values, strict=True)),
            "transfers": count.effects,
            "raw_bytes": count.raw_bytes,
            "wire_bytes": count.wire_bytes,
        }
        for count in counts
    ]


def _effect(record: EffectRecord) -> Json:
    return {"agent_id": record.agent_id, "received_unix_s": record.received_unix_s, **asdict(record.effect)}
