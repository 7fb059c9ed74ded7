"""The page with plots, and the table in the terminal, from a summary and its logs."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from controld.contract.quantity import format_rate, format_size
from dataplanes.sglang.demo.analysis import OVERALL, Sample
from dataplanes.sglang.demo.plan import ARMS

_COLOURS = {
    "raw": "#888888",
    "static-1": "#e69f00",
    "static-2": "#56b4e9",
    "static-3": "#cc79a7",
    "controld": "#009e73",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened when; seconds since the start of the run.

    Args:
        link: (second, nominal rate in bit/s), a step function.
        requests: the client's samples with the second at which each began and what carried it.
        estimates: (second, estimated bandwidth in bytes per second) as the sender's agent drew with.
    """

    link: Sequence[tuple[float, float]]
    requests: Sequence[tuple[float, Sample, Mapping[str, Any]]]
    estimates: Sequence[tuple[float, float]]


def _figure(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    # Imported here: only the page needs it, and it takes most of a second.
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_ratios(summary: Mapping[str, Any]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, metric in zip(axes, ("ttft", "jct"), strict=True):
            for offset, (name, colour) in enumerate((("raw", "#888888"), ("best_static", "#e69f00"))):
                ratios = summary[f"{metric}_{name}_over_controld"]
                phases = list(ratios)
                centres = [ratios[phase]["ratio"] for phase in phases]
                errors = [
                    [ratios[phase]["ratio"] - ratios[phase]["low"] for phase in phases],
                    [ratios[phase]["high"] - ratios[phase]["ratio"] for phase in phases],
                ]
                positions = [index + (offset - 0.5) * 0.3 for index in range(len(phases))]
                axis.errorbar(positions, centres, errors, fmt="o", color=colour, capsize=4, label=f"{name} / controld")
                axis.set_xticks(range(len(phases)), phases)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_yscale("log")
            axis.set_title(f"{metric.upper()}: above 1, controld is faster")
            axis.legend()

    return draw


def _draw_timeline(timeline: Timeline) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        top, middle, bottom = figure.subplots(3, 1, sharex=True)
        end = max((second for second, _, _ in timeline.requests), default=1.0)
        seconds = [second for second, _ in timeline.link] + [end]
        rates = [rate for _, rate in timeline.link]
        top.step(seconds, [*rates, rates[-1]] if rates else [], where="post", color="black", label="link, nominal")
        top.plot(
            [second for second, _ in timeline.estimates], [rate * 8 for _, rate in timeline.estimates], ".",
            color=_COLOURS["controld"], label="estimate the arm was drawn with",
        )  # fmt: skip
        top.set_yscale("log")
        top.set_ylabel("bit/s")
        top.legend()
        mine = [(second, effect) for second, sample, effect in timeline.requests if sample.arm == "controld" and effect]
        arms = sorted({effect["arm_id"] for _, effect in mine})
        middle.scatter([second for second, _ in mine], [arms.index(effect["arm_id"]) for _, effect in mine], s=14)
        middle.set_yticks(range(len(arms)), [arm[:8] for arm in arms])
        middle.set_ylabel("controld's arm")
        for arm in ARMS:
            points = [(second, sample.ttft_s) for second, sample, _ in timeline.requests if sample.arm == arm]
            bottom.plot([x for x, _ in points], [y for _, y in points], ".", color=_COLOURS[arm], label=arm)
        bottom.set_yscale("log")
        bottom.set_ylabel("TTFT, s")
        bottom.set_xlabel("seconds since the start")
        bottom.legend(ncols=5, fontsize="small")

    return draw


def _ratio_text(ratio: Mapping[str, float] | None) -> str:
    return (
        "-"
        if ratio is None
        else f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] n={ratio['pairs']:.0f}"
    )


def _ratio_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    phases = [*summary["ttft_s"], OVERALL]
    keys = [f"{metric}_{name}_over_controld" for metric in ("ttft", "jct") for name in _COMPARED]
    return [(phase, *(_ratio_text(summary.get(key, {}).get(phase)) for key in keys)) for phase in phases]


_COMPARED = ("raw", "best_static", "best_published")
_RATIO_HEADER = (
    "phase",
    *(f"{metric} {name.replace('_', ' ')} / controld" for metric in ("TTFT", "JCT") for name in _COMPARED),
)


_BEST_ARM_HEADER = ("phase", "best fixed arm", "its TTFT / controld's")


def _best_arm_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = summary["ttft_best_arm_of_phase_over_controld"]
    return [(phase, best["arm"], _ratio_text(best)) for phase, best in found.items()]


def terminal_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The ratios, the bytes and decisions, and the verdicts, for a terminal."""
    ratios = Table(
        *_RATIO_HEADER,
        title="Ratio of geometric means over the same prompts, 95 % interval; above 1 controld is faster",
    )
    for row in _ratio_rows(summary):
        ratios.add_row(*row)
    traffic = Table("arm", "KV bytes", "wire bytes", "ratio", "loss (nats)", title="What crossed the link")
    quality = summary["quality"] or {}
    for arm, totals in summary["wire_bytes"].items():
        loss = quality.get(arm)
        traffic.add_row(
            arm, format_size(totals["raw_bytes"]), format_size(totals["wire_bytes"]), f"{totals['ratio']:.2f}",
            f"{loss['mean']:.4f} +- {loss['se']:.4f}" if loss else "-",
        )  # fmt: skip
    decisions = Table("phase", "controld's arm", "transfers", title="Decisions by arm")
    for phase, counts in summary["decisions"]["by_phase"].items():
        for arm, count in sorted(counts.items(), key=lambda item: -item[1]):
            decisions.add_row(phase, arm, str(count))
    reasons = Table("reason", "transfers", title="Decisions by reason")
    for reason, count in summary["decisions"]["by_reason"].items():
        reasons.add_row(reason, str(count))
    verdicts = Table("claim", "holds", title="Verdicts")
    for verdict in summary["verdicts"].values():
        verdicts.add_row(verdict["claim"], "yes" if verdict["holds"] else "[red]no[/red]")
    best = Table(*_BEST_ARM_HEADER, title="The best fixed arm of each phase, in hindsight")
    for row in _best_arm_rows(summary):
        best.add_row(*row)
    return [ratios, best, traffic, decisions, reasons, verdicts]


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def page(summary: Mapping[str, Any], timeline: Timeline) -> str:
    """One self-contained HTML page: no script, no network."""
    verdicts = [
        (verdict["claim"], "yes" if verdict["holds"] else "no", json.dumps(verdict["figure"]))
        for verdict in summary["verdicts"].values()
    ]
    links = ", ".join(format_rate(rate / 8) for rate in dict.fromkeys(rate for _, rate in timeline.link))
    quality = summary["quality"] or {}
    traffic = [
        (
            arm, format_size(totals["raw_bytes"]), format_size(totals["wire_bytes"]), f"{totals['ratio']:.2f}",
            f"{quality[arm]['mean']:.4f} +- {quality[arm]['se']:.4f}" if arm in quality else "-",
        )
        for arm, totals in summary["wire_bytes"].items()
    ]  # fmt: skip
    statics = [(name, json.dumps(configuration)) for name, configuration in summary["static_configurations"].items()]
    machine = "".join(
        f"<li>{html.escape(str(name))}: {html.escape(str(value))}</li>"
        for name, value in summary.get("machine", {}).items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>controld: what compression did</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
 table {{ border-collapse: collapse; margin: 1rem 0 }}
 td, th {{ border: 1px solid #ccc; padding: .3rem .6rem; text-align: left }}
 svg {{ max-width: 100%; height: auto }} .note {{ color: #555 }}
</style></head><body>
<h1>controld: what compression did</h1>
<p>Every prompt was sent once with each arm, in seeded random order, one request at a time, over a link of {links}.
Everything here was measured on this machine; intervals are 95 % bootstrap intervals over prompts.</p>
{_figure(_draw_ratios(summary), (11, 4))}
{_html_table(_RATIO_HEADER, _ratio_rows(summary))}
<h2>The best fixed arm of each phase, in hindsight</h2>
{_html_table(_BEST_ARM_HEADER, _best_arm_rows(summary))}
<h2>Link, decisions and latency over time</h2>
{_figure(_draw_timeline(timeline), (11, 9))}
<h2>Bytes and quality</h2>
{_html_table(("arm", "KV bytes", "wire bytes", "ratio", "loss on the served prompts, nats"), traffic)}
<p class="note">Limit: {summary["max_quality_loss_nats"]} nats per token.</p>
<h2>Verdicts</h2>
{_html_table(("claim", "holds", "figure"), verdicts)}
<h2>Static arms, chosen by profile</h2>
{_html_table(("arm", "configuration"), statics)}
<h2>Machine</h2><ul>{machine}</ul>
</body></html>
"""
