"""What durable state must be able to do. Every implementation passes `tests/store/test_conformance.py`.

A method that writes returns after the write is durable. Where state is replaced, the caller says what it expects to
replace, and `ConflictError` is raised, with nothing written, where it finds something else. Any method may raise
`StoreError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from controld.store.records import (
    AuditEvent,
    AuditRecord,
    Damage,
    EffectColumn,
    EffectCount,
    EffectFilter,
    EffectRecord,
    PolicyGeneration,
    PosteriorRecord,
    ProfileKey,
    ProfileRecord,
    StudyRecord,
    TrialChange,
    TrialRecord,
    VersionRecord,
)


class Profiles(Protocol):
    """Measured configurations."""

    async def upsert(self, records: Sequence[ProfileRecord]) -> None:
        """Add or replace, all or nothing."""
        ...

    async def add_newer(self, records: Sequence[ProfileRecord]) -> int:
        """Add those whose key is new and replace those that are older; all or nothing; returns how many."""
        ...

    async def list(
        self, *, model_fingerprint: str | None = None, workload: str | None = None
    ) -> tuple[ProfileRecord, ...]:
        """All that match, ordered by key."""
        ...

    async def delete(self, keys: Sequence[ProfileKey]) -> int:
        """Forget these; returns how many there were."""
        ...


class Posteriors(Protocol):
    """What was learned from effects."""

    async def get(self, key: str) -> PosteriorRecord | None:
        """The record under a key."""
        ...

    async def list(self, prefix: str = "") -> tuple[PosteriorRecord, ...]:
        """All whose key begins with `prefix`, ordered by key."""
        ...

    async def put(self, records: Sequence[PosteriorRecord]) -> None:
        """Replace a batch, all or nothing; each record's version is the one it replaces (0: none) and rises by one.

        Raises:
            ConflictError: some record's version is not the stored one.
        """
        ...

    async def delete(self, prefix: str) -> int:
        """Forget all whose key begins with `prefix`; returns how many."""
        ...


class Effects(Protocol):
    """What happened, once each."""

    async def append(
        self, agent_id: str, instance_id: str, records: Sequence[EffectRecord], *, up_to_seq: int
    ) -> tuple[EffectRecord, ...]:
        """Store those whose identity is new and note that everything up to `up_to_seq` was received.

        Returns:
            The records that were new, in order.
        """
        ...

    async def acked_up_to(self, agent_id: str, instance_id: str) -> int:
        """The highest `up_to_seq` noted; 0 for an instance never seen."""
        ...

    async def by_transfer(self, transfer_id: str) -> tuple[EffectRecord, ...]:
        """Both halves of a transfer, the sender's first, in order of arrival."""
        ...

    async def recent(self, limit: int, where: EffectFilter = ...) -> tuple[EffectRecord, ...]:
        """The newest first, at most `limit`."""
        ...

    async def after(self, position: int, limit: int) -> tuple[tuple[int, EffectRecord], ...]:
        """Effects in the order in which they became durable, each with its position; only those after `position`.

        Positions rise and are never used twice, so who remembers the last one reads on where it stopped.
        """
        ...

    async def counts(self, by: Sequence[EffectColumn], where: EffectFilter = ...) -> tuple[EffectCount, ...]:
        """Counts and bytes grouped by columns, largest count first."""
        ...

    async def count(self) -> int:
        """How many effects are kept."""
        ...


class Versions(Protocol):
    """What was published, with the reasons; a window of it."""

    async def last_number(self) -> int:
        """The last number published, 0 at first; never falls, not even after a restart or a restored backup."""
        ...

    async def append(self, record: VersionRecord) -> None:
        """Publish the next version; what falls out of the window is forgotten.

        Raises:
            ConflictError: `record.number` is not one above the last.
        """
        ...

    async def get(self, number: int) -> VersionRecord:
        """A version.

        Raises:
            GoneError: it is older than what is kept.
            NotFoundError: there never was one.
        """
        ...

    async def latest(self, kind: str, deployment: str) -> VersionRecord | None:
        """The last version for these data planes; the window never forgets it."""
        ...


class PolicyGenerations(Protocol):
    """Which policy set is in force."""

    async def current(self) -> PolicyGeneration:
        """Generation 0 with an empty hash where there was never one."""
        ...

    async def advance(self, content_hash: str, *, expected_generation: int) -> PolicyGeneration:
        """The next generation; the same content keeps its generation.

        Raises:
            ConflictError: the current generation is not the expected one.
        """
        ...


class Studies(Protocol):
    """Runs of the profiling engine and their trials."""

    async def create(self, study: StudyRecord, trials: Sequence[TrialRecord] = ()) -> None:
        """A study with the trials that it begins with, all or nothing.

        Raises:
            ConflictError: an id is taken.
            NotFoundError: a trial is of another study that there is not.
        """
        ...

    async def get(self, study_id: str) -> StudyRecord:
        """Raises: NotFoundError."""
        ...

    async def list(self) -> tuple[StudyRecord, ...]:
        """The newest first."""
        ...

    async def transition(self, study_id: str, *, expected: str, state: str, trials: Sequence[TrialChange] = ()) -> None:
        """A study's step to another state, and with it those of its trials, all or nothing.

        Raises:
            NotFoundError: there is no such study or trial.
            ConflictError: a state is not the expected one.
        """
        ...

    async def add_trials(self, trials: Sequence[TrialRecord]) -> None:
        """All or nothing. Raises: ConflictError: an id is taken; NotFoundError: no such study."""
        ...

    async def transition_trial(self, study_id: str, change: TrialChange) -> None:
        """Raises: NotFoundError; ConflictError: the state is not the expected one."""
        ...

    async def trials(self, study_id: str) -> tuple[TrialRecord, ...]:
        """In the order in which they were added."""
        ...


class Audit(Protocol):
    """Who did what, when."""

    async def append(self, event: AuditEvent, document: str) -> None:
        """One line; `document` is JSON."""
        ...

    async def recent(self, limit: int, event: AuditEvent | None = None) -> tuple[AuditRecord, ...]:
        """The newest first, at most `limit`."""
        ...


class Store(Protocol):
    """All aggregates of one daemon."""

    @property
    def profiles(self) -> Profiles: ...

    @property
    def posteriors(self) -> Posteriors: ...

    @property
    def effects(self) -> Effects: ...

    @property
    def versions(self) -> Versions: ...

    @property
    def policy_generations(self) -> PolicyGenerations: ...

    @property
    def studies(self) -> Studies: ...

    @property
    def audit(self) -> Audit: ...

    @property
    def damage(self) -> Damage | None:
        """What was found damaged when the store was opened: an alarm until the operator saw it."""
        ...

    async def close(self) -> None:
        """Finish what was begun; later calls raise `StoreError` with the code `store.closed`."""
        ...
