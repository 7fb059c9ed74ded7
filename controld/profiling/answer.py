"""Whether a worker's result answers what was asked: what it gives is stored under the task's configuration."""

from __future__ import annotations

from collections.abc import Iterable

from controld.contract.errors import FieldError
from controld.contract.trial import TrialOutcome, TrialTask


def require_answer(task: TrialTask, outcome: TrialOutcome) -> None:
    """Accept the result of a trial that was measured.

    Raises:
        FieldError: it is about another kind of plane, about lengths, segments or variants that nobody asked for, or
            lacks a variant's costs.
    """
    is_video = bool(task.clip_chunks)
    foreign = (outcome.losses or outcome.coders) if is_video else (outcome.clips or outcome.engine)
    if foreign:
        raise FieldError("trial", f"was asked of {'clips' if is_video else 'prompts'} and answered of something else")
    if is_video:
        _require_places(task, ((clip.chunks, clip.segment) for clip in outcome.clips), "clips")
        variants = [measured.variant for measured in outcome.engine]
        if sorted(variants) != sorted(task.coders):
            raise FieldError("trial.engine", f"has the variants {variants}, not {list(task.coders)}")
        return
    _require_places(task, ((loss.prompt_tokens, loss.segment) for loss in outcome.losses), "losses")
    unknown = {coder.code for coder in outcome.coders} - set(task.coders)
    if unknown:
        raise FieldError("trial.coders", f"nobody asked for {sorted(unknown)}")


def _require_places(task: TrialTask, places: Iterable[tuple[int, int]], name: str) -> None:
    segments = range(task.first_segment, task.first_segment + task.segments_per_length)
    for length, segment in places:
        if length not in task.lengths or segment not in segments:
            raise FieldError(f"trial.{name}", f"nobody asked for segment {segment} of length {length}")
