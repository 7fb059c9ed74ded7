"""What a search study adds: how many trials to choose now, and which.

One trial is measured and one waits at each connected worker, so that no worker waits for the search; the search is told
what is under way and proposes something else. Where the search process gives no answer, parts are drawn at random:
a study that goes on badly is better than workers that stand still, and its detail says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from controld.contract.configuration import Configuration
from controld.contract.space import StrategySpace
from controld.profiling.errors import StudyRefusedError
from controld.profiling.grid import coders_of
from controld.profiling.progress import StudyProgress, stop_reason
from controld.profiling.request import StudyRequest
from controld.profiling.search.encoding import SpaceEncoding
from controld.profiling.search.observation import Proposal
from controld.profiling.search_process import Search, SearchProcessError, SearchRequest
from controld.profiling.study import Study, StudyState, Trial, TrialSource, TrialState

_log = logging.getLogger(__name__)

AHEAD = 2
"""Open trials for each worker: the one that it measures and the one after it."""

_RANDOM_DRAWS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """New trials of a study.

    Args:
        trials: empty where nothing is left to measure.
        detail: what went otherwise than usual.
    """

    trials: tuple[Trial, ...]
    detail: str = ""


def searched_space(request: StudyRequest, space_json: str) -> StrategySpace:
    """What a search will search.

    Raises:
        FieldError: a restriction names what the space does not have.
        StudyRefusedError: nothing is left of it.
    """
    space = StrategySpace.from_json(space_json)
    if request.restrict:
        space = space.restrict(request.restrict)
    if next(iter(space.enumerate(lossy_only=True)), None) is None:
        raise StudyRefusedError("the space has nothing to measure", code="study.empty_space", hint="restrict it less")
    return space


def trials_wanted(study: Study, progress: StudyProgress, workers: int) -> int:
    """How many trials to choose now.

    Args:
        workers: connected ones that can measure for this study.
    """
    if not study.is_search or study.state is not StudyState.RUNNING or stop_reason(study, progress) is not None:
        return 0
    wanted = AHEAD * workers - len(study.open_trials)
    budget = study.request.budget
    if budget is not None and budget.trials is not None:
        wanted = min(wanted, budget.trials - len(study.trials))
    return max(wanted, 0)


class TrialChooser:
    """Chooses trials of search studies; one event loop.

    Args:
        search: the search process.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._spaces: dict[str, StrategySpace] = {}

    async def choose(self, study: Study, progress: StudyProgress, count: int) -> Batch:
        """At most `count` new trials, numbered after those that there are. Never raises for what the search does."""
        pending = tuple(dict.fromkeys(trial.task.lossy for trial in study.open_trials))
        request = SearchRequest(
            study_id=study.study_id,
            space_json=study.space_json,
            seed=study.request.seed,
            count=count,
            segments=study.request.segments,
            max_segments=study.request.max_segments,
            observations=progress.observations,
            pending=pending,
            loss_floor=progress.box.loss_floor,
        )
        space = self._space(study)
        try:
            answer = await self._search.propose(request)
        except SearchProcessError as error:
            return await self._at_random(study, space, count, str(error))
        proposals = answer.proposals[:count]
        trials = _trials(study, space, proposals, answer.seconds)
        if proposals and not trials:
            return await self._at_random(study, space, count, "the search proposed only what the space does not have")
        return Batch(trials=trials, detail=answer.detail)

    async def _at_random(self, study: Study, space: StrategySpace, count: int, reason: str) -> Batch:
        _log.warning("study %s draws at random: %s", study.study_id, reason)
        parts = await asyncio.to_thread(random_parts, space, study, count)
        drawn = [Proposal(lossy=part, segments=study.request.segments, source="random") for part in parts]
        return Batch(trials=_trials(study, space, drawn, 0.0), detail=f"drawn at random: {reason}")

    async def stop(self) -> None:
        """End the search process."""
        await self._search.stop()

    def _space(self, study: Study) -> StrategySpace:
        if study.study_id not in self._spaces:
            self._spaces[study.study_id] = StrategySpace.from_json(study.space_json)
        return self._spaces[study.study_id]


def random_parts(space: StrategySpace, study: Study, count: int) -> list[Configuration]:
    """Parts without a trial, by chance; of a small or nearly used up space what is left, in its order."""
    encoding = SpaceEncoding(space)
    generator = np.random.default_rng((study.request.seed, len(study.trials)))
    taken = {trial.task.lossy for trial in study.trials.values()}
    chosen: list[Configuration] = []
    for _ in range(_RANDOM_DRAWS):
        if len(chosen) == count:
            return chosen
        part = encoding.draw(generator.random(len(encoding.parameters)).tolist())
        if part is not None and part not in taken:
            taken.add(part)
            chosen.append(part)
    for part in space.enumerate(lossy_only=True):
        if len(chosen) == count:
            break
        if part not in taken and coders_of(space, part):
            taken.add(part)
            chosen.append(part)
    return chosen


def search_detail(study: Study) -> str:
    """What a reader should know of how the trials were chosen."""
    sources = Counter(trial.source for trial in study.trials.values())
    parts = []
    if sources[TrialSource.RANDOM]:
        parts.append(f"{sources[TrialSource.RANDOM]} of {len(study.trials)} trials were drawn at random")
    if study.search_note:
        parts.append(study.search_note)
    return "; ".join(parts)


def _trials(study: Study, space: StrategySpace, proposals: Sequence[Proposal], seconds: float) -> tuple[Trial, ...]:
    found: list[Trial] = []
    for proposal in proposals:
        coders = coders_of(space, proposal.lossy)
        if not coders:
            continue
        first, segments = _missing_segments(study, proposal)
        task = study.task(
            f"{len(study.trials) + len(found):04d}",
            proposal.lossy,
            coders,
            segments=segments,
            first_segment=first,
        )
        source = TrialSource(proposal.source) if proposal.source in list(TrialSource) else TrialSource.MODEL
        found.append(Trial(task=task, source=source, search_s=seconds / len(proposals)))
    return tuple(found)


def _missing_segments(study: Study, proposal: Proposal) -> tuple[int, int]:
    """The first segment and how many: a proposal says up to how many a part is worth measuring."""
    done = _segments_up_to(trial for trial in study.trials.values() if trial.task.lossy == proposal.lossy)
    missing = proposal.segments - done
    return done, missing if missing > 0 else proposal.segments


def _segments_up_to(trials: Iterable[Trial]) -> int:
    counted = (t for t in trials if t.state is TrialState.MEASURED or not t.state.is_final)
    return max((t.task.first_segment + t.task.segments_per_length for t in counted), default=0)
