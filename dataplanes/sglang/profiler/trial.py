"""One trial: a lossy part's quality on every segment, and the bytes and seconds of each of its coders.

A trial ends as `INFEASIBLE` where this model, corpus or codec cannot do what was asked: that is knowledge and is kept.
It ends as `FAILED` where something went wrong: that is no knowledge, and the daemon may ask again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from controld.contract.space import StrategySpace
from controld.contract.trial import CoderMeasurement, SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from dataplanes.agent.profiling_worker import TrialCancelledError
from dataplanes.kvcodec.errors import CodecError
from dataplanes.sglang.profiler.coder_cost import CoderCost, WireCodec, measure_coder
from dataplanes.sglang.profiler.corpus import CorpusError
from dataplanes.sglang.profiler.frame_error import frame_error
from dataplanes.sglang.profiler.quality import Planes, Prompt, PromptBank

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

BankFor = Callable[[str, int], PromptBank]
"""The prompts of a workload for a number of continuation tokens; raises CorpusError where there are none."""

CodecFor = Callable[[Configuration], WireCodec]
"""A full configuration at work; raises CodecError where this model cannot use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPlan:
    """How often codecs are timed.

    Args:
        codec_threads: threads while a codec runs: as many as a serving process gives it.
        evaluation_threads: threads while the model runs.
        segments_per_timing: one in so many segments of each length runs every coder (at least one does); the others
            run the first coder only.
        repeats: timed round trips on the first segment of each length, at most; one on the others.
    """

    codec_threads: int
    evaluation_threads: int
    segments_per_timing: int = 4
    repeats: int = 3


class TrialFailedError(ControldError):
    """The trial cannot be finished; nothing about the configuration follows from it."""


class TrialRunner:
    """Measures trials one after another; nothing that a trial does ends the process.

    Args:
        space: what this plane advertises; a trial outside of it is infeasible.
        bank_for, codec_for: see their types.
        timing: see its type.
    """

    def __init__(self, space: StrategySpace, bank_for: BankFor, codec_for: CodecFor, timing: TimingPlan) -> None:
        self._space = space
        self._bank_for = bank_for
        self._codec_for = codec_for
        self._timing = timing

    def run(
        self,
        task: TrialTask,
        progress: Callable[[TrialOutcome], None] = lambda outcome: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> TrialOutcome:
        """Measure a trial. Progress carries the losses measured so far."""
        run = _Run(self._space, self._bank_for, self._codec_for, self._timing, task, progress, cancelled)
        try:
            run.measure()
        except TrialCancelledError as error:
            return run.outcome(TrialStatus.CANCELLED, str(error))
        except (CorpusError, CodecError, FieldError) as error:
            return run.outcome(TrialStatus.INFEASIBLE, f"{error.code}: {error}")
        except ControldError as error:
            _log.warning("trial %s failed: %s", task.trial_id, error)
            return run.outcome(TrialStatus.FAILED, f"{error.code}: {error}")
        except Exception as error:  # noqa: BLE001 - the edge of a trial: whatever a codec does, the worker lives on
            _log.exception("trial %s failed", task.trial_id)
            return run.outcome(TrialStatus.FAILED, f"{type(error).__name__}: {error}")
        return run.outcome(TrialStatus.MEASURED)


class _Run:
    """The state of one trial while it is measured."""

    def __init__(
        self,
        space: StrategySpace,
        bank_for: BankFor,
        codec_for: CodecFor,
        timing: TimingPlan,
        task: TrialTask,
        progress: Callable[[TrialOutcome], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._space = space
        self._bank_for = bank_for
        self._codec_for = codec_for
        self._timing = timing
        self._task = task
        self._progress = progress
        self._cancelled = cancelled
        self._started_s = time.monotonic()
        self._losses: list[SegmentLoss] = []
        self._coders: list[CoderMeasurement] = []
        self._corpus = ""

    def outcome(self, status: TrialStatus, detail: str = "") -> TrialOutcome:
        """What there is so far, under this status."""
        return TrialOutcome(
            study_id=self._task.study_id,
            trial_id=self._task.trial_id,
            status=status,
            detail=detail,
            losses=tuple(self._losses),
            coders=tuple(self._coders),
            seconds=time.monotonic() - self._started_s,
            corpus=self._corpus,
        )

    def measure(self) -> None:
        """Fill in the losses and costs, segment by segment, short prompts first."""
        task = self._task
        configurations = [task.lossy.with_coder(code) for code in task.coders]
        for configuration in configurations:
            self._space.validate(configuration)
        codecs = {str(c["code"]): self._codec_for(c) for c in configurations}
        bank = self._bank_for(task.workload, task.continuation_tokens)
        self._corpus = bank.corpus_label
        for prompt_tokens in sorted(task.prompt_tokens):
            last = task.first_segment + task.segments_per_length
            bank.require_segments(prompt_tokens, last)
            for position, segment in enumerate(range(task.first_segment, last)):
                self._check()
                with _threads(self._timing.evaluation_threads):
                    bank.prefill(max(task.prompt_tokens), segment)
                    self._check()
                    prompt = bank.prompt(prompt_tokens, segment)
                self._check()
                received = self._run_codecs(prompt, prompt_tokens, segment, codecs, position)
                self._check()
                with _threads(self._timing.evaluation_threads):
                    loss = bank.meter.measure_planes(prompt, received)
                self._losses.append(
                    SegmentLoss(
                        prompt_tokens=prompt_tokens,
                        segment=segment,
                        loss_nats=loss.loss_nats,
                        top1_agreement=loss.top1_agreement,
                        answer_nats=loss.answer_nats,
                        reconstruction_error=frame_error(prompt.planes, received, segment),
                    )
                )
                self._progress(self.outcome(TrialStatus.PROGRESS))

    def _run_codecs(
        self, prompt: Prompt, prompt_tokens: int, segment: int, codecs: dict[str, WireCodec], position: int
    ) -> Planes:
        """Run the coders that this segment gets; the planes that arrive, the same through every coder."""
        received: Planes | None = None
        timed = max(1, self._task.segments_per_length // self._timing.segments_per_timing)
        wanted: Iterable[str] = codecs if position < timed else list(codecs)[:1]
        for code in wanted:
            self._check()
            with _threads(self._timing.codec_threads):
                cost = measure_coder(
                    codecs[code],
                    prompt.planes,
                    # Buffers are touched when they are made; code and caches need one round trip on a short prompt.
                    warm_up=1 if position == 0 and prompt_tokens == min(self._task.prompt_tokens) else 0,
                    repeats=self._timing.repeats if position == 0 else 1,
                    # Other work on the machine hardly touches a thread's own processor time; several threads have none.
                    timer=time.thread_time if self._timing.codec_threads == 1 else time.perf_counter,
                )
            self._coders.append(_coder_measurement(code, prompt, prompt_tokens, segment, cost))
            if received is None:
                received = cost.received
            elif not all(torch.equal(a, b) for a, b in zip(received, cost.received, strict=True)):
                raise TrialFailedError(
                    f"the coder {code} decodes to other values than {self._task.coders[0]}", code="trial.coder_differs"
                )
        assert received is not None  # a task has at least one coder
        return received

    def _check(self) -> None:
        if self._cancelled():
            raise TrialCancelledError
        deadline_s = self._task.deadline_s
        if deadline_s and time.monotonic() - self._started_s > deadline_s:
            raise TrialFailedError(f"not done after {deadline_s:g} s", code="trial.deadline")


def _coder_measurement(
    code: str, prompt: Prompt, prompt_tokens: int, segment: int, cost: CoderCost
) -> CoderMeasurement:
    return CoderMeasurement(
        code=code,
        prompt_tokens=prompt_tokens,
        segment=segment,
        raw_bytes=prompt.raw_bytes,
        wire_bytes=cost.wire_bytes,
        encode_s=cost.encode_s,
        decode_s=cost.decode_s,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
