"""What a setting costs in quality, against the truth of the toy world: clips that are held out, continued.

Each segment is a clip of a shape in a colour that training never combined. Its first chunk is given as it is, the
engine makes what follows, and every frame is compared with the nearest frame that the world could show on that clip's
path (`Clip.path_frames`): a blurred, deformed, miscoloured or misplaced shape is far from all of them, an early or late
one is not. The loss is that squared distance over the energy of the shape: 0 is perfect, 1 is as if there were no
shape; it has no unit. `motion` is the movement on the screen over the true one: a setting that freezes has a low one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.longlive.reference.checkpoint import TRAINED_NAME, build_transformer, build_vae
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.rolling_cache import ChunkPlace
from dataplanes.longlive.reference.setting import FULL, Setting
from dataplanes.longlive.reference.shapes import BACKGROUND, Clip, draw_clip
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, FeatureCache

SEED = 1000
"""Of the first held-out clip; segment n has SEED + n."""
CHUNKS = 3
"""Chunks that are made after the one that is given."""

_SESSION = "quality"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLoss:
    """One held-out clip under one setting.

    Args:
        segment: which clip.
        loss: squared distance to the nearest valid frame over the shape's energy.
        motion: mean squared change from frame to frame over the true clip's.
    """

    segment: int
    loss: float
    motion: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A setting's loss over segments.

    Args:
        setting_id: the configuration's id.
        segments: one for each clip, in order.
    """

    setting_id: str
    segments: tuple[SegmentLoss, ...]

    @property
    def loss(self) -> float:
        """The mean."""
        return sum(segment.loss for segment in self.segments) / len(self.segments)

    @property
    def standard_error(self) -> float:
        """Of the mean over clips; infinite for one."""
        return standard_error([segment.loss for segment in self.segments])

    @property
    def motion(self) -> float:
        """The mean."""
        return sum(segment.motion for segment in self.segments) / len(self.segments)

    def excess(self, reference: Quality) -> tuple[float, float]:
        """Mean and standard error of how much more is lost than with `reference`, clip by clip.

        Raises:
            ValueError: the two are over different clips.
        """
        if [one.segment for one in self.segments] != [one.segment for one in reference.segments]:
            raise ValueError("reference: has other segments")
        pairs = zip(self.segments, reference.segments, strict=True)
        differences = [mine.loss - other.loss for mine, other in pairs]
        return sum(differences) / len(differences), standard_error(differences)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; infinite for fewer than two."""
    count = len(values)
    if count < 2:
        return math.inf
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


class QualityMeter:
    """Measures settings on the same clips with the same noise.

    Args:
        checkpoint: as for `LoadSpec`.
        shape: of the transformer.
    """

    def __init__(self, checkpoint: str = TRAINED_NAME, shape: ModelShape | None = None) -> None:
        self._checkpoint = checkpoint
        self._shape = ModelShape() if shape is None else shape
        self._vae = build_vae(checkpoint)

    def measure(self, configuration: Configuration, segments: Sequence[int]) -> Quality:
        """Continue the clips of `segments` under a setting.

        Raises:
            EngineError: the setting is refused, or a latent is not finite.
        """
        setting = Setting.of(configuration)
        model = build_transformer(self._checkpoint, self._shape, (setting.precision,))
        generator = Generator(model, NoExchange())
        found = tuple(self._measure_segment(generator, setting, segment) for segment in segments)
        return Quality(setting_id=configuration.config_id, segments=found)

    def reconstruct(self, segments: Sequence[int]) -> Quality:
        """The loss of encoding and decoding the true clips: what the VAE alone costs, below which no setting gets."""
        found = []
        for segment in segments:
            clip = self._clip(segment)
            with torch.no_grad():
                latents = self._vae.encode(clip.frames()[None])[0]
                found.append(_compare(segment, self._decode(latents), clip, self._given_frames))
        return Quality(setting_id="reconstruction", segments=tuple(found))

    @property
    def _given_frames(self) -> int:
        return 1 + FRAMES_PER_LATENT * (self._shape.chunk_latents - 1)

    def _clip(self, segment: int) -> Clip:
        frames = self._given_frames + CHUNKS * self._shape.chunk_latents * FRAMES_PER_LATENT
        return draw_clip(frames, torch.Generator().manual_seed(SEED + segment), held_out=True)

    @torch.no_grad()
    def _measure_segment(self, generator: Generator, setting: Setting, segment: int) -> SegmentLoss:
        clip = self._clip(segment)
        given = self._vae.encode(clip.frames()[None, : self._given_frames])[0]
        generator.open(_SESSION, setting.limits, setting.kv)
        try:
            generator.remember(_SESSION, ChunkPlace(chunk=0), clip.prompt, given)
            latents = [given]
            for chunk in range(1, CHUNKS + 1):
                made = generator.make(_SESSION, ChunkPlace(chunk=chunk), clip.prompt, SEED + segment, setting.steps)
                latents.append(made.latents)
        finally:
            generator.close(_SESSION)
        return _compare(segment, self._decode(torch.cat(latents)), clip, self._given_frames)

    def _decode(self, latents: Tensor) -> Tensor:
        cache: FeatureCache = {}
        return self._vae.stream(latents, cache)


def _compare(segment: int, frames: Tensor, clip: Clip, given: int) -> SegmentLoss:
    made, valid = frames[given:].flatten(1), clip.path_frames().flatten(1)
    background = torch.tensor(BACKGROUND).view(1, 3, 1, 1).expand(1, *frames.shape[1:]).flatten(1)
    energy = (valid - background).square().sum(1).mean()
    nearest = torch.cdist(made, valid, compute_mode="donot_use_mm_for_euclid_dist").square().amin(1)
    # Squared, so that a faint shimmer of the whole picture does not pass for motion.
    moved = frames[given - 1 :].diff(dim=0).square().mean()
    true_moved = clip.frames()[given - 1 :].diff(dim=0).square().mean()
    return SegmentLoss(segment=segment, loss=float(nearest.mean() / energy), motion=float(moved / true_moved))


def main() -> None:
    """Print the losses of settings beside the full one."""
    parser = argparse.ArgumentParser(description="Quality of settings on held-out clips.")
    parser.add_argument("--segments", type=int, default=24)
    parser.add_argument("--checkpoint", default=TRAINED_NAME)
    parser.add_argument("changes", nargs="*", type=json.loads, help='such as {"steps": 2}, on top of the full setting')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meter, segments = QualityMeter(arguments.checkpoint), range(arguments.segments)
    floor = meter.reconstruct(segments)
    print(f"VAE alone: {floor.loss:.4f} +- {floor.standard_error:.4f}, motion {floor.motion:.2f}", flush=True)
    reference = meter.measure(FULL, segments)
    for change in ({}, *arguments.changes):
        quality = meter.measure(Configuration({**FULL, **change}), segments) if change else reference
        more, error = quality.excess(reference)
        print(
            f"{json.dumps(change)}: {quality.loss:.4f} +- {quality.standard_error:.4f}, motion {quality.motion:.2f}, "
            f"beyond full {more:.4f} +- {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
