"""Contract double, not LongLive: a generator of plain arithmetic whose result depends on its history and its prompt."""

from __future__ import annotations

import torch
from wan_5b.modules.causal_model import CausalWanModel
from wan_5b.modules.vae2_2 import Decoder3d, WanVAE_

from utils.config import wan_default_config
from utils.fault import fault


class WanDiffusionWrapper(torch.nn.Module):
    def __init__(self, model_name="", timestep_shift=8.0, is_causal=False, local_attn_size=-1, num_frame_per_block=1):
        super().__init__()
        self.model = CausalWanModel()

    def configure_torch_compile(
        self, *, backend="", mode="", fullgraph=False, dynamic=False, options=None, suppress_errors=True
    ):
        return True

    def forward(
        self,
        noisy_image_or_video,
        conditional_dict,
        timestep,
        kv_cache=None,
        crossattn_cache=None,
        current_start=None,
        classify_mode=False,
        concat_time_embeddings=False,
        clean_x=None,
        aug_t=None,
        cache_start=None,
        rope_temporal_offset=None,
    ):
        fault("hang_at_start", current_start)
        x = noisy_image_or_video
        assert conditional_dict["prompt_embeds"].shape[0] == x.shape[0], "one prompt a clip"
        tokens = x.shape[1] * x.shape[3] * x.shape[4] // 4
        for cache in kv_cache:
            known = int(cache["global_end_index"])
            if known == 0:
                cache["sum"] = torch.zeros(1)
            assert current_start in (known, known - tokens), (current_start, known)
        updates = [(layer, self._update(cache, x, current_start, tokens)) for layer, cache in enumerate(kv_cache)]
        self.model._apply_cache_updates(kv_cache, updates)
        # All layers alike: as many of them as the loop has made.
        history = float(kv_cache[0]["sum"])
        if not bool(timestep.any()):
            for cache in kv_cache:
                cache["sum"] += x.float().mean()
        where = self.model.rope_temporal_offset + self.model.global_sink_size / 64
        prompt = conditional_dict["prompt_embeds"].float().mean()
        flow = 0.25 * x + 0.01 * history + 0.1 * prompt + 0.001 * where
        return flow.to(x.dtype), x

    def _update(self, cache, x, current_start, tokens):
        """What a layer wants written: its keys are the latents, again and again, its values twice as large."""
        shape = wan_default_config["Wan2.2-TI2V-5B"]
        heads, size = shape["num_heads"], shape["head_dim"]
        each = x.reshape(x.shape[0], tokens, -1)
        wide = each.repeat(1, 1, -(-heads * size // each.shape[-1]))
        key = wide[..., : heads * size].reshape(x.shape[0], tokens, heads, size)
        end, known = current_start + tokens, int(cache["global_end_index"])
        local_end = int(cache["local_end_index"]) + end - known
        evicted = max(0, local_end - cache["max_blocks"] * cache["block_token_size"])
        frame = x.shape[3] * x.shape[4] // 4
        sink, pinned = max(self.model.global_sink_size, self.model.sink_size) * frame, int(cache["pinned_start"])
        if pinned >= 0:
            sink = self.model.global_sink_size * frame
            sink += int(cache["pinned_len"]) if pinned == sink else 0
        local_end -= evicted
        update = {
            "action": "roll_and_insert" if evicted else "direct_insert",
            "sink_tokens": sink,
            "num_rolled_tokens": max(local_end - tokens - sink, 0),
            "num_evicted_tokens": evicted,
            "local_start_index": local_end - tokens,
            "local_end_index": local_end,
            "new_k": key,
            "new_v": 2 * key,
            "current_end": end,
            "pinned_shift": evicted if pinned >= sink else 0,
        }
        return end, local_end, update


class WanTextEncoder(torch.nn.Module):
    def forward(self, text_prompts):
        values = [[sum(map(ord, text)) % 97 / 97.0] * 4 for text in text_prompts]
        return {"prompt_embeds": torch.tensor(values).unsqueeze(1)}


class WanVAEWrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.std = torch.zeros(4), torch.ones(4)
        self.model = WanVAE_()

    def decode_to_pixel(self, latent, use_cache=False):
        scale = [self.mean.to(latent.dtype), 1.0 / self.std.to(latent.dtype)]
        return self.model.decode(latent.permute(0, 2, 1, 3, 4), scale).float().clamp(-1, 1).permute(0, 2, 1, 3, 4)


def build_vae_5b(args):
    return WanVAEWrapper()


__all__ = ["Decoder3d", "WanDiffusionWrapper", "WanTextEncoder", "build_vae_5b", "wan_default_config"]
