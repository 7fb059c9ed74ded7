"""The calibrated artefacts that a process holds, by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dataplanes.kvcodec.head_profile import HeadProfile
from dataplanes.kvcodec.predictive.artefact import FILE_SUFFIX, PredictiveArtefact


class ArtefactShelf(Mapping[str, object]):
    """Artefacts by id. Adding is safe beside readers in other threads; nothing is ever changed or taken away."""

    def __init__(self) -> None:
        self._held: dict[str, PredictiveArtefact | HeadProfile] = {}

    @classmethod
    def of_folder(cls, folder: Path, model_fingerprint: str) -> ArtefactShelf:
        """The artefacts of one model in a folder; none where there is no such folder. Other models' are left out.

        Raises:
            ArtefactError: a file is damaged.
        """
        shelf = cls()
        for path in sorted(folder.glob(f"*{FILE_SUFFIX}")):
            artefact = PredictiveArtefact.load(path)
            if artefact.model_fingerprint == model_fingerprint:
                shelf.add(artefact)
        return shelf

    def add(self, artefact: PredictiveArtefact | HeadProfile) -> None:
        """Hold one more."""
        name = artefact.profile_id if isinstance(artefact, HeadProfile) else artefact.artefact_id
        self._held = {**self._held, name: artefact}

    def __getitem__(self, artefact_id: str) -> PredictiveArtefact | HeadProfile:
        return self._held[artefact_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
