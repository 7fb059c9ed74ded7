"""Contract double, not LongLive: the model's attributes, and how what its layers want to write gets into the cache."""

from __future__ import annotations

import torch
from utils.quant import copy_quantized_into, quantize_to_fp4


class CausalWanModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full([16, 16], 0.5))
        self.rope_temporal_offset = 0.0
        self.global_sink_size = 0
        self.sink_size = 0
        self.local_attn_size = -1
        self.max_attention_size = 0
        self.rope_method = "linear"
        self.original_seq_len = None
        self.kv_quant_config = None

    def _apply_cache_updates(self, kv_cache, cache_update_infos):
        for layer, (current_end, local_end, update) in cache_update_infos:
            cache, shift = kv_cache[layer], 0
            if update["action"] == "roll_and_insert":
                shift = update["pinned_shift"]
                self._roll(cache, update["sink_tokens"], update["num_evicted_tokens"], update["num_rolled_tokens"])
            self._insert(cache, update["local_start_index"], local_end, update["new_k"], update["new_v"])
            cache["pinned_start"].sub_(shift)
            cache["global_end_index"].fill_(current_end)
            cache["local_end_index"].fill_(local_end)

    def _roll(self, cache, sink, evicted, rolled):
        for name in ("k", "v"):
            if not cache["quantized"]:
                cache[name][:, sink : sink + rolled] = cache[name][:, sink + evicted : sink + evicted + rolled].clone()
                continue
            size = cache["block_token_size"]
            for block in range(sink // size, (sink + rolled) // size):
                copy_quantized_into(cache[name][block], cache[name][block + evicted // size])

    def _insert(self, cache, start, end, key, value):
        for name, new in (("k", key), ("v", value)):
            if not cache["quantized"]:
                cache[name][:, start:end] = new
                continue
            size = cache["block_token_size"]
            for number, block in enumerate(range(start // size, end // size)):
                rows = new[0, number * size : (number + 1) * size].reshape(-1, new.shape[-1])
                copy_quantized_into(cache[name][block], quantize_to_fp4(rows, self.kv_quant_config))
