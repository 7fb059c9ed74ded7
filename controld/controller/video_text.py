"""Settings, rates and plans of video engines in words."""

from __future__ import annotations

from controld.contract.quantity import format_duration, format_size
from controld.controller.video_plan import ArmPlan, VideoPlan


def rate_text(fps: float) -> str:
    """Three digits."""
    return f"{fps:.3g}"


def seconds_text(seconds: float) -> str:
    """As `0.31 s`."""
    return format_duration(seconds)


def size_text(size_bytes: float) -> str:
    """As `19.4 GB`."""
    return format_size(size_bytes)


def plan_text(agent_id: str, plan: VideoPlan, answer: str) -> str:
    """A table of every setting with its verdict.

    Args:
        answer: what the engine said of the last setting; empty where nothing.
    """
    classes = ", ".join(plan.classes)
    lines = [f"engine {agent_id}  {plan.sessions} session{'s' if plan.sessions != 1 else ''} of {classes}"]
    if answer:
        lines.append(answer)
    lines.append(f"decided: {plan.reason}")
    header = ("setting", "loss", "FPS denoise", "FPS", "first frame", "memory", "change", "verdict")
    rows = [header, *(_row(arm, plan.in_force) for arm in plan.arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(arm.source == "published" for arm in plan.arms):
        lines.append("figures of published settings are others', not this engine's")
    return "\n".join(lines)


def _row(arm: ArmPlan, in_force: str) -> tuple[str, ...]:
    loss = "?" if arm.loss_mean is None else f"{arm.loss_mean:.4f}"
    upper = "" if arm.loss_upper is None else f" (ub {arm.loss_upper:.4f})"
    verdict = "; ".join(rejection.text for rejection in arm.rejections)
    verdict = f"out: {verdict}" if verdict else "meets all targets"
    if arm.chosen:
        verdict = f"CHOSEN, {verdict}"
    if arm.setting_id == in_force:
        change = "in force"
    else:
        lost = "" if arm.keeps_kv else ", loses history"
        change = f"{arm.transition} {seconds_text(arm.switch_s)}{lost}"
    return (
        f"{arm.setting_id[:4]} {arm.label}" + (" (published)" if arm.source == "published" else ""),
        loss + upper,
        rate_text(arm.fps_denoise),
        rate_text(arm.fps_end_to_end),
        "-" if arm.first_frame_s is None else seconds_text(arm.first_frame_s),
        "?" if arm.memory_bytes is None else size_text(arm.memory_bytes),
        change,
        verdict,
    )
