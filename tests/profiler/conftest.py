"""A small model with random weights and a tokenizer of bytes: everything real but the size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{letter: number for number, letter in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,  # sharp enough that KV errors change what comes next
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dataplanes.sglang.profiler.corpus import python_manual

    folder = tmp_path_factory.mktemp("texts")
    manual = python_manual()
    (folder / "dialogue").mkdir()
    for number, document in enumerate((*manual.held_out, *manual.calibration)[:40]):
        (folder / "dialogue" / f"{number}.txt").write_text(document[:3000])
    return folder


@pytest.fixture(scope="session")
def bench(tiny_model_dir: Path, texts_dir: Path) -> Any:
    from dataplanes.sglang.profiler.model_bench import ModelBench

    return ModelBench(tiny_model_dir, texts_dir, page_tokens=16, frame_bytes=64 * 512)
