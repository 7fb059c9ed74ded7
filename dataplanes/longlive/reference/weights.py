"""Reading and writing the small committed weights: safetensors, floating point in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dataplanes.longlive.engine import EngineError

TRAINED: Final = Path(__file__).parent / "trained"
"""The weights that come with the project: `dit.safetensors` and `vae.safetensors`."""


def save_weights(module: nn.Module, path: Path) -> None:
    """Write a module's state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().bfloat16().contiguous() for name, value in module.state_dict().items()}, path)


def load_weights(module: nn.Module, path: Path) -> None:
    """Read a module's state, into its own dtype.

    Raises:
        EngineError: the file is not there, is damaged, or is of another module.
    """
    if not path.is_file():
        raise EngineError(f"checkpoint: {path} does not exist", hint="give a folder with dit and vae .safetensors")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"checkpoint: {path} cannot be read: {error}", hint="copy it again") from error
    try:
        module.load_state_dict({name: value.to(torch.float32) for name, value in stored.items()})
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"checkpoint: {path} does not fit this engine: {error}") from error
