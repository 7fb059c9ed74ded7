"""A fingerprint follows the config and the layout of the weights, and is read without reading the weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dataplanes.sglang.model_identity import ModelFolderError, fingerprint_model, identify_model

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, *, config: dict[str, Any] | None = None, shape: int = 4, body: bytes = b"\0" * 8) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [shape], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + body)
    return folder


def test_equal_folders_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    assert fingerprint_model(write_model(tmp_path / "a")) == fingerprint_model(write_model(tmp_path / "b"))


@pytest.mark.parametrize("changes", [{"config": {**CONFIG, "rope_theta": 1e6}}, {"shape": 5}, {"body": b"\0" * 16}])
def test_config_layout_and_size_change_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    before = fingerprint_model(write_model(tmp_path / "a"))
    assert fingerprint_model(write_model(tmp_path / "b", **changes)) != before


def test_another_shard_changes_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    before = fingerprint_model(folder)
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert fingerprint_model(folder) != before


def test_the_shape_of_a_token_is_read_from_the_config(tmp_path: Path) -> None:
    identity = identify_model(write_model(tmp_path / "smol"))
    assert (identity.name, identity.layers, identity.kv_heads, identity.head_dim) == ("smol", 30, 3, 64)
    assert identity.kv_dtype == "bfloat16"
    assert identity.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert identify_model(tmp_path / "smol", kv_dtype="float32").kv_bytes_per_token == 46_080


def test_a_text_model_inside_another_is_found(tmp_path: Path) -> None:
    nested = {"text_config": {**CONFIG, "head_dim": 128}, "vision_config": {}}
    assert identify_model(write_model(tmp_path / "vl", config=nested)).head_dim == 128


def test_a_latent_counts_once_for_keys_and_values(tmp_path: Path) -> None:
    config = {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert identify_model(write_model(tmp_path / "mla", config=config)).kv_bytes_per_token == 30 * 576 * 2


@pytest.mark.parametrize(
    "damage", ["no config", "no weights", "short header", "absurd length", "no heads", "bad dtype"]
)
def test_what_is_no_model_is_refused(tmp_path: Path, damage: str) -> None:
    folder = write_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "short header":
        weights.write_bytes(weights.read_bytes()[:20])
    elif damage == "absurd length":
        weights.write_bytes(struct.pack("<Q", 2**60))
    elif damage == "no heads":
        (folder / "config.json").write_text("{}")
    elif damage == "bad dtype":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "int3"}))
    with pytest.raises(ModelFolderError):
        identify_model(folder)
