"""What a profile of the reference engine is valid for: its weights and the hardware."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import torch

from dataplanes.longlive.reference.checkpoint import TRAINED_NAME, UNTRAINED_NAME
from dataplanes.longlive.reference.weights import TRAINED

MODEL_NAME: Final = "reference"


def model_fingerprint(checkpoint: str) -> str:
    """SHA-256 over the weights, hexadecimal; of the untrained ones over their name, for they come from a seed."""
    if checkpoint == UNTRAINED_NAME:
        return hashlib.sha256(b"reference untrained").hexdigest()
    digest = hashlib.sha256(b"reference")
    folder = TRAINED if checkpoint == TRAINED_NAME else Path(checkpoint)
    for name in ("dit.safetensors", "vae.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def hardware_name() -> str:
    """As an agent of this process announces itself."""
    return f"cpu/{torch.__version__}/{torch.get_num_threads()}"
