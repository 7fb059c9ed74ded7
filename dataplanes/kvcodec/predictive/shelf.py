"""The artefacts that a process holds, by id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.predictive.artefact import FILE_SUFFIX, PredictiveArtefact


class ArtefactShelf:
    """Artefacts of any number of models. Adding is safe beside readers in other threads; nothing is ever changed."""

    def __init__(self) -> None:
        self._held: dict[str, PredictiveArtefact] = {}

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

    def add(self, artefact: PredictiveArtefact) -> None:
        """Hold one more."""
        self._held[artefact.artefact_id] = artefact

    def find(self, artefact_id: str) -> PredictiveArtefact:
        """The artefact of that id.

        Raises:
            CodecError: it is not here.
        """
        try:
            return self._held[artefact_id]
        except KeyError:
            raise CodecError(
                f"the artefact {artefact_id} is not here",
                code="codec.artefact_unknown",
                hint="calibrate the model, or copy the artefact to this machine",
            ) from None

    def __iter__(self) -> Iterator[PredictiveArtefact]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)


NO_ARTEFACTS: Final = ArtefactShelf()
"""Where nothing is calibrated; not to be added to."""
