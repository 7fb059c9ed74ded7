"""Builds the transformer and the VAE from a checkpoint: the trained one, a folder, or none at all (seeded)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from dataplanes.longlive.linear.precision import LinearPrecision
from dataplanes.longlive.reference.model import CausalTransformer, ModelShape
from dataplanes.longlive.reference.stored_linear import store_linears
from dataplanes.longlive.reference.vae import Vae
from dataplanes.longlive.reference.weights import TRAINED, load_weights

TRAINED_NAME: Final = "trained"
"""The weights that come with the project."""
UNTRAINED_NAME: Final = "untrained"
"""Random ones from a fixed seed: for tests of everything but quality."""

_SEED = 7


def build_transformer(checkpoint: str, shape: ModelShape, precisions: tuple[LinearPrecision, ...]) -> CausalTransformer:
    """The transformer with its linear layers stored at `precisions`, the first in force.

    Raises:
        EngineError: no such checkpoint, or one of another shape.
    """
    model = full_transformer(checkpoint, shape)
    store_linears(model, precisions)
    return model


def full_transformer(checkpoint: str, shape: ModelShape) -> CausalTransformer:
    """The transformer in float32, as it is trained.

    Raises:
        EngineError: see `build_transformer`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = CausalTransformer(shape).eval().requires_grad_(False)
    if checkpoint != UNTRAINED_NAME:
        load_weights(model, _folder(checkpoint) / "dit.safetensors")
    return model


def build_vae(checkpoint: str) -> Vae:
    """Encoder and decoder in float32.

    Raises:
        EngineError: see `build_transformer`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        vae = Vae().eval().requires_grad_(False)
    if checkpoint != UNTRAINED_NAME:
        load_weights(vae, _folder(checkpoint) / "vae.safetensors")
    return vae


def _folder(checkpoint: str) -> Path:
    return TRAINED if checkpoint == TRAINED_NAME else Path(checkpoint)
