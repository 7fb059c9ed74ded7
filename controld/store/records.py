"""Rows as values: key columns, and a JSON document whose meaning belongs to the package that writes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controld.contract.effect import Effect, Half, Path, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a measured configuration is valid for: quality by model and workload, times by both sides' hardware."""

    model_fingerprint: str
    workload: str
    config_id: str
    sender_hardware: str
    receiver_hardware: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """A profile.

    Args:
        document: JSON, written and read by `controld.candidates`.
    """

    key: ProfileKey
    document: str
    updated_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorRecord:
    """What the bandit learned under a key.

    Args:
        version: counts writes from 1; 0 in a write means: there must be none yet.
        document: JSON, written and read by `controld.controller`.
    """

    key: str
    version: int
    document: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRecord:
    """An effect with its identity (agent_id, instance_id, seq)."""

    agent_id: str
    instance_id: str
    seq: int
    effect: Effect
    received_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectFilter:
    """Which effects; `None` matches all, what is given must all match."""

    agent_id: str | None = None
    half: Half | None = None
    service_class: str | None = None
    tier: str | None = None
    link_group: str | None = None
    arm_id: str | None = None
    path: Path | None = None
    verdict: Verdict | None = None
    reason: str | None = None
    table_version: int | None = None
    received_since_unix_s: float | None = None


class EffectColumn(StrEnum):
    """What effects can be counted by."""

    AGENT_ID = "agent_id"
    HALF = "half"
    SERVICE_CLASS = "service_class"
    TIER = "tier"
    LINK_GROUP = "link_group"
    ARM_ID = "arm_id"
    PATH = "path"
    VERDICT = "verdict"
    REASON = "reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectCount:
    """How many effects share these values, and their bytes."""

    values: tuple[str, ...]
    effects: int
    raw_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A published version.

    Args:
        number: one above the last one; counts for all selectors together.
        kind, deployment: which data planes it is for.
        tables_json: the resources as published.
        explanations_json: why, for each cell of each table.
    """

    number: int
    kind: str
    deployment: str
    policy_generation: int
    created_unix_s: float
    tables_json: str
    explanations_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGeneration:
    """Which policy set is in force. Generation 0: none was ever applied."""

    generation: int
    content_hash: str
    applied_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One run of the profiling engine.

    Args:
        state: owned by the profiling engine; the store only compares and swaps it.
        spec: JSON.
    """

    study_id: str
    kind: str
    state: str
    spec: str
    created_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One quality measurement of a lossy part.

    Args:
        spec, result: JSON; the result is empty until there is one.
    """

    study_id: str
    trial_id: str
    state: str
    spec: str
    result: str
    updated_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """A trial's step from one state to another.

    Args:
        result: JSON; empty where there is none.
    """

    trial_id: str
    expected: str
    state: str
    result: str = ""


class AuditEvent(StrEnum):
    """What the audit trail records."""

    DAEMON_STARTED = "daemon_started"
    DAEMON_STOPPED = "daemon_stopped"
    STORE_DAMAGED = "store_damaged"
    POLICY_APPLIED = "policy_applied"
    VERSION_PUBLISHED = "version_published"
    SNAPSHOT_REFUSED = "snapshot_refused"
    AGENT_CONNECTED = "agent_connected"
    AGENT_LOST = "agent_lost"
    AGENT_FENCED = "agent_fenced"
    AGENT_REJECTED = "agent_rejected"
    ARM_PINNED_OFF = "arm_pinned_off"
    ARM_RELEASED = "arm_released"
    STUDY_STARTED = "study_started"
    STUDY_ENDED = "study_ended"
    CANDIDATES_IMPORTED = "candidates_imported"
    CANDIDATES_DELETED = "candidates_deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One line of the audit trail; `document` is JSON."""

    sequence: int
    event: AuditEvent
    document: str
    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A state file that could not be used when the store was opened.

    Args:
        problem: what was found.
        set_aside: where the damaged file lies now.
        restored_from: the backup that the store started from; empty where it started empty.
    """

    problem: str
    set_aside: str
    restored_from: str
