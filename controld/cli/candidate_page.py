"""The page of candidates: points in space to turn and to point at, and a table that sorts; whatever they are of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from controld.contract.errors import ControldError

_DATA_MARK = "/*DATA*/"

COLOURS = ("#3b6fb6", "#d1692e", "#3f8f4f", "#a2456f", "#7a5cb8", "#8a7431", "#2a8f9c", "#5b6470")
"""By family, in the order of their names; the same in the page and the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One of the three. On a logarithmic one every value is positive."""

    name: str
    is_log: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Of the table."""

    name: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a column shows, and what it is sorted by; a value that is not known comes last, up or down."""

    text: str
    key: float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate.

    Args:
        family: by which it is coloured and can be hidden.
        at: its place on the three axes.
        cells: one for each column.
        facts: what is shown under the pointer, name and text.
    """

    config_id: str
    label: str
    family: str
    front: bool
    at: tuple[float, float, float]
    cells: tuple[Cell, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Candidates that can be compared."""

    title: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a page shows."""

    intro: str
    axes: tuple[Axis, Axis, Axis]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a picture, with its standard error upwards and downwards."""

    x: float
    y: float
    error: float
    on_front: bool


def colours_of(families: Iterable[str]) -> dict[str, str]:
    """A colour for each family."""
    return {family: COLOURS[i % len(COLOURS)] for i, family in enumerate(sorted(set(families)))}


def page_of(scene: Scene) -> str:
    """One HTML file that needs nothing else: no network, no library."""
    colours = colours_of(point.family for group in scene.groups for point in group.points)
    # "</script>" within a text would end the element that holds the data.
    text = json.dumps({**asdict(scene), "colours": colours}, ensure_ascii=True, allow_nan=False)
    template = resources.files("controld.cli").joinpath("candidate_page.html").read_text(encoding="utf-8")
    return template.replace(_DATA_MARK, text.replace("<", "\\u003c"))


def write_files(path: Path, page: Callable[[], str], draw: Callable[[Path], None]) -> list[Path]:
    """Write what the path asks for: into a folder a page and a picture, else one file by its suffix.

    Args:
        draw: writes the picture.

    Returns:
        What was written.

    Raises:
        ControldError: a file cannot be written, or what `draw` raises.
    """
    targets = [path] if path.suffix else [path / "front.html", path / "front.png"]
    try:
        if not path.suffix:
            path.mkdir(parents=True, exist_ok=True)
        for target in targets:
            if target.suffix == ".html":
                target.write_text(page(), encoding="utf-8")
            else:
                draw(target)
    except OSError as error:
        raise ControldError(f"{path}: cannot be written: {error.strerror}", code="cli.file") from error
    return targets


def plain(text: str) -> str:
    """The text as matplotlib draws it letter by letter: dollars would begin a formula, which may not parse."""
    return text.replace("$", r"\$")


def short(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty matplotlib figure. Raises: ControldError: matplotlib is not installed."""
    try:
        # A backend without a display, and without pyplot's global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ControldError(
            f"matplotlib is missing: {error}", code="cli.plot", hint='pip install "controld[plot]"'
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def draw_families(axes: Any, families: Mapping[str, tuple[str, Sequence[Mark]]]) -> None:
    """Points with error bars, a colour for each family; those on the Pareto front are filled.

    Args:
        axes: matplotlib's.
        families: colour and marks by name.
    """
    for name, (colour, marks) in families.items():
        label: str | None = plain(name)
        for on_front in (True, False):
            chosen = [mark for mark in marks if mark.on_front is on_front]
            if not chosen:
                continue
            axes.errorbar(
                [mark.x for mark in chosen],
                [mark.y for mark in chosen],
                yerr=[mark.error for mark in chosen],
                fmt="o",
                color=colour,
                markerfacecolor=colour if on_front else "none",
                markersize=5,
                capsize=2,
                linewidth=0.8,
                alpha=1.0 if on_front else 0.5,
                label=label,
            )
            label = None
