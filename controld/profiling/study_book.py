"""The studies that a process holds, how far each is, and who waits for changes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from controld.profiling.errors import StudyNotFoundError
from controld.profiling.progress import StudyProgress, progress_of
from controld.profiling.study import Study

_FOLLOWED_INLINE = 16


class StudyBook:
    """Studies by their ids; one event loop.

    Attributes:
        lock: held from the look at a study to its replacement by whoever waits for the store between.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._studies: dict[str, Study] = {}
        self._progress: dict[str, StudyProgress] = {}
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set once, at the next change of any study."""
        return self._changed

    def all(self) -> Collection[Study]:
        """Those that there are now."""
        return tuple(self._studies.values())

    def get(self, study_id: str) -> Study | None:
        """As it is now; None where there is none."""
        return self._studies.get(study_id)

    def find(self, study_id: str) -> Study:
        """As it is now. Raises: StudyNotFoundError."""
        study = self._studies.get(study_id)
        if study is None:
            raise StudyNotFoundError(study_id)
        return study

    def replace(self, study: Study) -> None:
        """Take a new study, or a new state of one, and tell who waits."""
        self._studies[study.study_id] = study
        # Each event serves one change: who waits holds the old one.
        self._changed.set()
        self._changed = asyncio.Event()

    async def progress(self, study: Study) -> StudyProgress:
        """With all ended trials of the study; a long history is read beside the event loop."""
        progress = self._progress.setdefault(study.study_id, progress_of(study))
        if progress.unseen(study) > _FOLLOWED_INLINE:
            fresh = progress_of(study)
            await asyncio.to_thread(fresh.follow, study)
            progress = self._progress[study.study_id] = fresh
            study = self._studies.get(study.study_id, study)
        progress.follow(study)
        return progress
