"""The converted model folder holds what SGLang and the tests rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from dataplanes.sglang.model import is_complete


def test_configuration_names_a_small_llama(model: Path) -> None:
    configuration = json.loads((model / "config.json").read_text())
    assert configuration["architectures"] == ["LlamaForCausalLM"]
    assert configuration["num_hidden_layers"] == 30
    assert configuration["num_key_value_heads"] == 3
    assert "quantization_config" not in configuration
    assert is_complete(model)


def test_weights_are_bfloat16_and_complete(model: Path) -> None:
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        tensor = weights.get_tensor("model.layers.29.self_attn.k_proj.weight")
    assert sum("k_proj" in name for name in names) == 30
    assert str(tensor.dtype) == "torch.bfloat16"
    assert tuple(tensor.shape) == (3 * 64, 576)
    assert bool(tensor.isfinite().all())


def test_tokenizer_splits_numbers_into_digits_and_knows_the_chat_marks(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]
    assert tokenizer.decode(tokenizer.encode("Straße, naïve 12!").ids) == "Straße, naïve 12!"
    assert tokenizer.token_to_id("<|im_end|>") is not None
    assert "<|im_start|>" in (model / "chat_template.jinja").read_text()


def test_a_folder_without_weights_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_complete(tmp_path)


@pytest.mark.slow
def test_a_broken_source_leaves_no_half_a_model(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF but not really")
    output = tmp_path / "models" / "out"
    done = subprocess.run(
        [sys.executable, "-m", "dataplanes.sglang.model", "--gguf", str(source), "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not output.exists()
    assert list(output.parent.iterdir()) == []
