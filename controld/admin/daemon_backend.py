"""The admin API's answers, made from the running daemon's parts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from controld import __version__
from controld.admin.backend import DecisionFilter, HypotheticalContext, Json, PolicyEdit
from controld.admin.candidates import Candidates
from controld.admin.engines import engine_document, engine_summary
from controld.admin.problem import NotFoundError, UnavailableError
from controld.admin.spaces import describe_spaces
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.contract.clock import Clock
from controld.contract.effect import Half
from controld.contract.errors import FieldError
from controld.controller.explain import explain_cell, explain_transfer, find_cell
from controld.controller.explain_text import cell_text, transfer_text
from controld.controller.guard import EVERY_CLASS, Pin
from controld.controller.plan import Plan, TablePlan
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer
from controld.fleet.session import AgentSession
from controld.planning.planner import Planner
from controld.planning.policy_diff import edited_set, policy_changes
from controld.planning.policy_diff_text import changes_text
from controld.planning.video_engines import EngineKey
from controld.planning.video_planner import VideoPlanner
from controld.policy.loader import SourceFile, parse_policies
from controld.policy.source import PolicySource, ReloadOutcome
from controld.profiling.errors import StudyNotFoundError
from controld.store.errors import GoneError
from controld.store.errors import NotFoundError as NotStoredError
from controld.store.interface import Store
from controld.store.records import EffectColumn, EffectFilter, EffectRecord


class Studies(Protocol):
    """What the admin API needs of profiling studies."""

    async def begin(self, body: Json) -> Json: ...

    async def list(self) -> list[Json]: ...

    async def get(self, study_id: str) -> Json: ...

    async def cancel(self, study_id: str) -> Json: ...

    async def pause(self, study_id: str) -> Json: ...

    async def resume(self, study_id: str) -> Json: ...

    async def compare(self, study_ids: Sequence[str]) -> tuple[Json, ...]: ...

    def events(self, study_id: str) -> AsyncIterator[Json]: ...


class Life(Protocol):
    """What the admin API needs of the daemon's life cycle."""

    @property
    def is_serving(self) -> bool: ...

    async def reload(self, reason: str) -> ReloadOutcome: ...


class DaemonBackend:
    """Implements `AdminBackend`.

    Args:
        life: gives the daemon, which exists only after this object.
        policies, store, fleet, planner, studies, clock, video: the running parts that are asked.
    """

    def __init__(
        self,
        life: Callable[[], Life],
        policies: PolicySource,
        store: Store,
        fleet: FleetServer,
        planner: Planner,
        studies: Studies,
        clock: Clock,
        *,
        video: VideoPlanner | None = None,
    ) -> None:
        self._life = life
        self._policies = policies
        self._store = store
        self._fleet = fleet
        self._planner = planner
        self._studies = studies
        self._clock = clock
        self._video = video
        self._started_unix_s = clock.unix_s()
        self._candidates = Candidates(store, fleet.sessions, self._profiles_changed, clock)

    @property
    def candidates(self) -> Candidates:
        """What answers about profiles."""
        return self._candidates

    def _profiles_changed(self) -> None:
        self._planner.profiles_changed()
        if self._video is not None:
            self._video.profiles_changed()

    def ready(self) -> tuple[bool, str]:
        """Serving is ready: components started, policies in force."""
        return (True, "") if self._life().is_serving else (False, "the daemon is starting or stopping")

    async def status(self) -> Json:
        """One page about everything."""
        sessions = self._fleet.sessions()
        sender = EffectFilter(half=Half.SENDER)
        counts = await self._store.effects.counts(
            (EffectColumn.SERVICE_CLASS, EffectColumn.ARM_ID, EffectColumn.PATH), sender
        )
        damage = self._store.damage
        unreadable = await self._candidates.unreadable()
        return {
            "version": __version__,
            "uptime_s": self._clock.unix_s() - self._started_unix_s,
            "policy_generation": self._policies.current.generation,
            "policy_problems": [problem.to_json() for problem in self._policies.problems],
            "published_version": self._fleet.last_version,
            "agents": [_agent_summary(session) for session in sessions],
            "links": [
                {"agent_id": session.agent_id, **asdict(link)}
                for session in sessions
                if session.telemetry is not None
                for link in session.telemetry.links
            ],
            "guard": self._guard_rows(),
            "engines": await self.engines(),
            "transfers": [
                {
                    "service_class": count.values[0],
                    "arm_id": count.values[1],
                    "path": count.values[2],
                    "transfers": count.effects,
                    "raw_bytes": count.raw_bytes,
                    "wire_bytes": count.wire_bytes,
                }
                for count in counts
            ],
            "sizes": {
                name: asdict(estimate)
                for name, estimate in self._planner.sizes.estimates(self._clock.monotonic_s()).items()
            },
            "tenants": [
                {
                    "kind": report.selector.kind,
                    "deployment": report.selector.deployment,
                    "jain_index": report.jain_index,
                    "tenants": [asdict(tenant) for tenant in report.tenants],
                }
                for report in self._planner.tenants()
            ],
            "feedback_refused": dict(self._planner.learning.refused),
            "alarms": [
                *(
                    {"where": f"{s.kind}/{s.deployment}", "what": text}
                    for s, text in self._planner.alarms.items()
                    if text
                ),
                *self._video_alarms(),
                *_rival_alarms(sessions),
                *self._pin_alarms(),
                *(
                    [{"where": "policies", "what": self._policies.last_good_problem}]
                    if self._policies.last_good_problem
                    else []
                ),
                *({"where": row.where, "what": row.what} for row in unreadable),
                *([{"where": "store", "what": damage.problem, "set_aside": damage.set_aside}] if damage else []),
            ],
        }

    def _video_alarms(self) -> list[Json]:
        alarms = self._video.alarms if self._video is not None else {}
        return [{"where": f"{s.kind}/{s.deployment}", "what": text} for s, text in alarms.items() if text]

    async def engines(self) -> list[Json]:
        """Every video engine that is connected, or was decided for."""
        plans = self._video.plans() if self._video is not None else {}
        sessions = {session.agent_id: session for session in self._fleet.sessions() if session.identity.engine}
        named = {agent_id: plan for (_, agent_id), plan in plans.items()}
        return [engine_summary(name, sessions.get(name), named.get(name)) for name in sorted({*sessions, *named})]

    async def explain_engine(self, agent_id: str) -> Json:
        """Why an engine runs under its setting: every other one, and what stopped it."""
        plans = self._video.plans() if self._video is not None else {}
        found = next((plan for (_, name), plan in plans.items() if name == agent_id), None)
        session = next((s for s in self._fleet.sessions(include_gone=True) if s.agent_id == agent_id), None)
        if found is None:
            known = ", ".join(name for _, name in plans) or "none"
            raise NotFoundError(f"nothing was decided for an engine {agent_id}", hint=f"engines: {known}")
        return engine_document(agent_id, session, found)

    def _pin_alarms(self) -> list[Json]:
        return [
            {
                "where": f"{selector.kind}/{selector.deployment}",
                "what": f"{pin.arm_id} is out of use"
                + ("" if pin.service_class == EVERY_CLASS else f" for class {pin.service_class}")
                + f": {pin.reason}",
            }
            for selector, _, pin in self._pins()
        ] + [
            {
                "where": f"{key[0].kind}/{key[0].deployment}/{key[1]}",
                "what": f"{pin.arm_id} is out of use: {pin.reason}",
            }
            for key, pin in self._video_pins()
        ]

    def _pins(self) -> Iterator[tuple[Selector, str, Pin]]:
        now_unix_s = self._clock.unix_s()
        for selector, lessons in self._planner.learning.lessons.items():
            for (tier, _), learner in lessons.learners.items():
                for pin in learner.pins(now_unix_s).pins:
                    yield selector, tier, pin

    def _video_pins(self) -> list[tuple[EngineKey, Pin]]:
        return self._video.pins() if self._video is not None else []

    def _guard_rows(self) -> list[Json]:
        return [
            {"kind": selector.kind, "deployment": selector.deployment, "tier": tier, **row}
            for selector, lessons in self._planner.learning.lessons.items()
            for (tier, _), learner in lessons.learners.items()
            for row in learner.quality.rows()
        ]

    async def dataplanes(self) -> list[Json]:
        """Every agent that is connected, and those that left lately."""
        return [_agent_details(session) for session in self._fleet.sessions(include_gone=True)]

    async def spaces(self) -> list[Json]:
        """What connected agents advertise; counted in a thread, as a space may be large."""
        return await asyncio.to_thread(describe_spaces, self._fleet.sessions())

    async def decisions(self, wanted: DecisionFilter) -> Json:
        """Effects, newest first, and how many there are by arm, path, verdict and reason."""
        where = EffectFilter(service_class=wanted.service_class, arm_id=wanted.arm_id)
        sender = EffectFilter(service_class=wanted.service_class, arm_id=wanted.arm_id, half=Half.SENDER)
        records = await self._store.effects.recent(wanted.limit, where)
        columns = (EffectColumn.ARM_ID, EffectColumn.PATH, EffectColumn.VERDICT, EffectColumn.REASON)
        counts = await self._store.effects.counts(columns, sender)
        return {
            "decisions": [_effect(record) for record in records],
            "counts": [
                {
                    **dict(zip((column.value for column in columns), count.values, strict=True)),
                    "transfers": count.effects,
                    "raw_bytes": count.raw_bytes,
                    "wire_bytes": count.wire_bytes,
                }
                for count in counts
            ],
        }

    async def explain(self, transfer_id: str) -> Json:
        """Why a transfer went as it did."""
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
        """What would be decided, by the plan in force."""
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

    async def posteriors(self) -> list[Json]:
        """What was learned of each arm and stage."""
        return self._planner.learning.to_document()

    async def pins(self) -> list[Json]:
        """Arms out of use, and why; without an end where only a person or a new profile ends it."""
        of_engines = [
            {**_pin_document(selector, "video", pin), "agent_id": agent_id}
            for (selector, agent_id), pin in self._video_pins()
        ]
        return [_pin_document(*found) for found in self._pins()] + of_engines

    async def release(self, arm_id: str, deployment: str | None) -> Json:
        released = [
            _released_document(selector, pin) for selector, pin in await self._planner.release(arm_id, deployment)
        ]
        if self._video is not None:
            released += [
                {**_released_document(selector, pin), "agent_id": agent_id}
                for (selector, agent_id), pin in await self._video.release(arm_id, deployment)
            ]
        if not released:
            raise NotFoundError(f"no arm {arm_id} is out of use", hint="GET /v1/pins lists those that are")
        return {"arm_id": arm_id, "released": released}

    async def policies(self) -> Json:
        """The set in force, and what is wrong with the files on disk if they were refused."""
        current = self._policies.current
        return {
            "generation": current.generation,
            "content_hash": current.content_hash,
            "policies": [asdict(policy) for policy in current.policies],
            "problems": [problem.to_json() for problem in self._policies.problems],
        }

    async def compare_policies(self, edit: PolicyEdit) -> Json:
        """Parse, decide, compare, and forget."""
        sources = [SourceFile(file, content) for file, content in edit.files]
        given = await asyncio.to_thread(parse_policies, sources)
        in_force = self._policies.current
        edited = edited_set(in_force, given, whole=edit.whole)
        changes = await policy_changes(self._planner, self._store, in_force, edited)
        return {
            "generation": in_force.generation,
            "text": changes_text(changes, in_force.generation),
            "policies": [change.to_document() for change in changes],
        }

    async def reload(self) -> tuple[bool, Json]:
        """Read the files now."""
        outcome = await self._life().reload("admin API")
        return outcome.accepted, outcome.to_json()

    async def start_study(self, specification: Json) -> Json:
        return await self._studies.begin(specification)

    async def studies(self) -> list[Json]:
        return await self._studies.list()

    async def study(self, study_id: str) -> Json:
        with _study_named():
            return await self._studies.get(study_id)

    async def cancel_study(self, study_id: str) -> Json:
        with _study_named():
            return await self._studies.cancel(study_id)

    async def pause_study(self, study_id: str) -> Json:
        with _study_named():
            return await self._studies.pause(study_id)

    async def resume_study(self, study_id: str) -> Json:
        with _study_named():
            return await self._studies.resume(study_id)

    async def compare_studies(self, study_ids: Sequence[str]) -> tuple[Json, ...]:
        with _study_named():
            return await self._studies.compare(study_ids)

    def study_events(self, study_id: str) -> AsyncIterator[Json]:
        with _study_named():
            return self._studies.events(study_id)


@contextmanager
def _study_named() -> Iterator[None]:
    try:
        yield
    except StudyNotFoundError as error:
        raise NotFoundError(error.message, hint=error.hint) from error


def _effect(record: EffectRecord) -> Json:
    return {"agent_id": record.agent_id, "received_unix_s": record.received_unix_s, **asdict(record.effect)}


def _rival_alarms(sessions: Sequence[AgentSession]) -> list[Json]:
    return [
        {"where": f"{session.identity.kind}/{session.identity.deployment}/{session.agent_id}", "what": session.rivalry}
        for session in sessions
        if session.rivals
    ]


def _pin_document(selector: Selector, tier: str, pin: Pin) -> Json:
    return {
        "kind": selector.kind,
        "deployment": selector.deployment,
        "tier": tier,
        "arm_id": pin.arm_id,
        "service_class": pin.service_class,
        "reason": pin.reason,
        "since_unix_s": pin.since_unix_s,
        "until_unix_s": pin.until_unix_s if math.isfinite(pin.until_unix_s) else None,
    }


def _released_document(selector: Selector, pin: Pin) -> Json:
    return {
        "kind": selector.kind,
        "deployment": selector.deployment,
        "service_class": pin.service_class,
        "reason": pin.reason,
    }


def _agent_summary(session: AgentSession) -> Json:
    identity = session.identity
    return {
        "agent_id": session.agent_id,
        "kind": identity.kind,
        "deployment": identity.deployment,
        "role": identity.role,
        "rank": identity.rank,
        "attached": session.attached,
        "attach_reason": session.not_attached_reason,
        "effective_version": session.effective_version,
        "degraded": session.degraded,
    }


def _agent_details(session: AgentSession) -> Json:
    identity, failed = session.identity, session.last_failed
    details: dict[str, Any] = {
        **_agent_summary(session),
        "connected": session.connected,
        "connected_since_unix_s": session.connected_since_unix_s,
        "peer": session.peer,
        "instance_id": identity.instance_id,
        "rivals": [asdict(rival) for rival in session.rivals],
        "model": identity.model_name,
        "model_fingerprint": identity.model_fingerprint,
        "kv_dtype": identity.kv_dtype,
        "kv_bytes_per_token": identity.kv_bytes_per_token,
        "hardware": identity.hardware,
        "tiers": list(identity.tiers),
        "desired_version": session.desired_version,
        "artefacts_held": sorted(session.artefacts_held),
        "acked_version": session.acked_version,
        "effective_is_known": session.effective_is_known,
        "last_failed": asdict(failed) if failed else None,
        "effects_acked_up_to": session.effects_acked_up_to,
        "telemetry_unix_s": session.telemetry_unix_s,
        "stream_counters": dict(session.counters),
    }
    if session.telemetry is not None:
        details["counters"] = dict(session.telemetry.counters)
        details["links"] = [asdict(link) for link in session.telemetry.links]
        details["lease_left_s"] = session.telemetry.lease_left_s
    return details
