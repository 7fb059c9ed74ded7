"""Trains the VAE on the toy world: `python -m dataplanes.longlive.reference.train_vae OUT`; minutes on one core."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from dataplanes.longlive.reference.shapes import draw_clip
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, LATENT_CHANNELS, Vae
from dataplanes.longlive.reference.weights import save_weights

SEED = 20
_BATCH, _LATENTS = 8, 4
_LATENT_PENALTY = 2e-4
_STATISTICS_CLIPS = 64


def train(steps: int, *, learning_rate: float = 3e-3) -> Vae:
    """Minimise the reconstruction error and a small divergence from a standard normal.

    Args:
        steps: gradient steps of 8 clips of 13 frames.
        learning_rate: the highest, reached after a tenth of the steps; it falls to zero along a cosine.
    """
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    vae = Vae()
    optimiser = torch.optim.AdamW(vae.parameters(), lr=learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(steps):
        frames = _batch(_BATCH, _LATENTS, generator)
        mean, log_variance = vae.encoder(frames)
        latents = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)
        error = vae.decoder(latents)[:, FRAMES_PER_LATENT - 1 :] - frames
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        loss = 10 * error.square().mean() + error.abs().mean() + _LATENT_PENALTY * divergence
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            decibel = -10 * error.square().mean().log10()
            print(
                f"vae step {step} psnr {decibel:.2f} dB kl {divergence:.2f} {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    _measure_statistics(vae, generator)
    return vae


def _batch(clips: int, latents: int, generator: torch.Generator) -> Tensor:
    count = 1 + FRAMES_PER_LATENT * (latents - 1)
    return torch.stack([draw_clip(count, generator).frames() for _ in range(clips)])


@torch.no_grad()
def _measure_statistics(vae: Vae, generator: torch.Generator) -> None:
    latents = vae.encode(_batch(_STATISTICS_CLIPS, _LATENTS, generator))
    flat = latents.movedim(2, 0).reshape(LATENT_CHANNELS, -1)
    vae.mean.copy_(flat.mean(1))
    vae.deviation.copy_(flat.std(1))


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the weights")
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    save_weights(train(arguments.steps), arguments.out / "vae.safetensors")


if __name__ == "__main__":
    main()
