"""What the admin API asks of the daemon. Every answer is plain JSON data."""

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


class CandidateBackend(Protocol):
    """The candidates part of `AdminBackend`."""

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


class AdminBackend(Protocol):
    """Reads are snapshots; writes name what they did.

    Raises:
        NotFoundError: for an unknown id, with `gone` where it was kept once.
        ControldError: for a refused request, with its stable code.
    """

    @property
    def candidates(self) -> CandidateBackend:
        """What answers about profiles."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether the daemon serves, and why not."""
        ...

    async def status(self) -> Json: ...

    async def dataplanes(self) -> list[Json]: ...

    async def spaces(self) -> list[Json]: ...

    async def decisions(self, wanted: DecisionFilter) -> Json: ...

    async def explain(self, transfer_id: str) -> Json: ...

    async def explain_hypothetical(self, context: HypotheticalContext) -> Json: ...

    async def engines(self) -> list[Json]:
        """Video engines with their settings."""
        ...

    async def explain_engine(self, agent_id: str) -> Json:
        """Why a video engine runs under its setting."""
        ...

    async def posteriors(self) -> list[Json]: ...

    async def pins(self) -> list[Json]: ...

    async def release(self, arm_id: str, deployment: str | None) -> Json:
        """A person's word that an arm may be used again; the pins that there were."""
        ...

    async def policies(self) -> Json: ...

    async def compare_policies(self, edit: PolicyEdit) -> Json:
        """What the edit would change; nothing is applied."""
        ...

    async def reload(self) -> tuple[bool, Json]:
        """Reload now; whether the files were accepted, and the outcome."""
        ...

    async def start_study(self, specification: Json) -> Json: ...

    async def studies(self) -> list[Json]: ...

    async def study(self, study_id: str) -> Json: ...

    async def cancel_study(self, study_id: str) -> Json: ...

    async def pause_study(self, study_id: str) -> Json: ...

    async def resume_study(self, study_id: str) -> Json: ...

    async def compare_studies(self, study_ids: Sequence[str]) -> tuple[Json, ...]: ...

    def study_events(self, study_id: str) -> AsyncIterator[Json]:
        """Every change of a study, the present state first; ends with the study."""
        ...
