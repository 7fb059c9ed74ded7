"""What can be wrong with a study."""

from __future__ import annotations

from controld.contract.errors import ControldError


class StudyNotFoundError(ControldError):
    """There is no such study."""

    def __init__(self, study_id: str) -> None:
        super().__init__(f"there is no study {study_id}", code="resource.not_found", hint="GET /v1/studies lists them")


class StudyRefusedError(ControldError):
    """The study cannot be started or changed now.

    Codes: `study.no_profiler`, `study.ambiguous_model`, `study.empty_space`, `study.ended`.
    """
