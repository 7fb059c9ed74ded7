"""The toy world: a coloured shape moves along a path that its prompt names, at a speed that wanders at random.

The path is settled by the prompt and a clip's first frames, the speed is not: what comes next is uncertain along the
path and nowhere else, and of a clip that is made from its prompt alone the place, too. So a generator must choose: one
that averages shows a blur. How far a frame is from the nearest one that the world could show (`distance_to_valid`) is a
quality that needs no particular future.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.longlive.engine import EngineError

WORLD_VERSION = 1
"""Rises with every change of what clips show, or of how a frame is judged: losses from before are of another corpus."""
SIZE = 32
"""Pixels of a frame's edge."""
FRAMES_PER_SECOND = 24
BACKGROUND = (0.08, 0.08, 0.13)
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
COLOURS = {
    "red": (0.95, 0.20, 0.20),
    "green": (0.20, 0.85, 0.30),
    "blue": (0.25, 0.40, 1.00),
    "yellow": (0.95, 0.90, 0.20),
    "white": (0.95, 0.95, 0.95),
    "purple": (0.75, 0.30, 0.90),
    "cyan": (0.20, 0.85, 0.90),
    "orange": (1.00, 0.55, 0.10),
}
MOTIONS = ("sideways", "upright", "diagonally", "around")
"""From side to side, up and down, both at once, on a circle."""

_FILLERS = frozenset({"a", "an", "the", "moves", "moving", "is", "that", "goes"})
_LOW, _HIGH = 6.0, 26.0
_SHOWN = 40
"""Characters of an unknown word in an error."""
_SPRITE = 17
_MEAN_SPEED = 0.8
_SPEED_DEVIATION = 0.6
_SPEED_MEMORY = 0.93


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a clip is to show, as indices into `SHAPES`, `COLOURS` and `MOTIONS`."""

    shape: int
    colour: int
    motion: int

    @property
    def text(self) -> str:
        """The prompt in words, as `parse_prompt` reads it."""
        return f"a {list(COLOURS)[self.colour]} {SHAPES[self.shape]} moves {MOTIONS[self.motion]}"

    @property
    def is_held_out(self) -> bool:
        """Whether training never shows this shape in this colour."""
        return (self.shape + self.colour) % 4 == 0


def parse_prompt(text: str) -> Prompt:
    """Read a prompt: one shape, one colour and one motion, in any order.

    Raises:
        EngineError: a word is unknown, or one of the three is missing or there twice.
    """
    names = {"shape": SHAPES, "colour": tuple(COLOURS), "motion": MOTIONS}
    found: dict[str, int] = {}
    for word in text.lower().replace(",", " ").replace(".", " ").split():
        if word in _FILLERS:
            continue
        kind = next((kind for kind, words in names.items() if word in words), None)
        if kind is None:
            hint = "; ".join(f"{kind}: {', '.join(words)}" for kind, words in names.items())
            raise EngineError(f"prompt: {word[:_SHOWN]!r} is not in this engine's vocabulary", hint=hint)
        if kind in found:
            raise EngineError(f"prompt: a second {kind}, {word!r}", hint=f"name one {kind}")
        found[kind] = names[kind].index(word)
    for kind, words in names.items():
        if kind not in found:
            raise EngineError(f"prompt: names no {kind}", hint=f"one of {', '.join(words)}")
    return Prompt(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One clip of the world.

    Args:
        prompt: what moves and how.
        radius: of the shape, in pixels.
        place: what else the path needs: the fixed coordinate, the phase between both, or the circle's radius.
        phases: where on the path the shape is in each frame, in pixels of way.
    """

    prompt: Prompt
    radius: float
    place: float
    phases: Tensor = field(compare=False)

    def frames(self) -> Tensor:
        """float32 `[frames, 3, SIZE, SIZE]` in [0, 1]."""
        return self._draw(self.phases)

    def recoloured(self, colour: int) -> Clip:
        """The same way in another colour."""
        prompt = Prompt(self.prompt.shape, colour, self.prompt.motion)
        return Clip(prompt=prompt, radius=self.radius, place=self.place, phases=self.phases)

    def _draw(self, phases: Tensor) -> Tensor:
        x, y = _centres(MOTIONS[self.prompt.motion], phases, self.place)
        colour = torch.tensor(list(COLOURS.values())[self.prompt.colour])
        grid = torch.arange(SIZE, dtype=torch.float32) + 0.5
        across = grid.view(1, 1, SIZE) - x.view(-1, 1, 1)
        down = grid.view(1, SIZE, 1) - y.view(-1, 1, 1)
        cover = (0.5 - _distance(SHAPES[self.prompt.shape], across, down, self.radius)).clamp(0, 1)[:, None]
        background = torch.tensor(BACKGROUND).view(1, 3, 1, 1)
        return background + cover * (colour.view(1, 3, 1, 1) - background)


def distance_to_valid(frames: Tensor, prompt: Prompt) -> Tensor:
    """How far frames are from the nearest ones that a prompt allows: its shape in its colour at any place and size.

    With the background taken off, 1 - 2 <made, valid> / (|made|^2 + |valid|^2), the complement of Dice's coefficient: 0
    is equal, 1 is nothing in common. A squared error alone would reward a shape that fades where the generator is
    unsure (Blau and Michaeli, "The Perception-Distortion Tradeoff", 2018).

    Args:
        frames: float32 `[frames, 3, SIZE, SIZE]` in [0, 1].
        prompt: what they are to show; its motion does not matter.

    Returns:
        float32 `[frames]`.
    """
    made = frames - torch.tensor(BACKGROUND).view(3, 1, 1)
    sprites = _sprites(prompt)
    low, high = int(_LOW), int(_HIGH) + 1
    products = functional.conv2d(made, sprites, padding=_SPRITE // 2)[..., low:high, low:high].flatten(2)
    energy = made.square().sum((1, 2, 3))[:, None, None] + sprites.square().sum((1, 2, 3))[None, :, None]
    return 1 - (2 * products / energy).flatten(1).amax(1)


def _sprites(prompt: Prompt) -> Tensor:
    """The shape less the background, in all sizes and a quarter of a pixel apart, `[sprites, 3, _SPRITE, _SPRITE]`."""
    colour = torch.tensor(list(COLOURS.values())[prompt.colour]) - torch.tensor(BACKGROUND)
    grid = torch.arange(_SPRITE, dtype=torch.float32) - _SPRITE // 2 + 0.5
    # A centre lies anywhere within the middle pixel.
    within = (0.125, 0.375, 0.625, 0.875)
    covers = [
        (0.5 - _distance(SHAPES[prompt.shape], grid - x, grid[:, None] - y, radius)).clamp(0, 1)
        for radius in (4.5, 5.0, 5.5, 6.0, 6.5)
        for x in within
        for y in within
    ]
    return torch.stack(covers)[:, None] * colour.view(1, 3, 1, 1)


def draw_clip(frames: int, generator: torch.Generator, *, held_out: bool = False) -> Clip:
    """A random clip.

    Args:
        frames: how many.
        generator: of everything random in it.
        held_out: from the shapes and colours that training never combines, or from the others.
    """
    while True:
        prompt = Prompt(*(_draw_below(count, generator) for count in (len(SHAPES), len(COLOURS), len(MOTIONS))))
        if prompt.is_held_out == held_out:
            break
    motion = MOTIONS[prompt.motion]
    low, high = {"around": (6.0, 10.0), "diagonally": (0.0, 2 * (_HIGH - _LOW))}.get(motion, (_LOW, _HIGH))
    place = low + (high - low) * _draw_uniform(generator)
    radius = 4.5 + 2.0 * _draw_uniform(generator)
    direction = 1.0 if _draw_uniform(generator) < 0.5 else -1.0
    shocks = torch.randn(frames, generator=generator) * math.sqrt(1 - _SPEED_MEMORY**2)
    state = float(torch.randn(1, generator=generator))
    speeds = []
    for shock in shocks.tolist():
        speeds.append(max(0.1, _MEAN_SPEED * (1 + _SPEED_DEVIATION * state)))
        state = _SPEED_MEMORY * state + shock
    start = 100.0 * _draw_uniform(generator)
    return Clip(prompt=prompt, radius=radius, place=place, phases=start + direction * torch.tensor(speeds).cumsum(0))


def _draw_uniform(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


def _draw_below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def _centres(motion: str, phases: Tensor, place: float) -> tuple[Tensor, Tensor]:
    fixed = torch.full_like(phases, place)
    if motion == "sideways":
        return _bounce(phases), fixed
    if motion == "upright":
        return fixed, _bounce(phases)
    if motion == "diagonally":
        return _bounce(phases), _bounce(phases + place)
    angle = phases / place
    return SIZE / 2 + place * angle.cos(), SIZE / 2 + place * angle.sin()


def _bounce(phases: Tensor) -> Tensor:
    """Between the walls and back: a triangle wave of the way."""
    way = _HIGH - _LOW
    return _LOW + (phases.remainder(2 * way) - way).abs()


def _distance(shape: str, across: Tensor, down: Tensor, radius: float) -> Tensor:
    """About how far outside the shape a pixel lies, negative inside."""
    across, down = across + 0 * down, down + 0 * across
    if shape == "circle":
        return torch.hypot(across, down) - radius
    if shape == "ring":
        return (torch.hypot(across, down) - 0.7 * radius).abs() - 0.28 * radius
    if shape == "square":
        return torch.maximum(across.abs(), down.abs()) - 0.85 * radius
    if shape == "diamond":
        return (across.abs() + down.abs()) * math.sqrt(0.5) - 0.8 * radius
    if shape == "cross":
        wide = torch.maximum(across.abs() - radius, down.abs() - radius / 3)
        return torch.minimum(wide, torch.maximum(down.abs() - radius, across.abs() - radius / 3))
    slope = across.abs() * math.cos(math.pi / 6) - down * math.sin(math.pi / 6)
    return torch.maximum(slope, down) - 0.62 * radius
