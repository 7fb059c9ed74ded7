"""What the admin API asks of the daemon, part by part. Every answer is plain JSON data.

Reads are snapshots; writes name what they did. What is not there raises `NotFoundError`, with `gone` where it was kept
once; a refused request raises another `ControldError`, with its stable code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from controld.candidates.stored import ProfileFilter, ProfileKind

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HypotheticalContext:
    """A decision that nobody asked for yet: bytes, bytes per second, and load as a fraction of the link."""

    service_class: str
    tier: str
    size_bytes: float
    bandwidth_bytes_per_s: float
    load: float
    deployment: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFilter:
    """Which effects to list, newest first."""

    limit: int = 50
    service_class: str | None = None
    arm_id: str | None = None


class ImportFormat(StrEnum):
    """What a document of candidates may be."""

    CONTROLD = "controld"
    KVSERVE = "kvserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateImport:
    """How a document of candidates is to be read.

    Args:
        model: fingerprint of the model that a KVServe library is for; None finds it by name.
        workload: whose profiles those of a KVServe library become; None takes its data set.
    """

    format: ImportFormat = ImportFormat.CONTROLD
    model: str | None = None
    workload: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEdit:
    """Policies that are not in force.

    Args:
        files: name to show and content of each.
        whole: whether they are all there would be; else each replaces the one of its name or of its planes.
    """

    files: tuple[tuple[str, bytes], ...]
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateListing:
    """Profiles of each kind, and rows of the store that are none: where, and what is wrong."""

    kv: Sequence[Json]
    video: Sequence[Json]
    problems: Sequence[Json]


class StatusBackend(Protocol):
    """The daemon as a whole."""

    def ready(self) -> tuple[bool, str]:
        """Whether the daemon serves, and why not."""
        ...

    async def page(self) -> Json:
        """One page about everything."""
        ...


class AgentBackend(Protocol):
    """Data planes."""

    async def dataplanes(self) -> list[Json]:
        """Every agent that is connected, and those that left lately."""
        ...

    async def spaces(self) -> list[Json]:
        """What connected agents advertise."""
        ...


class EngineBackend(Protocol):
    """Video engines."""

    async def listing(self) -> list[Json]:
        """Every engine that is connected, or was decided for, with its setting."""
        ...

    async def explain(self, agent_id: str) -> Json:
        """Why an engine runs under its setting: every other one, and what stopped it."""
        ...


class CandidateBackend(Protocol):
    """Profiles."""

    async def listing(self, wanted: ProfileFilter) -> CandidateListing:
        """Profiles, each with its mark on the Pareto front of all that are stored of its model, workload and place."""
        ...

    async def export(self, kind: ProfileKind) -> Json:
        """Every profile of a kind as a document that `take` takes."""
        ...

    async def take(self, text: str, wanted: CandidateImport) -> Json:
        """Store the profiles of a document, all or nothing."""
        ...

    async def delete(self, wanted: ProfileFilter, *, dry_run: bool) -> Json:
        """Forget the profiles that a filter matches, those that cannot be read among them.

        Args:
            dry_run: only say which they are.

        Raises:
            FieldError: the filter names nothing, or a beginning that several models share.
            NotFoundError: nothing matches.
        """
        ...


class DecisionBackend(Protocol):
    """Transfers, and what was or would be decided of them."""

    async def listing(self, wanted: DecisionFilter) -> Json:
        """Effects, newest first, and how many there are by arm, path, verdict and reason."""
        ...

    async def explain(self, transfer_id: str) -> Json:
        """Why a transfer went as it did."""
        ...

    async def explain_hypothetical(self, context: HypotheticalContext) -> Json:
        """What would be decided, by the plan in force."""
        ...


class LearnedBackend(Protocol):
    """What was learned of arms."""

    async def posteriors(self) -> list[Json]:
        """Of each arm and stage."""
        ...

    async def pins(self) -> list[Json]:
        """Arms out of use, and why; without an end where only a person or a new profile ends it."""
        ...

    async def release(self, arm_id: str, deployment: str | None) -> Json:
        """A person's word that an arm may be used again; the pins that there were."""
        ...


class PolicyBackend(Protocol):
    """Policies."""

    async def in_force(self) -> Json:
        """The set in force, and what is wrong with the files on disk if they were refused."""
        ...

    async def compare(self, edit: PolicyEdit) -> Json:
        """What the edit would change; nothing is applied."""
        ...

    async def reload(self) -> tuple[bool, Json]:
        """Reload now; whether the files were accepted, and the outcome."""
        ...


class StudyBackend(Protocol):
    """Profiling studies; `StudyNotFoundError` is raised for an unknown id."""

    async def begin(self, body: Json) -> Json: ...

    async def list(self) -> list[Json]: ...

    async def get(self, study_id: str) -> Json: ...

    async def cancel(self, study_id: str) -> Json: ...

    async def pause(self, study_id: str) -> Json: ...

    async def resume(self, study_id: str) -> Json: ...

    async def compare(self, study_ids: Sequence[str]) -> tuple[Json, ...]: ...

    def events(self, study_id: str) -> AsyncIterator[Json]:
        """Every change of a study, the present state first; ends with the study."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminBackend:
    """All parts."""

    status: StatusBackend
    agents: AgentBackend
    engines: EngineBackend
    candidates: CandidateBackend
    decisions: DecisionBackend
    learned: LearnedBackend
    policies: PolicyBackend
    studies: StudyBackend
