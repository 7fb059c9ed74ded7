"""What an experiment does, as data: phases of the link, prompts, arms, and when a phase has enough pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from controld.contract.errors import FieldError

CONTROLD = "controld"
RAW = "raw"
STATICS = ("static-1", "static-2", "static-3")
ARMS = (RAW, *STATICS, CONTROLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of work under one schedule of the link.

    Args:
        name: fast, medium, slow or recovering.
        rates_bits_per_s: the link's rates; the phase's prompts are spread over them evenly, in this order. The schedule
            advances by prompts done, never by time, so that every arm meets the same link.
    """

    name: str
    rates_bits_per_s: tuple[int, ...]

    def rate_at(self, done: int, planned: int) -> int:
        """The rate for the prompt after `done` of `planned`; past the plan the last one stays."""
        step = min(done * len(self.rates_bits_per_s) // max(planned, 1), len(self.rates_bits_per_s) - 1)
        return self.rates_bits_per_s[step]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan:
    """A whole experiment.

    Args:
        phases: in order.
        prompt_tokens: prompt lengths; a phase goes round them.
        min_pairs, max_pairs: prompts a phase at the least and at the most.
        half_width: stop a phase after `min_pairs` once each interval's half width is below this fraction.
        phase_limit_s: no further prompt of a phase after this time, once `min_pairs` are done.
        output_tokens: generated for each request, greedy.
        warm_up_prompts: sent before the first phase with every arm; not counted.
        seed: of the order of arms, the choice of texts and the bootstrap.
        max_quality_loss_nats: the limit in the policy.
        grid: which grid of configurations is profiled, "quick" or "full".
        segments_per_length: fidelity of the profiles.
        prefill_tokens_per_s: a guess, used for nothing but the choice of the phase that should separate the arms.
    """

    phases: tuple[Phase, ...]
    prompt_tokens: tuple[int, ...]
    min_pairs: int
    max_pairs: int
    half_width: float
    phase_limit_s: float
    output_tokens: int
    warm_up_prompts: int
    seed: int
    max_quality_loss_nats: float
    grid: str
    segments_per_length: int
    loaded_requests: int = 0
    prefill_tokens_per_s: float = 400.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_pairs <= self.max_pairs:
            raise FieldError("plan.min_pairs", f"{self.min_pairs} is not from 1 to {self.max_pairs}")
        if len({phase.name for phase in self.phases}) != len(self.phases):
            raise FieldError("plan.phases", "a name occurs twice")

    def arm_order(self, phase: str, pair: int) -> tuple[str, ...]:
        """All arms in the seeded random order of this prompt."""
        order = list(ARMS)
        random.Random(f"{self.seed}/{phase}/{pair}").shuffle(order)
        return tuple(order)

    def tokens_of(self, pair: int) -> int:
        """Prompt length of the phase's prompt number `pair`."""
        return self.prompt_tokens[pair % len(self.prompt_tokens)]


MBIT = 1_000_000
PHASES = (
    Phase(name="fast", rates_bits_per_s=(2000 * MBIT,)),
    Phase(name="medium", rates_bits_per_s=(100 * MBIT,)),
    Phase(name="slow", rates_bits_per_s=(13 * MBIT,)),
    Phase(name="recovering", rates_bits_per_s=(13 * MBIT, 100 * MBIT, 1000 * MBIT)),
)

EVIDENCE = ExperimentPlan(
    phases=PHASES,
    prompt_tokens=(512, 64, 256, 2048, 128, 384, 96, 192),
    min_pairs=24,
    max_pairs=60,
    half_width=0.04,
    phase_limit_s=560.0,
    output_tokens=4,
    warm_up_prompts=2,
    seed=13,
    max_quality_loss_nats=0.02,
    grid="full",
    segments_per_length=8,
    loaded_requests=8,
)

DEMO = ExperimentPlan(
    phases=PHASES,
    prompt_tokens=(512, 768, 128),
    min_pairs=3,
    max_pairs=3,
    half_width=1.0,
    phase_limit_s=720.0,
    output_tokens=8,
    warm_up_prompts=1,
    seed=7,
    max_quality_loss_nats=0.02,
    grid="quick",
    segments_per_length=3,
)
