"""The look at what a quantised cache holds, on a model of one method. NOT run on the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplanes.longlive.adapter.kv_fidelity import KvFidelity, signal_to_noise_db


class Model:
    def _apply_cache_updates(self, kv_cache: Any, cache_update_infos: Any) -> None: ...


def written(value: float) -> list[Any]:
    exact = torch.full((1, 2, 1, 4), value)
    return [(0, (0, 2, {"local_start_index": 0, "local_end_index": 2, "new_k": exact, "new_v": exact}))]


def held_as(value: float) -> Any:
    return lambda *_: torch.full((1, 2, 1, 4), value)


CACHES: Any = [{"quantized": True, "block_token_size": 2, "num_heads": 1, "k": [0], "v": [0]}]


@pytest.mark.parametrize("is_over", [False, True], ids=["begun anew", "given up"])
def test_what_a_pass_that_never_ended_wrote_is_not_in_the_next_one(is_over: bool) -> None:
    held = [held_as(0.0), held_as(0.9)]
    fidelity, model = KvFidelity(lambda: lambda *arguments: held[0](*arguments)), Model()
    fidelity.attach(model)
    fidelity.begin(CACHES)
    model._apply_cache_updates(CACHES, written(1.0))
    if is_over:
        fidelity.end()
        model._apply_cache_updates(CACHES, written(1.0))
        assert fidelity.end() == [], "nobody asked to look at it"
    del held[0]
    fidelity.begin(CACHES)
    model._apply_cache_updates(CACHES, written(1.0))
    pairs = fidelity.end()
    assert len(pairs) == 2, "a key and a value"
    assert signal_to_noise_db(pairs) == pytest.approx(20.0, abs=1e-3)
