"""A study on the terminal while it runs: progress, the front, what is measured now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controld.cli.profile import loss_text, paused_hint, sparkline
from controld.contract.configuration_label import configuration_label

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {
    "running": "[bold cyan]{}[/]",
    "measured": "[green]{}[/]",
    "infeasible": "[yellow]{}[/]",
    "failed": "[red]{}[/]",
    "pending": "[dim]{}[/]",
}
_FIXED_LINES = 10
_BAR_COLUMNS = 60


def study_screen(study: dict[str, Any], lines: int) -> RenderableType:
    """What fits on `lines` lines."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = max(lines - _FIXED_LINES, 4)
    trials = study["trials"][-max(left // 2, 3) :]
    front = study["front"]
    done, total = progress_of(study)
    curve = study["hypervolume_by_trial"]
    # A bar alone does not end its line.
    bar = Table.grid()
    bar.add_row(ProgressBar(total=max(total, 1e-9), completed=min(done, total), width=_BAR_COLUMNS))
    is_video = study["medium"] == "video"
    parts: list[RenderableType] = [_trials(trials, "loss" if is_video else "loss (nats/token)")]
    if front:
        shown = max(left - len(trials), 3)
        parts += [Text(""), _front_of_engine(front[:shown]) if is_video else _front(front[:shown])]
        if len(front) > shown:
            parts.append(Text(f"... and {len(front) - shown} more on the front", style="dim"))
    parts += [
        Text(""),
        bar,
        Text(footer(study)),
        Text(f"hypervolume {study['hypervolume']:.4f}  {sparkline(curve, max([*curve, 1e-9]))}"),
    ]
    if hint := paused_hint(study):
        parts.append(Text(hint, style="yellow"))
    if study["detail"]:
        parts.append(Text(study["detail"], style="yellow"))
    return Group(*parts)


def progress_of(study: dict[str, Any]) -> tuple[float, float]:
    """Done and total: of the budget, or of the grid's segments."""
    budget = study.get("budget")
    if isinstance(budget, int):
        return study["trials_done"], budget
    if isinstance(budget, str):
        return study["seconds"]["measuring"], float(budget.removesuffix("s"))
    return study["segments_done"], study["segments_total"]


def footer(study: dict[str, Any]) -> str:
    """One line of numbers."""
    budget = study.get("budget")
    of = f"/{budget}" if isinstance(budget, int) else f"/{study['trials_total']}" if budget is None else ""
    seconds = study["seconds"]
    split = ", ".join(f"{name} {seconds[name]:.0f} s" for name in ("measuring", "search", "waiting"))
    eta = "" if study["eta_s"] is None else f", at most {study['eta_s']:.0f} s left"
    return f"{study['state']}: {study['trials_done']}{of} trials, {study['age_s']:.0f} s ({split}){eta}"


def _trials(trials: list[dict[str, Any]], loss: str) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("trial", "chosen by", "configuration", "state", "segments", loss, "time", box=None)
    for trial in trials:
        table.add_row(
            escape(trial["id"]),
            escape(trial["source"]),
            escape(configuration_label(trial["lossy"])),
            _STYLES.get(trial["state"], "{}").format(escape(trial["state"])),
            f"{trial['segments_done']}/{trial['segments_total']}",
            loss_text(trial),
            f"{trial['seconds']:.0f} s" if trial["seconds"] else "",
        )
    return table


def _front(front: list[dict[str, Any]]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("on the front", box=None)
    for name in ("loss", "ratio", "ns/byte"):
        table.add_column(name, justify="right")
    for point in front:
        ratio = "" if point["ratio"] is None else f"{point['ratio']:.2f}"
        table.add_row(
            escape(point["label"]), f"{point['loss_nats']:.5f}", ratio, f"{point['seconds_per_byte'] * 1e9:.2f}"
        )
    return table


def _front_of_engine(front: list[dict[str, Any]]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("on the front", box=None)
    for name in ("loss", "memory", "ms/frame"):
        table.add_column(name, justify="right")
    for point in front:
        table.add_row(
            escape(point["label"]),
            f"{point['loss']:.4f}",
            f"{point['memory_ratio']:.0%}",
            f"{point['seconds_per_frame'] * 1e3:.2f}",
        )
    return table
