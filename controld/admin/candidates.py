"""The candidates part of the admin API: profiles of both kinds listed, carried in and out, and deleted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

from controld.admin.backend import CandidateImport, CandidateListing, Json
from controld.admin.candidate_exchange import CandidateExchange
from controld.admin.candidate_list import kv_entries, video_entries
from controld.admin.problem import NotFoundError
from controld.candidates.stored import ProfileFilter, ProfileKind, UnreadableProfile, kind_of
from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.fleet.session import AgentSession
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, ProfileRecord

MAX_AUDITED_IDS = 100
"""A line of the audit trail names so many configurations."""

_log = logging.getLogger(__name__)


class Candidates:
    """Implements `CandidateBackend`.

    Args:
        store: where profiles live.
        sessions: the connected agents, whose space decides what a KVServe library is here.
        on_profiles: called once profiles were added or deleted, durably.
        clock: for dates.
    """

    def __init__(
        self,
        store: Store,
        sessions: Callable[[], Iterable[AgentSession]],
        on_profiles: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._store = store
        self._on_profiles = on_profiles
        self._exchange = CandidateExchange(store, sessions, on_profiles, clock)

    async def listing(self, wanted: ProfileFilter) -> CandidateListing:
        # The front is that of all that can be compared, not of what is shown.
        stored = await self._exchange.stored(replace(wanted, config_id=None))
        kv, video = await asyncio.gather(
            asyncio.to_thread(kv_entries, stored.kv), asyncio.to_thread(video_entries, stored.video)
        )
        return CandidateListing(
            kv=[entry for entry in kv if wanted.config_id in (None, entry["config_id"])],
            video=[entry for entry in video if wanted.config_id in (None, entry["config_id"])],
            problems=[
                {"where": row.where, "what": row.what}
                for row in stored.unreadable
                if wanted.config_id in (None, row.key.config_id)
            ],
        )

    async def count(self, wanted: ProfileFilter) -> int:
        """How many profiles there are that can be read."""
        stored = await self._exchange.stored(wanted)
        return len(stored.kv) + len(stored.video)

    async def unreadable(self) -> tuple[UnreadableProfile, ...]:
        """Rows of the store that are no profiles."""
        return (await self._exchange.stored(ProfileFilter())).unreadable

    async def export(self, kind: ProfileKind) -> Json:
        return await self._exchange.export(kind)

    async def take(self, text: str, wanted: CandidateImport) -> Json:
        return await self._exchange.take(text, wanted)

    async def delete(self, wanted: ProfileFilter, *, dry_run: bool) -> Json:
        if wanted == ProfileFilter():
            raise FieldError("query", "names no profiles", hint=f"at least one of {', '.join(asdict(wanted))}")
        chosen = [record for record in await self._store.profiles.list() if wanted.matches(record)]
        if not chosen:
            raise NotFoundError("no profile matches", hint="controld candidates lists those that are stored")
        models = {record.key.model_fingerprint for record in chosen}
        if wanted.model is not None and len(models) > 1:
            raise FieldError(
                "model", f"{len(models)} models begin like this", hint=f"one of {', '.join(sorted(models))}"
            )
        deleted = 0 if dry_run else await self._store.profiles.delete([record.key for record in chosen])
        if deleted:
            self._on_profiles()
            await self._audit(wanted, chosen)
        return {
            "dry_run": dry_run,
            "matched": len(chosen),
            "deleted": deleted,
            "profiles": [{"kind": kind_of(record), **asdict(record.key)} for record in chosen],
        }

    async def _audit(self, wanted: ProfileFilter, deleted: Sequence[ProfileRecord]) -> None:
        named = {name: value for name, value in asdict(wanted).items() if value is not None}
        ids = sorted({record.key.config_id for record in deleted})
        document = {"by": named, "deleted": len(deleted), "config_ids": ids[:MAX_AUDITED_IDS]}
        try:
            await self._store.audit.append(AuditEvent.CANDIDATES_DELETED, json.dumps(document, sort_keys=True))
        except StoreError as error:
            _log.error("deletion not kept in the audit trail: %s", error)
