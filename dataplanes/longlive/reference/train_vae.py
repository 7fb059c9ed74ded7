"""Trains the VAE on the toy world: `python -m dataplanes.longlive.reference.train_vae OUT`; minutes on one core."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from dataplanes.longlive.reference.shapes import draw_clip
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, LATENT_CHANNELS, Vae
from dataplanes.longlive.reference.weights import load_weights, save_weights

SEED = 20
_BATCH, _LATENTS = 8, 4
_LATENT_PENALTY = 2e-4
_STATISTICS_CLIPS = 64


def train(vae: Vae, steps: int, *, seed: int = SEED, learning_rate: float = 3e-3, decoder_only: bool = False) -> None:
    """Minimise the reconstruction error and a small divergence from a standard normal.

    Args:
        vae: is changed.
        steps: gradient steps of 8 clips of 13 frames.
        seed: of clips and noise.
        decoder_only: leave the encoder and so every latent as it is; then flicker counts, too.
        learning_rate: the highest, reached after a tenth of the steps; it falls to zero along a cosine.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list((vae.decoder if decoder_only else vae).parameters())
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(steps):
        frames = _batch(_BATCH, _LATENTS, generator)
        with torch.set_grad_enabled(not decoder_only):
            mean, log_variance = vae.encoder(frames)
        latents = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)
        error = vae.decoder(latents)[:, FRAMES_PER_LATENT - 1 :] - frames
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        loss = 10 * error.square().mean() + error.abs().mean() + _LATENT_PENALTY * divergence
        if decoder_only:
            # An error that changes from frame to frame is seen more than one that stays.
            loss = loss + error.diff(dim=1).abs().mean()
        vae.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            decibel = -10 * error.square().mean().log10()
            print(
                f"vae step {step} psnr {decibel:.2f} dB kl {divergence:.2f} {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    if not decoder_only:
        _measure_statistics(vae, generator)


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
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--decoder-only", action="store_true", help="leave the encoder as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    vae = Vae()
    if arguments.start is not None:
        load_weights(vae, arguments.start)
    train(
        vae,
        arguments.steps,
        seed=arguments.seed,
        learning_rate=arguments.learning_rate,
        decoder_only=arguments.decoder_only,
    )
    save_weights(vae, arguments.out / "vae.safetensors")


if __name__ == "__main__":
    main()
