"""What the demo's log says, phase by phase: frames per second, settings, memory, and whether the targets were held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplanes.longlive.demo.plan import SETTLE_SHARE, DemoPlan, Phase

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """One phase, judged over its last part.

    Args:
        fps: frames per second by session, end to end.
        setting_ids: that chunks ran under, in order, each change once.
        adapted_s: from the phase's begin to the last change of setting; 0: none was needed.
        memory_bytes: the most that was held.
    """

    phase: Phase
    fps: Mapping[str, float]
    setting_ids: tuple[str, ...]
    adapted_s: float
    memory_bytes: int
    target_fps: float

    @property
    def holds_fps(self) -> bool:
        """Whether every session got its frames."""
        return set(self.fps) == set(self.phase.sessions) and min(self.fps.values()) >= self.target_fps

    @property
    def changes(self) -> bool:
        """Whether the setting changed, where the phase is there to show that."""
        return not self.phase.must_change or len(self.setting_ids) > 1

    @property
    def holds_memory(self) -> bool:
        """Whether the engine stayed within its memory."""
        return not self.phase.memory_limit_bytes or self.memory_bytes <= self.phase.memory_limit_bytes


def phase_results(plan: DemoPlan, rows: Sequence[Row]) -> list[PhaseResult]:
    """Every phase of the plan that has chunks."""
    return [
        _phase(plan, phase, chunks)
        for phase in plan.phases
        if (chunks := [row for row in rows if row["phase"] == phase.name])
    ]


def _phase(plan: DemoPlan, phase: Phase, rows: Sequence[Row]) -> PhaseResult:
    from_s = (1 - SETTLE_SHARE) * phase.seconds
    judged = [row for row in rows if row["phase_s"] >= from_s]
    # A window ends with its last chunk and begins with the one before its first, whose frames are not in it.
    until_s = max((row["phase_s"] for row in judged), default=0.0)
    since_s = max((row["phase_s"] for row in rows if row["phase_s"] < from_s), default=0.0)
    seconds = max(until_s - since_s, 1e-9)
    changes = [row for row in rows if row["applied"]]
    ids = [row["setting_id"] for row in rows]
    return PhaseResult(
        phase=phase,
        fps={
            name: sum(row["frames"] for row in judged if row["session"] == name) / seconds
            for name in sorted({row["session"] for row in judged})
        },
        setting_ids=tuple(one for index, one in enumerate(ids) if index == 0 or ids[index - 1] != one),
        adapted_s=max((row["phase_s"] for row in changes), default=0.0),
        memory_bytes=max((row["memory_bytes"] for row in judged), default=0),
        target_fps=plan.target_fps,
    )


def outpaces(plan: DemoPlan, rows: Sequence[Row], fps_of_one: float) -> bool:
    """Whether the first phase alone made over twice the rate that the target is from, which then asks for nothing."""
    first = [result for result in phase_results(plan, rows) if result.phase == plan.phases[0]]
    return any(fps > 2 * fps_of_one for result in first for fps in result.fps.values())


def verdict_line(result: PhaseResult, labels: Mapping[str, str]) -> str:
    """One line for a person."""
    fps = ", ".join(f"{name} {value:.1f}" for name, value in result.fps.items())
    settings = " -> ".join(labels.get(one, one[:4]) for one in result.setting_ids)
    limit = result.phase.memory_limit_bytes
    memory = f"{result.memory_bytes / 1e6:.2f} MB" + (f" of {limit / 1e6:.2f}" if limit else "")
    held = "held" if result.holds_fps else "MISSED"
    within = "" if not limit else ", memory " + ("held" if result.holds_memory else "MISSED")
    if len(result.setting_ids) > 1:
        moved = f"changed within {result.adapted_s:.1f} s"
    else:
        moved = "as it was" if result.changes else "setting NOT CHANGED"
    return f"{result.phase.name}: {settings} | FPS {fps} of {result.target_fps:g} {held} | {memory}{within} | {moved}"


def write_plot(path: Path, plan: DemoPlan, rows: Sequence[Row], labels: Mapping[str, str]) -> None:
    """Frames per second, memory and setting over time. Raises: ImportError: matplotlib is missing."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    rates, memory, setting = figure.subplots(3, 1, sharex=True)
    for name in sorted({row["session"] for row in rows}):
        mine = [row for row in rows if row["session"] == name]
        points = [(row["at_s"], _rate_before(mine, index)) for index, row in enumerate(mine)]
        rates.plot([at for at, _ in points], [fps for _, fps in points], label=f"session {name}", linewidth=1)
    rates.axhline(plan.target_fps, color="black", linestyle="--", linewidth=1, label="target")
    rates.set_ylabel("FPS end to end (last 3 s)")
    rates.legend(loc="upper right")
    memory.plot([row["at_s"] for row in rows], [row["memory_bytes"] / 1e6 for row in rows], linewidth=1)
    memory.set_ylabel("tensors held (MB)")
    order = list(dict.fromkeys(row["setting_id"] for row in rows))
    setting.step([row["at_s"] for row in rows], [order.index(row["setting_id"]) for row in rows], where="post")
    setting.set_yticks(range(len(order)), [labels.get(one, one[:4]) for one in order], fontsize=7)
    setting.set_xlabel("seconds; measured on this machine's CPU")
    for phase in plan.phases:
        mine = [row for row in rows if row["phase"] == phase.name]
        if not mine:
            continue
        for axes in (rates, memory, setting):
            axes.axvline(mine[0]["at_s"], color="grey", linewidth=0.5)
        rates.text(mine[0]["at_s"], rates.get_ylim()[1], f" {phase.name}", va="top", fontsize=8)
        if phase.memory_limit_bytes:
            limit = phase.memory_limit_bytes / 1e6
            memory.hlines(limit, mine[0]["at_s"], mine[-1]["at_s"], colors="black", linestyles="--", linewidth=1)
    figure.savefig(path)


def _rate_before(rows: Sequence[Row], index: int, window_s: float = 3.0) -> float:
    last = rows[index]
    recent = [row for row in rows[: index + 1] if row["at_s"] > last["at_s"] - window_s]
    seconds = last["at_s"] - recent[0]["at_s"]
    return sum(row["frames"] for row in recent[1:]) / seconds if seconds > 0 else 0.0
