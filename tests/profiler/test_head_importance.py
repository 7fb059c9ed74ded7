"""Head profiles come from gradients, and bits handed out by them beat equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import KVCodec, KVLayout, decode_frame
from dataplanes.kvcodec.bit_allocation import allocate_bits
from dataplanes.kvcodec.presets import kivi, ratequant
from dataplanes.sglang.profiler.corpus import corpus_for
from dataplanes.sglang.profiler.head_importance import SINK_TOKENS, HeadImportance, measure_head_importance
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.quality import PromptBank, QualityMeter, load_model

MODEL_DIR = Path(__file__).parents[2] / "build/models/smollm2-135m-instruct"


def test_a_profile_covers_every_head_and_repeats(bench: Any, tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir)
    meter = QualityMeter(model, kv_dtype=torch.bfloat16)
    windows = torch.randint(1, 200, (3, 160), generator=torch.Generator().manual_seed(0)).unbind(0)
    found, again = (
        measure_head_importance(meter, model, windows, bench.layout, prompt_tokens=128, group=32) for _ in range(2)
    )
    assert found.profile.key.shape == found.profile.value.shape == (2, 2)
    assert found.profile == again.profile
    assert 2 < found.decay < 8
    # Four times the error at each bit less, about: what a uniform quantiser does.
    assert found.profile.key.mean() == pytest.approx(1)


@pytest.mark.slow
def test_bits_by_importance_beat_equal_bits_on_the_real_model() -> None:
    if not MODEL_DIR.is_dir():
        pytest.skip("make setup converts the model")
    bench = ModelBench(MODEL_DIR)
    model = load_model(MODEL_DIR)
    importance = calibrated(bench, model)
    bank = bench.bank_for("general", 128)
    # Importance is measured without the first tokens, so it is right for codecs that keep them.
    sinks = {"sink_tokens": SINK_TOKENS}
    for bits in (3, 4):
        plain = kivi(bench.layout, levels=1 << bits, group=64, window=0)
        equal = mean_loss(bank, bench.layout, Configuration({**plain, **sinks}))
        values = ratequant(bench.layout, importance.profile.profile_id, bits=float(bits), group=64, window=0)
        chosen = Configuration({**values, **sinks, "bit_decay": round(importance.decay, 3)})
        allocated = mean_loss(bank, bench.layout, chosen, importance)
        assert allocated < equal
        spread = allocate_bits(importance.profile.key, bits, importance.decay)
        assert np.unique(spread).size > 1


def calibrated(bench: ModelBench, model: Any, *, prompt_tokens: int = 512, windows: int = 6) -> HeadImportance:
    """On the part of the texts that is never measured on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR), local_files_only=True)
    texts = "\n\n".join(corpus_for("general", None).calibration)
    ids = tokenizer(texts, verbose=False, return_tensors="pt").input_ids[0]
    size = prompt_tokens + 128
    rows = [ids[start : start + size] for start in range(0, size * windows, size)]
    meter = QualityMeter(model, kv_dtype=torch.bfloat16)
    return measure_head_importance(meter, model, rows, bench.layout, prompt_tokens=prompt_tokens)


def mean_loss(
    bank: PromptBank, layout: KVLayout, configuration: Configuration, importance: HeadImportance | None = None
) -> float:
    artefacts = {importance.profile.profile_id: importance.profile} if importance else {}
    codec = KVCodec(configuration, layout, artefacts=artefacts)

    def round_trip(planes: Any) -> Any:
        return decode_frame(codec.encode(planes, first_token=0), artefacts=artefacts).planes

    losses = [bank.meter.measure(bank.prompt(512, segment), round_trip).loss_nats for segment in range(6)]
    return float(np.mean(losses))
