"""The policy of an experiment: a class that controld serves, and a pinned class for each arm it is compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from controld.contract.errors import ControldError
from dataplanes.sglang.demo.plan import CONTROLD, RAW, STATICS, ExperimentPlan, Phase

DEPLOYMENT = "demo"
SERVED_CLASS = "chat"


def service_class_of(arm: str) -> str:
    """The service class that carries an arm of the experiment."""
    return SERVED_CLASS if arm == CONTROLD else arm


def extra_key_of(arm: str) -> str:
    """The `extra_key` with which a client asks for it."""
    return f"class={service_class_of(arm)}"


def policy_text(plan: ExperimentPlan, pinned: Mapping[str, str]) -> str:
    """The policy file.

    Args:
        pinned: arm of the experiment to the arm id that its class always takes; such classes teach controld nothing,
            so that it learns from its own transfers only.
    """
    limit = plan.max_quality_loss_nats
    classes = [
        f"""  - name: {SERVED_CLASS}
    tenant: default
    match: {{extra_key: "{extra_key_of(CONTROLD)}"}}
    workload: general
    tiers: [pd]
    objective: latency
    max_quality_loss_nats: {limit}
    explore: 2%
"""
    ]
    classes += [
        f"""  - name: {service_class_of(arm)}
    tenant: default
    match: {{extra_key: "{extra_key_of(arm)}"}}
    workload: general
    tiers: [pd]
    max_quality_loss_nats: {limit}
    pin: {json.dumps(arm_id)}
    learn: false
"""
        for arm, arm_id in pinned.items()
    ]
    return f"""apiVersion: controld/v1
kind: Policy
metadata: {{name: demo}}
select: {{kind: sglang, deployment: {DEPLOYMENT}}}
tenants:
  - {{name: default, weight: 1}}
classes:
{"".join(classes)}  - name: default
    tenant: default
    workload: general
    tiers: [pd]
    max_quality_loss_nats: 0
"""


def predicted_transfer_s(candidate: Mapping[str, Any], size_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Encode, wire and decode one after the other, from the candidate's profile."""
    stages = sum(
        candidate[stage]["a_s"] + candidate[stage]["b_s_per_byte"] * size_bytes for stage in ("encode", "decode")
    )
    return float(stages + size_bytes / candidate["ratio"] / bandwidth_bytes_per_s)


def choose_statics(
    candidates: Sequence[Mapping[str, Any]], plan: ExperimentPlan, kv_bytes_per_token: int
) -> dict[str, Mapping[str, Any]]:
    """The three best configurations within the quality limit, by profile; one of them at least of a published kind.

    Best is the least geometric mean of the predicted transfer time over the phases' rates, at the plan's median prompt.
    Where none of the three is a published method, the last place goes to the best that is: what others have published
    is what controld must be compared with.

    Raises:
        ControldError: fewer than three lossy candidates are within the limit.
    """
    within = _within_the_limit(candidates, plan)
    if len(within) < len(STATICS):
        raise ControldError(
            f"{len(within)} candidates are within {plan.max_quality_loss_nats} nats, {len(STATICS)} are needed",
            code="demo.too_few_candidates",
            hint="profile more of the space, or with more segments",
        )
    size_bytes = float(_median_tokens(plan) * kv_bytes_per_token)
    rates = [rate / 8 for phase in plan.phases for rate in phase.rates_bits_per_s]

    def cost(candidate: Mapping[str, Any]) -> float:
        return sum(math.log(predicted_transfer_s(candidate, size_bytes, rate)) for rate in rates)

    ranked = sorted(within, key=cost)
    chosen = ranked[: len(STATICS)]
    published = [candidate for candidate in ranked if is_published(candidate["configuration"])]
    if published and not any(is_published(candidate["configuration"]) for candidate in chosen):
        chosen[-1] = published[0]
    return dict(zip(STATICS, chosen, strict=True))


def choose_separating_phase(
    candidates: Sequence[Mapping[str, Any]],
    statics: Mapping[str, Mapping[str, Any]],
    plan: ExperimentPlan,
    kv_bytes_per_token: int,
) -> str:
    """The phase in which an adaptive choice should gain most over any one static arm, by profile; fixed before a run.

    The gain of a phase is the least, over static arms, of the predicted log-ratio of TTFT to the best candidate's at
    each of its rates, raw included, at the plan's median prompt.
    """
    tokens = _median_tokens(plan)
    size_bytes, prefill_s = float(tokens * kv_bytes_per_token), tokens / plan.prefill_tokens_per_s
    usable = _within_the_limit(candidates, plan)

    def ttft_s(candidate: Mapping[str, Any], rate: int) -> float:
        return prefill_s + predicted_transfer_s(candidate, size_bytes, rate / 8)

    def gain(phase: Phase) -> float:
        return min(
            fmean(
                math.log(
                    ttft_s(static, rate)
                    / min(prefill_s + size_bytes / (rate / 8), *(ttft_s(one, rate) for one in usable))
                )
                for rate in phase.rates_bits_per_s
            )
            for static in statics.values()
        )

    return max(plan.phases, key=gain).name


def _within_the_limit(candidates: Sequence[Mapping[str, Any]], plan: ExperimentPlan) -> list[Mapping[str, Any]]:
    return [
        candidate
        for candidate in candidates
        if candidate["loss_upper_nats"] is not None
        and candidate["loss_upper_nats"] <= plan.max_quality_loss_nats
        and candidate["ratio"] > 1
    ]


def _median_tokens(plan: ExperimentPlan) -> int:
    lengths = sorted(plan.prompt_tokens)
    return lengths[len(lengths) // 2]


_PUBLISHED_FORMATS = {"head_levels", "absmax_levels", "allocated_levels", "lloyd_max", "fp8_e4m3", "nvfp4"}


def is_published(configuration: Mapping[str, Any]) -> bool:
    """Whether a configuration is a method that others have published, with its parameters tuned.

    KVServe's head split, CacheGen, RateQuant, TurboQuant, FP8 and NVFP4 by their formats; KIVI as integer levels
    without a rotation; SplitZip as the lossless split. Not the calibrated transform, nor levels after a rotation, which
    take a stage of one and a stage of another.
    """
    quantise, transform = configuration.get("quantise"), configuration.get("transform")
    return quantise in _PUBLISHED_FORMATS or (quantise in ("levels", "none") and transform == "none")


def pinned_arms(statics: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Arm of the experiment to arm id, for every arm that controld does not choose."""
    return {RAW: RAW, **{arm: str(candidate["config_id"]) for arm, candidate in statics.items()}}
