"""What LongLive's quantised cache holds of the keys and values that were written into it.

LongLive collects what every layer wants to write and applies it in one function of its model; there the exact tensors
and the slots that they went to lie side by side. Of a chunk its clean pass is looked at, in three layers only, for it
costs as much to read a slot back as the attention's own reading does. Not run on a GPU yet.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from dataplanes.longlive.adapter import signature

_log = logging.getLogger(__name__)

_APPLY: Final = "_apply_cache_updates"
_MOST_DB: Final = 1e3
"""A chunk report takes no more."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Norms of what was written and of what was lost of it, on the device: looking at them waits for it."""


class KvFidelity:
    """Looks at the cache updates of one generator at a time.

    Args:
        find_dequantise: gives LongLive's `dequantize_kv_cache`; called when the first quantised cache is met, for its
            import needs more than LongLive without one does.
    """

    def __init__(self, find_dequantise: Callable[[], Callable[..., torch.Tensor]]) -> None:
        self._find = find_dequantise
        self._dequantise: Callable[..., torch.Tensor] | None = None
        self._caches: Any = None
        self._pairs: list[Pair] = []
        self._has_failed = False
        self.was_unreadable = False
        """Whether the pass that began last met a quantised cache and could not look into it; until `end`."""

    def attach(self, model: Any) -> Callable[[], None]:
        """Hook a model; how to undo it. Neither keeps the model alive, which is dropped before another is loaded.

        Raises:
            EngineError: the hooked method is missing or has other parameters.
        """
        signature.require_methods(model, {_APPLY: "kv_cache, cache_update_infos"})
        original, reference = getattr(type(model), _APPLY), weakref.ref(model)

        def apply(kv_cache: Any, cache_update_infos: Any) -> Any:
            result = original(reference(), kv_cache, cache_update_infos)
            if self._caches is kv_cache and kv_cache is not None:
                self._look(kv_cache, cache_update_infos)
            return result

        setattr(model, _APPLY, apply)

        def undo() -> None:
            found = reference()
            if found is not None:
                vars(found).pop(_APPLY, None)

        return undo

    def begin(self, caches: Any) -> None:
        """The pass that begins is one to look at; `caches` are those of all layers."""
        # One that failed never came to its end.
        self._caches, self._pairs, self.was_unreadable = caches, [], False

    def end(self) -> list[Pair]:
        """The pass is over: what was found, nothing where the cache is not quantised."""
        pairs, self._caches, self._pairs = self._pairs, None, []
        self.was_unreadable = False
        return pairs

    def _look(self, caches: Sequence[dict[str, Any]], updates: Sequence[tuple[int, tuple[Any, Any, Any]]]) -> None:
        if not caches[0].get("quantized", False):
            return
        if self._has_failed:
            self.was_unreadable = True
            return
        chosen = {0, len(caches) // 2, len(caches) - 1}
        try:
            for layer, (_, _, update) in updates:
                if layer in chosen and update is not None:
                    self._compare(caches[layer], update)
        except Exception:  # noqa: BLE001 - the edge to the checkout's code: no clip must end for a figure in its report
            self._has_failed, self._pairs, self.was_unreadable = True, [], True
            _log.exception("the KV cache cannot be read back: its signal-to-noise is None from now on")

    def _compare(self, cache: dict[str, Any], update: dict[str, Any]) -> None:
        if self._dequantise is None:
            self._dequantise = self._find()
        size = int(cache["block_token_size"])
        first, last = update["local_start_index"] // size, update["local_end_index"] // size
        for name in ("k", "v"):
            exact = update[f"new_{name}"]
            held = self._dequantise(
                cache[name][first:last], last - first, cache["num_heads"], size, exact.dtype, exact.device
            )
            exact = exact[:, : held.shape[1]]
            norms = (torch.linalg.vector_norm(one, dtype=torch.float32) for one in (exact, exact - held))
            self._pairs.append((next(norms), next(norms)))


def signal_to_noise_db(pairs: Sequence[Pair]) -> float | None:
    """Over all of them; None where nothing was looked at or lost, or it is not finite."""
    signal = math.fsum(float(one) ** 2 for one, _ in pairs)
    noise = math.fsum(float(one) ** 2 for _, one in pairs)
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return min(max(10.0 * math.log10(signal / noise), -_MOST_DB), _MOST_DB)
