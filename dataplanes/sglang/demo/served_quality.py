"""The loss on the very prompts that were served, with the configurations that their effects name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import NO_ARTEFACTS, ArtefactShelf
from dataplanes.sglang.demo.run import Prompt
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.quality import QualityMeter, load_model
from dataplanes.sglang.profiler.wire_codec import FrameCodec, layout_of

RAW_ARM = "raw"


def remeasure(
    model_dir: Path,
    prompts: Sequence[Prompt],
    used: Mapping[tuple[str, int], Mapping[str, str]],
    configurations: Mapping[str, Configuration],
    *,
    page_tokens: int,
    artefacts_dir: Path | None = None,
    step: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Mean loss by arm of the experiment; a raw transfer counts as zero, for it changes nothing.

    Args:
        prompts: what was served, with the continuation that the text really has.
        used: (phase, pair) to, for each arm, the arm id that carried it.
        configurations: arm id to configuration.
        page_tokens: page size of the serving pool; groups of tokens follow it.
        artefacts_dir: folder of the calibrated artefacts that configurations name.
        step: called once a prompt.

    Returns:
        arm -> {"mean", "se", "prompts", "worst"}, nats per token.
    """
    identity = identify_model(model_dir)
    layout = layout_of(identity, page_tokens=page_tokens)
    artefacts = ArtefactShelf.of_folder(artefacts_dir, identity.fingerprint) if artefacts_dir else NO_ARTEFACTS
    codecs = {
        arm_id: FrameCodec(configuration, layout, artefacts=artefacts)
        for arm_id, configuration in configurations.items()
    }
    meter = QualityMeter(load_model(model_dir))
    losses: dict[str, list[float]] = {}
    for prompt in prompts:
        arms = used[prompt.phase, prompt.pair]
        by_id: dict[str, float] = {RAW_ARM: 0.0}
        prefilled = meter.prompt(meter.prefill(torch.tensor(prompt.token_ids)), torch.tensor(prompt.continuation_ids))
        for arm_id in sorted(set(arms.values()) - {RAW_ARM}):
            codec = codecs[arm_id]
            received = codec.decode(codec.encode(prefilled.planes), prefilled.tokens)
            by_id[arm_id] = meter.measure_planes(prefilled, received).loss_nats
        for arm, arm_id in arms.items():
            losses.setdefault(arm, []).append(by_id[arm_id])
        step()
    return {arm: _statistics(values) for arm, values in losses.items()}


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return {"mean": mean, "se": math.sqrt(variance / count), "worst": max(values), "prompts": count}
