"""Changes of studies and trials: stored first, then in the book, so that what is shown is what a crash leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from controld.contract.clock import Clock
from controld.profiling.study import Study, StudyState, Trial
from controld.profiling.study_book import StudyBook
from controld.profiling.study_view import study_summary
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)


class StudyLedger:
    """Writes through the book into the store. Whoever calls holds the book's lock, but for new studies.

    Args:
        book: what the process shows.
        store: what survives it.
        clock: for ages.
    """

    def __init__(self, book: StudyBook, store: Store, clock: Clock) -> None:
        self._book = book
        self._store = store
        self._clock = clock

    async def create(self, study: Study) -> None:
        """A new study with its trials, in one step: a grid without them would look like one that has ended.

        Raises:
            StoreError: nothing was kept.
        """
        trials = [trial.to_record() for trial in study.trials.values()]
        await self._store.studies.create(study.to_record(), trials)
        self._book.replace(study)

    async def move(self, study: Study, state: StudyState, ended: Sequence[Trial] = ()) -> None:
        """A study into another state, with the trials that end by that. Raises: StoreError: it stays as it was."""
        await self._store.studies.transition(
            study.study_id,
            expected=study.state.value,
            state=state.value,
            trials=[trial.end_record() for trial in ended],
        )
        self._book.replace(study.with_trials(ended).with_state(state))

    async def end_trial(self, study: Study, trial: Trial) -> None:
        """A trial's end. Raises: StoreError: it is still open."""
        await self._store.studies.transition_trial(study.study_id, trial.end_record())
        self._book.replace(study.with_trial(trial))

    async def audit(self, event: AuditEvent, study_id: str) -> None:
        """A line in the audit trail; one that cannot be written is logged."""
        summary = study_summary(self._book.find(study_id), self._clock.unix_s())
        try:
            await self._store.audit.append(event, json.dumps(summary))
        except StoreError as error:
            _log.error("not in the audit trail: %s: %s", event, error)
