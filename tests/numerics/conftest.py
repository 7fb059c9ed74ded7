"""Transformer Engine's pure torch reference of NVFP4, where it is here."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def transformer_engine() -> ModuleType:
    """Transformer Engine's module of the reference quantiser."""
    named = os.environ.get("CONTROLD_TE_REFERENCE")
    if named is None:
        try:
            return importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
        except (ImportError, RuntimeError, OSError) as error:  # its wheel without CUDA raises a RuntimeError
            pytest.skip(f"Transformer Engine does not import here and CONTROLD_TE_REFERENCE names no file: {error}")
    with pytest.MonkeyPatch.context() as patch:
        return _loaded(Path(named), patch)


def _loaded(path: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """The file alone, with what it imports of its package stood in for."""

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    contents: dict[str, dict[str, object]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.quantized_tensor": {
            "Quantizer": Quantizer,
            "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {}),
        },
        "transformer_engine.pytorch.custom_recipes": {},
        "transformer_engine.pytorch.custom_recipes.gemm": {
            "GEMMType": enum.Enum("GEMMType", ["FPROP", "DGRAD", "WGRAD"]),
            "MMParams": type("MMParams", (), {}),
        },
        "transformer_engine.pytorch.custom_recipes.reference_utils": {
            "Fp4Formats": enum.Enum("Fp4Formats", ["E2M1"]),
            "HIGH_PRECISION_FLOAT_DTYPES": (torch.float32, torch.float16, torch.bfloat16),
            "roundup_div": lambda x, y: -(-x // y),
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    spec = importlib.util.spec_from_file_location("transformer_engine_reference_nvfp4", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded
