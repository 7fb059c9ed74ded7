"""Trains the transformer on latents of the toy world: `python -m dataplanes.longlive.reference.train_dit FOLDER`.

Teacher forcing, as LongLive's first stage: a sequence is all clean chunks and all noisy ones; a noisy chunk sees itself
and the clean chunks before it. FOLDER holds `vae.safetensors` and receives `dit.safetensors`. Minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from dataplanes.longlive.reference.flow import mix, shifted
from dataplanes.longlive.reference.model import (
    SHOT_OFFSET,
    CausalTransformer,
    ModelShape,
    from_tokens,
    prompt_words,
    rotary_angles,
    rotate,
    to_tokens,
)
from dataplanes.longlive.reference.shapes import COLOURS, draw_clip
from dataplanes.longlive.reference.vae import FRAMES_PER_LATENT, Vae
from dataplanes.longlive.reference.weights import load_weights, save_weights

SEED = 21
_BATCH = 8
_CHUNKS = 5
"""Chunks of a training sequence."""
_CLIP_CHUNKS = 9
"""Chunks of a stored clip: a sequence may leave some out after its first, which then is a sink."""
_SAVE_STEPS = 100
_LEVELS = 8
_GUESS_LEVELS = 6
"""Of those, up to which level a guess begins."""
_AVERAGE = 0.99
"""Decay of the averaged weights that are kept."""


@dataclass(frozen=True, slots=True)
class Library:
    """Clips as latents.

    Args:
        latents: `[clips, 2, chunks, chunk_latents, channels, height, width]`; the second is the same way in another
            colour.
        words: integers `[clips, 2, 3]`.
    """

    latents: Tensor
    words: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Training sequences.

    Args:
        latents: `[batch, chunks, chunk_latents, channels, height, width]`.
        words: integers `[batch, chunks, 3]`.
        shots: which shot each chunk is of, `[batch, chunks]`.
        seen: how many clean chunks before it a chunk sees, `[batch]`.
        weights: of each chunk in the loss, `[batch, chunks]`.
    """

    latents: Tensor
    words: Tensor
    shots: Tensor
    seen: Tensor
    weights: Tensor


@torch.no_grad()
def build_library(vae: Vae, clips: int, shape: ModelShape, generator: torch.Generator) -> Library:
    """Draw clips and encode them."""
    latents: list[Tensor] = []
    words: list[Tensor] = []
    frames = 1 + FRAMES_PER_LATENT * (_CLIP_CHUNKS * shape.chunk_latents - 1)
    while len(latents) < clips:
        clip = draw_clip(frames, generator)
        other = clip.recoloured(int(torch.randint(len(COLOURS), (1,), generator=generator)))
        if other.prompt.is_held_out:
            continue
        encoded = vae.encode(torch.stack([clip.frames(), other.frames()]))
        latents.append(encoded.view(2, _CLIP_CHUNKS, shape.chunk_latents, *encoded.shape[2:]).half())
        words.append(torch.stack([prompt_words(clip.prompt), prompt_words(other.prompt)]))
    return Library(torch.stack(latents), torch.stack(words))


def draw_batch(library: Library, generator: torch.Generator) -> Batch:
    """Sequences of every kind that generation meets: plain, with a sink far back, a scene cut, a change of prompt."""
    rows = [_draw_sequence(library, generator) for _ in range(_BATCH)]
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _draw_sequence(library: Library, generator: torch.Generator) -> tuple[Tensor, ...]:
    def below(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    clip, kind = below(len(library.latents)), below(8)
    chunks = list(range(_CHUNKS))
    weights, shots = torch.ones(_CHUNKS), torch.zeros(_CHUNKS)
    seen = (1, 2, _CHUNKS, _CHUNKS)[below(4)]
    if kind < 3:
        gap = 1 + below(_CLIP_CHUNKS - _CHUNKS)
        chunks = [0, *(gap + chunk for chunk in chunks[1:])]
        # Generation always sees the chunk before; the second one here has only the sink.
        weights[1] = 0.0
        seen = _CHUNKS
    latents = library.latents[clip, 0, chunks].clone()
    words = library.words[clip, 0].expand(_CHUNKS, -1).clone()
    start = 1 + below(_CHUNKS - 1)
    if kind in (3, 4):
        other, first = below(len(library.latents)), 1 + below(_CLIP_CHUNKS - _CHUNKS)
        latents[start:] = library.latents[other, 0, first : first + _CHUNKS - start]
        words[start:] = library.words[other, 0]
        shots[start:] = 1.0
        seen = _CHUNKS
    elif kind == 5:
        latents[start:] = library.latents[clip, 1, start:_CHUNKS]
        words[start:] = library.words[clip, 1]
    return latents.float(), words, shots, torch.tensor(seen), weights


def velocity_loss(
    model: CausalTransformer, batch: Batch, generator: torch.Generator, *, own_history: float = 0.0
) -> Tensor:
    """Mean squared error of the velocity of every noisy chunk.

    Args:
        model: predicts.
        batch: sequences.
        generator: of noise and levels.
        own_history: share of the history's chunks that are the model's own guesses in place of the truth, so that it
            learns to mend what it spoilt: a long session sees nothing else.
    """
    size, chunks = batch.words.shape[:2]
    noise = torch.randn(batch.latents.shape, generator=generator)
    # Only at the levels that generation meets with 1, 2, 4 or 8 steps.
    level = shifted(torch.randint(1, _LEVELS + 1, (size, chunks), generator=generator) / _LEVELS)
    history = batch.latents
    if own_history:
        guessed = _guess(model, batch, generator)
        replaced = torch.rand(size, chunks, generator=generator) < own_history
        history = torch.where(replaced[..., None, None, None, None], guessed, history)
    predicted = _predict(model, batch, history, mix(batch.latents, noise, level[..., None, None, None, None]), level)
    error = (predicted - to_tokens(noise - batch.latents)).square().mean((-2, -1))
    return (error * batch.weights).sum() / batch.weights.sum()


@torch.no_grad()
def _guess(model: CausalTransformer, batch: Batch, generator: torch.Generator) -> Tensor:
    """What the model makes of every chunk from a level at which its place can still be told."""
    size, chunks = batch.words.shape[:2]
    noise = torch.randn(batch.latents.shape, generator=generator)
    level = shifted(torch.randint(1, _GUESS_LEVELS + 1, (size, chunks), generator=generator) / _LEVELS)
    noisy = mix(batch.latents, noise, level[..., None, None, None, None])
    velocity = _predict(model, batch, batch.latents, noisy, level)
    tokens = to_tokens(noisy) - level[..., None, None] * velocity
    return from_tokens(tokens, batch.latents.shape[2])


def _predict(model: CausalTransformer, batch: Batch, history: Tensor, noisy: Tensor, level: Tensor) -> Tensor:
    """Velocities of all noisy chunks, each of which sees the history before it."""
    chunks = batch.words.shape[1]
    tokens = torch.cat([to_tokens(history), to_tokens(noisy)], dim=1)
    cosines, sines = _angles(batch, model.shape)
    mask = _mask(batch.seen, chunks, model.shape.chunk_tokens)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        turned, keys = rotate(query, cosines, sines), rotate(key, cosines, sines)
        turned, keys, values = (x.transpose(1, 2) for x in (turned, keys, value))
        return functional.scaled_dot_product_attention(turned, keys, values, attn_mask=mask).transpose(1, 2)

    levels = torch.cat([torch.zeros_like(level), level], dim=1)
    predicted: Tensor = model(tokens, levels, batch.words.repeat(1, 2, 1), attend)
    return predicted[:, chunks:]


def _angles(batch: Batch, shape: ModelShape) -> tuple[Tensor, Tensor]:
    chunks = batch.shots.shape[1]
    frames = torch.arange(chunks * shape.chunk_latents, dtype=torch.float32).view(chunks, -1)
    times = (frames + SHOT_OFFSET * batch.shots[..., None]).flatten(1)
    return rotary_angles(times.repeat(1, 2), shape.head_dim)


def _mask(seen: Tensor, chunks: int, tokens: int) -> Tensor:
    """Which key a query sees, `[batch, 1, 2 * chunks * tokens, the same]`: clean chunks first, then noisy ones."""
    index = torch.arange(chunks)
    back = index[:, None] - index
    near = back <= seen.view(-1, 1, 1)
    clean, before, same = near & (back >= 0), near & (back > 0), (back == 0).expand(len(seen), -1, -1)
    blocks = torch.cat([torch.cat([clean, torch.zeros_like(same)], dim=2), torch.cat([before, same], dim=2)], dim=1)
    return blocks.repeat_interleave(tokens, 1).repeat_interleave(tokens, 2)[:, None]


def train(
    model: CausalTransformer,
    library: Library,
    steps: int,
    generator: torch.Generator,
    *,
    out: Path,
    learning_rate: float = 2e-3,
    own_history: float = 0.0,
) -> None:
    """Train, and write the averaged weights.

    Args:
        model: is changed.
        library: clips.
        steps: gradient steps of 8 sequences of 5 chunks.
        generator: of everything random.
        out: where the averaged weights are written now and then.
        learning_rate: the highest; it falls to nearly zero over the last half.
        own_history: see `velocity_loss`.
    """
    averaged = copy.deepcopy(model)
    matrices = [
        parameter
        for name, parameter in model.blocks.named_parameters()
        if name.endswith("weight") and parameter.dim() == 2
    ]
    known = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    optimisers = (
        # Orthogonalised momentum takes about half the steps here.
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98)),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, steps)) for one in optimisers]
    begin, recent = time.monotonic(), 0.0
    for step in range(steps):
        loss = velocity_loss(model, draw_batch(library, generator), generator, own_history=own_history)
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        _average(averaged, model, min(_AVERAGE, (step + 1) / (step + 10)))
        recent += (loss.item() - recent) / min(step + 1, 25)
        if step % _SAVE_STEPS == 0 or step == steps - 1:
            save_weights(averaged, out)
        if step % 25 == 0 or step == steps - 1:
            print(f"dit step {step} loss {recent:.4f} {time.monotonic() - begin:.0f} s", flush=True)


def _rate(step: int, steps: int) -> float:
    """Share of the highest learning rate: up over a twentieth of the steps, level, then down over the last half."""
    return min(1.0, (step + 1) / (0.05 * steps), max(0.02, 2 * (1 - step / steps)))


def _start_near_zero(model: CausalTransformer) -> None:
    """Predict zero at first and let every layer begin as an identity: training is quicker so."""
    for module in (model.head, model.time_projection):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
    for name, parameter in model.prompt_embedding.named_parameters():
        assert name.endswith("weight")
        nn.init.normal_(parameter, std=0.3)


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def average_weights(path: Path, other: Path) -> None:
    """Replace weights by the mean of them and of others that were trained from the same start.

    The mean lies flatter than either (Wortsman et al., "Model soups", 2022, arXiv 2203.05482, section 3), so that it
    also bears coarser arithmetic.

    Raises:
        EngineError: a file is not there, or is of another model.
    """
    first, second = CausalTransformer(ModelShape()), CausalTransformer(ModelShape())
    load_weights(first, path)
    load_weights(second, other)
    _average(first, second, 0.5)
    save_weights(first, path)


def main() -> None:
    """Build the library, train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--clips", type=int, default=700)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--own-history", type=float, default=0.0, help="share of the history that is the model's own")
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument(
        "--average-with",
        type=Path,
        metavar="FILE",
        help="only write the mean of FOLDER's weights and these, no training",
    )
    arguments = parser.parse_args()
    out = arguments.folder / "dit.safetensors"
    if arguments.average_with is not None:
        average_weights(out, arguments.average_with)
        return
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    vae = Vae()
    load_weights(vae, arguments.folder / "vae.safetensors")
    model = CausalTransformer(ModelShape())
    _start_near_zero(model)
    if arguments.start is not None:
        load_weights(model, arguments.start)
    library = build_library(vae, arguments.clips, model.shape, generator)
    print(f"{len(library.latents)} clips", flush=True)
    train(
        model,
        library,
        arguments.steps,
        generator,
        out=out,
        learning_rate=arguments.learning_rate,
        own_history=arguments.own_history,
    )


if __name__ == "__main__":
    main()
