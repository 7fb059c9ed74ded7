"""Candidates out of the store as documents, and documents into it: our own formats, and KVServe's profile libraries."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from controld.admin.backend import CandidateImport, ImportFormat, Json
from controld.admin.problem import UnavailableError
from controld.candidates.exchange import export_document, read_document
from controld.candidates.kvserve_library import LibraryTarget, library_model, map_library
from controld.candidates.profile import Profile
from controld.candidates.stored import (
    ProfileFilter,
    ProfileKind,
    StoredProfileReader,
    StoredVideoReader,
    UnreadableProfile,
)
from controld.candidates.video_exchange import (
    export_video_document,
    is_video_export,
    read_video_profiles,
    video_records,
)
from controld.candidates.video_profile import VideoProfile
from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.fleet.identity import AgentIdentity
from controld.fleet.session import AgentSession
from controld.profiling.results import profile_record
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, ProfileRecord

CLOCK_SLACK_S = 86_400.0
"""How much later than now an imported profile may say that it was measured: clocks and time zones differ."""

_log = logging.getLogger(__name__)

Sessions = Callable[[], Iterable[AgentSession]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCandidates:
    """What the rows of the store are."""

    kv: tuple[Profile, ...]
    video: tuple[VideoProfile, ...]
    unreadable: tuple[UnreadableProfile, ...]


class CandidateExchange:
    """Moves profiles between the store and documents. Reading and writing JSON happens off the event loop.

    Args:
        store: where profiles live.
        sessions: the connected agents, whose space decides what a KVServe library is here.
        on_profiles: called once new profiles are durable.
        clock: for dates.
    """

    def __init__(self, store: Store, sessions: Sessions, on_profiles: Callable[[], None], clock: Clock) -> None:
        self._store = store
        self._sessions = sessions
        self._on_profiles = on_profiles
        self._clock = clock
        self._kv_reader = StoredProfileReader()
        self._video_reader = StoredVideoReader()

    async def stored(self, wanted: ProfileFilter) -> StoredCandidates:
        """What the store holds: profiles of both kinds, and the rows that are none."""
        records = await self._store.profiles.list()
        kv = await asyncio.to_thread(self._kv_reader.read, records, wanted)
        video = await asyncio.to_thread(self._video_reader.read, records, wanted)
        return StoredCandidates(kv=kv.profiles, video=video.profiles, unreadable=(*kv.unreadable, *video.unreadable))

    async def export(self, kind: ProfileKind) -> Json:
        """Every profile of a kind that can be read; rows that cannot are logged."""
        stored = await self.stored(ProfileFilter(kind=kind))
        for row in stored.unreadable:
            _log.error("not exported: %s: %s", row.where, row.what)
        if kind is ProfileKind.VIDEO:
            return await asyncio.to_thread(export_video_document, stored.video)
        now_unix_s = self._clock.unix_s()
        return await asyncio.to_thread(export_document, stored.kv, exported_unix_s=now_unix_s)

    async def take(self, text: str, wanted: CandidateImport) -> Json:
        """Store what a document holds, all or nothing; of the same measurement the newer one stays.

        A stored row that cannot be read stays in nobody's way: it is replaced, whatever its date.

        Returns:
            `profiles` in the document, how many were `stored` and how many were `kept` as they are here because ours
            are no older, and `unmapped`: what of a KVServe library has no counterpart, by profile id with the reason.

        Raises:
            FieldError: the document is refused; the field is named by its path.
            UnavailableError: no plane of the library's model is connected.
        """
        unmapped: list[Json] = []
        latest_unix_s = self._clock.unix_s() + CLOCK_SLACK_S
        if wanted.format is ImportFormat.CONTROLD and await asyncio.to_thread(is_video_export, text):
            videos = await asyncio.to_thread(read_video_profiles, text, latest_unix_s=latest_unix_s)
            return await self._done(wanted, len(videos), await self._add(video_records(videos)), [])
        if wanted.format is ImportFormat.KVSERVE:
            target = await self._target(text, wanted)
            mapped = await asyncio.to_thread(map_library, text, target)
            profiles: Sequence[Profile] = mapped.profiles
            unmapped = [{"profile_id": one.profile_id, "reason": one.reason} for one in mapped.unmapped]
        else:
            profiles = await asyncio.to_thread(read_document, text, latest_unix_s=latest_unix_s)
        stored = await self._add(await asyncio.to_thread(_records, profiles))
        return await self._done(wanted, len(profiles), stored, unmapped)

    async def _done(self, wanted: CandidateImport, given: int, stored: int, unmapped: list[Json]) -> Json:
        if stored:
            self._on_profiles()
        outcome: Json = {"profiles": given, "stored": stored, "kept": given - stored}
        await self._audit({"format": wanted.format.value, **outcome})
        return {**outcome, "unmapped": unmapped}

    async def _add(self, records: Sequence[ProfileRecord]) -> int:
        given = {record.key for record in records}
        broken = [row.key for row in (await self.stored(ProfileFilter())).unreadable if row.key in given]
        if broken:
            # A crash before the next line loses only what nobody could read.
            await self._store.profiles.delete(broken)
        return await self._store.profiles.add_newer(records)

    async def _target(self, text: str, wanted: CandidateImport) -> LibraryTarget:
        name = await asyncio.to_thread(library_model, text)
        identity = _identity_for(self._sessions(), name, wanted.model)
        return LibraryTarget(
            model_fingerprint=identity.model_fingerprint,
            space=StrategySpace.from_json(identity.space_json),
            kv_bytes_per_token=identity.kv_bytes_per_token,
            workload=wanted.workload,
        )

    async def _audit(self, details: Json) -> None:
        try:
            await self._store.audit.append(AuditEvent.CANDIDATES_IMPORTED, json.dumps(details, sort_keys=True))
        except StoreError as error:
            _log.error("import not kept in the audit trail: %s", error)


def _records(profiles: Sequence[Profile]) -> list[ProfileRecord]:
    return [profile_record(profile) for profile in profiles]


def _identity_for(sessions: Iterable[AgentSession], name: str, fingerprint: str | None) -> AgentIdentity:
    """The agent whose space counts: of the given model, or of the one model of that name; one with head profiles first.

    Raises:
        UnavailableError: nobody serves or profiles that model now.
        FieldError: several models have that name, or the agent does not say how large a token is.
    """
    fitting = [
        session.identity
        for session in sessions
        if session.connected
        and session.identity.space_json
        and (session.identity.model_fingerprint == fingerprint if fingerprint else session.identity.model_name == name)
    ]
    if not fitting:
        raise UnavailableError(
            f"no connected agent has the model {fingerprint or name}, and its space decides what a library is here",
            hint="start a plane or a profiling worker; --model FINGERPRINT names a model that is called otherwise here",
        )
    found = sorted({identity.model_fingerprint for identity in fitting})
    if len(found) > 1:
        raise FieldError("model", f"{len(found)} models are called {name}", hint=f"one of {', '.join(found)}")
    identity = max(fitting, key=lambda one: ('"head_profile"' in one.space_json, one.agent_id))
    if identity.kv_bytes_per_token < 1:
        raise FieldError("kv_bytes_per_token", f"the agent {identity.agent_id} does not say it")
    return identity
