"""What a setting costs in quality, against the truth of the toy world.

Each segment is a session: a prompt, of a shape in a colour that training never combined, and the seed of its noise. The
engine makes it from the prompt alone, and every frame is compared with the nearest frame that the world could show
(`shapes.distance_to_valid`): 0 is perfect, 1 is as if there were no shape; it has no unit. The first chunk is the
hardest, for everything is open; what it spoils is carried on. `motion` is how much changes from frame to frame, in
units of the shape's energy: a setting that freezes has a low one.
"""

from __future__ import annotations

import argparse
import hashlib
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
from dataplanes.longlive.reference.shapes import BACKGROUND, Clip, Prompt, distance_to_valid, draw_clip
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, FeatureCache, Vae

SEED = 1000
"""Of the first session's prompt and noise; segment n has SEED + n."""
CHUNKS = 3
"""Of a session, unless said otherwise."""

_SESSION = "quality"
_DIGESTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLoss:
    """One session under one setting.

    Args:
        segment: which.
        loss: distance to the nearest valid frame, the mean over frames.
        motion: mean squared change from frame to frame over the shape's mean energy.
        flicker: mean absolute change from frame to frame, pixels in [0, 1]: a chunk report's.
    """

    segment: int
    loss: float
    motion: float
    flicker: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A setting's loss over segments.

    Args:
        setting_id: the configuration's id.
        segments: one for each session, in order.
    """

    setting_id: str
    segments: tuple[SegmentLoss, ...]

    @property
    def loss(self) -> float:
        """The mean."""
        return sum(segment.loss for segment in self.segments) / len(self.segments)

    @property
    def standard_error(self) -> float:
        """Of the mean over sessions; infinite for one."""
        return standard_error([segment.loss for segment in self.segments])

    @property
    def motion(self) -> float:
        """The mean."""
        return sum(segment.motion for segment in self.segments) / len(self.segments)

    @property
    def flicker(self) -> float:
        """The mean."""
        return sum(segment.flicker for segment in self.segments) / len(self.segments)

    def excess(self, reference: Quality) -> tuple[float, float]:
        """Mean and standard error of how much more is lost than with `reference`, session by session.

        Raises:
            ValueError: the two are over different sessions.
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
    """Measures settings on the same prompts with the same noise.

    Args:
        checkpoint: as for `LoadSpec`.
        shape: of the transformer.
    """

    def __init__(self, checkpoint: str = TRAINED_NAME, shape: ModelShape | None = None) -> None:
        self._checkpoint = checkpoint
        self._shape = ModelShape() if shape is None else shape
        self._vae = build_vae(checkpoint)

    def under(self, configuration: Configuration) -> SettingMeter:
        """Weights under a setting, to measure clips with one by one.

        Raises:
            EngineError: the setting is refused.
        """
        setting = Setting.of(configuration)
        model = build_transformer(self._checkpoint, self._shape, (setting.precision,))
        return SettingMeter(Generator(model, NoExchange()), self._vae, setting)

    def measure(self, configuration: Configuration, segments: Sequence[int], chunks: int = CHUNKS) -> Quality:
        """Make the sessions of `segments`, of so many chunks each, under a setting.

        Raises:
            EngineError: the setting is refused, or a latent is not finite.
        """
        meter = self.under(configuration)
        found = tuple(meter.measure(segment, chunks) for segment in segments)
        return Quality(setting_id=configuration.config_id, segments=found)

    def reconstruct(self, segments: Sequence[int]) -> Quality:
        """The loss of encoding and decoding true clips: what the VAE alone costs, below which no setting gets."""
        found = []
        for segment in segments:
            clip = _clip(segment, self._shape, CHUNKS)
            with torch.no_grad():
                frames = _decode(self._vae, self._vae.encode(clip.frames()[None])[0])
            found.append(_segment_loss(segment, frames, clip.prompt))
        return Quality(setting_id="reconstruction", segments=tuple(found))


class SettingMeter:
    """Makes sessions under one setting.

    Args:
        generator: with its weights.
        vae: decodes.
        setting: in force.
    """

    def __init__(self, generator: Generator, vae: Vae, setting: Setting) -> None:
        self._generator = generator
        self._vae = vae
        self._setting = setting

    @torch.no_grad()
    def measure(self, segment: int, chunks: int = CHUNKS) -> SegmentLoss:
        """One session of so many chunks.

        Raises:
            EngineError: a latent is not finite.
        """
        prompt, seed = _clip(segment, self._generator.shape, chunks).prompt, SEED + segment
        self._generator.open(_SESSION, self._setting.limits, self._setting.kv)
        try:
            latents = [
                self._generator.make(_SESSION, ChunkPlace(chunk=chunk), prompt, seed, self._setting.steps).latents
                for chunk in range(chunks)
            ]
        finally:
            self._generator.close(_SESSION)
        return _segment_loss(segment, _decode(self._vae, torch.cat(latents)), prompt)


def corpus_digest() -> str:
    """Of what the first sessions are asked to show: they change with the prompts, their order or their choice."""
    prompts = (_clip(segment, ModelShape(), CHUNKS).prompt.text for segment in range(_DIGESTED))
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:12]


def _clip(segment: int, shape: ModelShape, chunks: int) -> Clip:
    frames = 1 + FRAMES_PER_LATENT * (chunks * shape.chunk_latents - 1)
    return draw_clip(frames, torch.Generator().manual_seed(SEED + segment), held_out=True)


def _decode(vae: Vae, latents: Tensor) -> Tensor:
    cache: FeatureCache = {}
    return vae.stream(latents, cache)


def _segment_loss(segment: int, frames: Tensor, prompt: Prompt) -> SegmentLoss:
    energy = (frames - torch.tensor(BACKGROUND).view(3, 1, 1)).square().mean()
    # Squared, so that a faint shimmer of the whole picture does not pass for motion.
    steps = frames.diff(dim=0)
    moved = steps.square().mean() / energy.clamp_min(1e-12)
    return SegmentLoss(
        segment=segment,
        loss=float(distance_to_valid(frames, prompt).mean()),
        motion=float(moved),
        flicker=float(steps.abs().mean()),
    )


def main() -> None:
    """Print the losses of settings beside the full one."""
    parser = argparse.ArgumentParser(description="Quality of settings on held-out clips.")
    parser.add_argument("--segments", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--checkpoint", default=TRAINED_NAME)
    parser.add_argument("changes", nargs="*", type=json.loads, help='such as {"steps": 2}, on top of the full setting')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meter, segments = QualityMeter(arguments.checkpoint), range(arguments.segments)
    floor = meter.reconstruct(segments)
    print(f"VAE alone: {floor.loss:.4f} +- {floor.standard_error:.4f}, motion {floor.motion:.2f}", flush=True)
    reference = meter.measure(FULL, segments, arguments.chunks)
    for change in ({}, *arguments.changes):
        quality = meter.measure(Configuration({**FULL, **change}), segments, arguments.chunks) if change else reference
        more, error = quality.excess(reference)
        print(
            f"{json.dumps(change)}: {quality.loss:.4f} +- {quality.standard_error:.4f}, motion {quality.motion:.2f}, "
            f"beyond full {more:.4f} +- {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
