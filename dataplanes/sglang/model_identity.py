"""Which model this is: the fingerprint that quality measurements are keyed by, and the shape of its KV."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controld.contract.errors import ControldError

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class ModelFolderError(ControldError):
    """The folder does not hold a model that can be identified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model as its folder describes it.

    Args:
        name: the folder's name.
        fingerprint: see `fingerprint_model`.
        layers: decoder layers, each with one key and one value plane.
        kv_heads, head_dim: shape of a token's keys (and values) in one layer.
        kv_dtype: element type of the KV cache, by torch's name.
        latent_dim: width of the one latent that stands for keys and values (MLA); 0 where there is none.
    """

    name: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    latent_dim: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Raw bytes of one token's KV over all layers."""
        layer_elements = self.latent_dim or 2 * self.kv_heads * self.head_dim
        return self.layers * layer_elements * BYTES_PER_ELEMENT[self.kv_dtype]


def fingerprint_model(folder: Path) -> str:
    """SHA-256, hexadecimal, over `config.json` and every safetensors file's name, size and header.

    Headers hold names, dtypes, shapes and offsets of all tensors, so the digest tells architectures, precisions and
    shardings apart while a 100 GB model is identified in milliseconds. Weights of equal layout are not told apart.

    Raises:
        ModelFolderError: no config, no safetensors, or a header that is cut short.
    """
    config = folder / "config.json"
    weights = sorted(folder.glob("*.safetensors"))
    if not config.is_file() or not weights:
        raise ModelFolderError(
            f"{folder} holds no config.json with safetensors files",
            code="model.not_found",
            hint="point to a Hugging Face model folder",
        )
    digest = hashlib.sha256()
    digest.update(config.read_bytes())
    for path in weights:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_safetensors_header(path))
    return digest.hexdigest()


def identify_model(folder: Path, *, kv_dtype: str = "auto") -> ModelIdentity:
    """Read the identity of the model in `folder`.

    Args:
        folder: a Hugging Face model folder.
        kv_dtype: element type of the KV cache; "auto" is the model's own.

    Raises:
        ModelFolderError: see `fingerprint_model`, or the config lacks the attention shape.
    """
    fingerprint = fingerprint_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        layers = int(config["num_hidden_layers"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        latent_dim = int(config.get("kv_lora_rank") or 0)
        if latent_dim:
            latent_dim += int(config.get("qk_rope_head_dim") or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"{folder / 'config.json'}: no attention shape: {error!r}", code="model.unsupported"
        ) from error
    dtype = _model_dtype(config) if kv_dtype == "auto" else kv_dtype
    if dtype not in BYTES_PER_ELEMENT:
        raise ModelFolderError(
            f"{dtype} is not a KV dtype", code="model.unsupported", hint=f"one of {sorted(BYTES_PER_ELEMENT)}"
        )
    return ModelIdentity(
        name=folder.resolve().name,
        fingerprint=fingerprint,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_dtype=dtype,
        latent_dim=latent_dim,
    )


def _model_dtype(config: dict[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if len(prefix) == _LENGTH_BYTES:
            (length,) = struct.unpack("<Q", prefix)
            if length <= _MAX_HEADER_BYTES:
                header = file.read(length)
                if len(header) == length:
                    return prefix + header
    raise ModelFolderError(f"{path} has no whole safetensors header", code="model.damaged")
