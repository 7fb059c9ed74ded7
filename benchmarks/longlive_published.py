"""What the controller chooses with the published figures of LongLive-2.0 as its profiles. We measured none of them.

Figures, and what follows from them by arithmetic, lie in `controld/controller/data/longlive_published.json`; losses are
relative drops of the VBench total. The decision is the daemon's own pure code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from controld.candidates.video_published import published_document, published_profiles
from controld.controller.video import decide_video
from controld.controller.video_view import EngineView, VideoGoal

LARGEST_LOSS = 0.05
"""Five per cent of the VBench total: every setting with a published total is within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question.

    Args:
        name: as it was asked.
        device: whose figures.
        goal: what is wanted.
        expected: name of the setting that the published figures make the best.
        must_reject: name of a setting that has to be rejected; empty: none in particular.
        because: begin of the reason for it, or what is in it.
    """

    name: str
    device: str
    goal: VideoGoal
    expected: str
    must_reject: str = ""
    because: str = ""


_FOUR = "NVFP4 4-step, NVFP4 KV, asynchronous decoding"
_TWO = "NVFP4 2-step, NVFP4 KV, asynchronous decoding"
_BF16 = "BF16 4-step"
_WANTED = VideoGoal(service_class="live", max_quality_loss=LARGEST_LOSS)
CASES = (
    Case(
        name="20 GB of memory", device="GB200", goal=replace(_WANTED, memory_bytes=20e9), expected=_FOUR,
        must_reject=_BF16, because="of 20 GB",
    ),
    Case(
        name="40 FPS end to end", device="GB200", goal=replace(_WANTED, fps=40.0), expected=_TWO, must_reject=_FOUR,
        because="of 40 FPS end to end",
    ),
    Case(
        name="40 FPS of denoising", device="GB200", goal=replace(_WANTED, fps_denoise=40.0), expected=_TWO,
        must_reject=_FOUR, because="of 40 FPS of denoising",
    ),
    Case(
        name="best quality at 24 FPS end to end", device="GB200", goal=replace(_WANTED, fps=24.0), expected=_FOUR,
        must_reject=_BF16, because="of 24 FPS end to end",
    ),
    Case(
        name="best quality at 24 FPS of denoising", device="GB200", goal=replace(_WANTED, fps_denoise=24.0),
        expected=_BF16,
    ),
    Case(
        name="best quality", device="H100", goal=_WANTED, expected=_BF16,
        must_reject="FP8 4-step, compiled", because="slower than",
    ),
)  # fmt: skip


def decide(case: Case) -> dict[str, Any]:
    """The decision with every setting's verdict, and whether it is the expected one."""
    profiles = published_profiles(case.device)
    rows = published_document()["devices"][case.device]["settings"]
    names = {profile.configuration.config_id: row["name"] for row, profile in zip(rows, profiles, strict=True)}
    plan = decide_video([case.goal], profiles, EngineView())
    verdicts = {names[arm.setting_id]: [rejection.text for rejection in arm.rejections] for arm in plan.arms}
    chosen = None if plan.chosen is None else names[plan.chosen.setting_id]
    is_rejected = not case.must_reject or any(case.because in text for text in verdicts[case.must_reject])
    return {
        "case": case.name,
        "device": case.device,
        "chosen": chosen,
        "reason": plan.reason,
        "is_expected": chosen == case.expected and is_rejected,
        "must_reject": case.must_reject,
        "verdicts": verdicts,
    }
