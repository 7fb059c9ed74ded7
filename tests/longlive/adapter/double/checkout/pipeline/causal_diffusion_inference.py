"""Contract double, not LongLive: the order in which the real loop calls what the adapter hooks, on tiny tensors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from utils.config import section_get, wan_default_config
from utils.fault import fault
from utils.quant import quantize_to_fp4
from utils.wan_5b_wrapper import WanDiffusionWrapper, WanTextEncoder, build_vae_5b

_SHAPE = wan_default_config["Wan2.2-TI2V-5B"]


class CausalDiffusionInferencePipeline(torch.nn.Module):
    def __init__(self, args, device, generator=None, text_encoder=None, vae=None):
        super().__init__()
        self.generator = WanDiffusionWrapper(**args.model_kwargs, is_causal=True) if generator is None else generator
        self.text_encoder = WanTextEncoder() if text_encoder is None else text_encoder
        self.vae = build_vae_5b(args) if vae is None else vae
        self.args = args
        self.frame_seq_length = args.image_or_video_shape[-1] * args.image_or_video_shape[-2] // 4
        self.num_transformer_blocks = _SHAPE["num_transformer_blocks"]
        self.kv_cache_pos = self.kv_cache_neg = self.crossattn_cache_pos = self.crossattn_cache_neg = None
        self.num_frame_per_block = args.num_frame_per_block
        self.quantize_kv = getattr(args, "kv_quant", False)
        self.kv_quant_scale_rule, self.kv_quant_backend = "mse", "cuda"
        self.kv_quant_config = SimpleNamespace(type="kv") if self.quantize_kv else None
        self.sampling_steps = section_get(args, "inference", "sampling_steps", 50)
        self.shift = 5.0
        self.local_attn_size = section_get(args, "inference", "local_attn_size", -1)
        self.sink_size = section_get(args, "inference", "sink_size", 0)
        self.scene_cut_prefix = section_get(args, "inference", "scene_cut_prefix", "The scene transitions. ")
        self.multi_shot_sink = section_get(args, "inference", "multi_shot_sink", False)
        self.global_sink_size = self.sink_size if self.multi_shot_sink else 0
        self.multi_shot_rope_offset = section_get(args, "inference", "multi_shot_rope_offset", 0.0)
        self.guidance_scale = section_get(args, "inference", "guidance_scale", 1.0)
        self.streaming_vae = section_get(args, "inference", "streaming_vae", False)
        self.async_vae = section_get(args, "inference", "async_vae", False)
        vae_device = section_get(args, "inference", "vae_device", None)
        self.vae_device = torch.device(vae_device) if vae_device else None
        self._dit_model.kv_quant_config = self.kv_quant_config

    @property
    def _dit_model(self):
        return self.generator.model

    def inference(self, noise, text_prompts, initial_latent=None, return_latents=False, start_frame_index=0):
        batch, frames, channels, height, width = noise.shape
        given = 0 if initial_latent is None else initial_latent.shape[1]
        assert frames % self.num_frame_per_block == 0
        blocks = frames // self.num_frame_per_block
        whole = self.text_encoder(text_prompts=[prompt for prompts in text_prompts for prompt in prompts])
        each = whole["prompt_embeds"].reshape(batch, blocks, *whole["prompt_embeds"].shape[1:])
        use_cfg = self.guidance_scale != 1.0
        if self.kv_cache_pos is None:
            self._initialize_kv_cache(batch_size=batch, dtype=noise.dtype, device=noise.device)
            self._initialize_crossattn_cache(batch_size=batch, dtype=noise.dtype, device=noise.device)
        else:
            for cache in [*self.kv_cache_pos, *(self.kv_cache_neg if use_cfg else ())]:
                cache["global_end_index"] = torch.tensor([0])
                cache["local_end_index"] = torch.tensor([0])
                cache["pinned_start"].fill_(-1)
                cache["pinned_len"].zero_()
        self._set_all_modules_global_sink_size(self.global_sink_size)
        self._dit_model.sink_size = self.sink_size
        try:
            return self._inference_inner(
                noise=noise,
                batch_size=batch,
                num_frames=frames,
                num_channels=channels,
                height=height,
                width=width,
                num_blocks=blocks,
                num_input_frames=given,
                num_output_frames=frames + given,
                output=torch.zeros([batch, frames + given, channels, height, width], dtype=noise.dtype),
                conditional_dict=whole,
                conditional_dict_list=[{"prompt_embeds": each[:, block]} for block in range(blocks)],
                unconditional_dict=self.text_encoder(text_prompts=[""]) if use_cfg else None,
                use_cfg=use_cfg,
                initial_latent=initial_latent,
                clamp_i2v_first_chunk=False,
                return_latents=return_latents,
                current_start_frame=start_frame_index,
                cache_start_frame=0,
                raw_prompts=text_prompts[0],
            )
        finally:
            self._dit_model.rope_temporal_offset = 0.0

    def _inference_inner(
        self,
        noise,
        batch_size,
        num_frames,
        num_channels,
        height,
        width,
        num_blocks,
        num_input_frames,
        num_output_frames,
        output,
        conditional_dict,
        conditional_dict_list,
        unconditional_dict,
        use_cfg,
        initial_latent,
        clamp_i2v_first_chunk,
        return_latents,
        current_start_frame,
        cache_start_frame,
        raw_prompts=None,
    ):
        def forward(latents, prompt, timestep, caches):
            return self.generator(
                noisy_image_or_video=latents,
                conditional_dict=prompt,
                timestep=timestep,
                kv_cache=caches,
                crossattn_cache=self.crossattn_cache_pos,
                current_start=current_start_frame * self.frame_seq_length,
                cache_start=cache_start_frame * self.frame_seq_length,
            )

        size = self.num_frame_per_block
        zero = torch.zeros([batch_size, size])
        for _ in range(num_input_frames // size):
            part = initial_latent[:, cache_start_frame : cache_start_frame + size]
            output[:, cache_start_frame : cache_start_frame + size] = part
            forward(part, conditional_dict, zero, self.kv_cache_pos)
            current_start_frame += size
            cache_start_frame += size
        shots = 0
        self._dit_model.rope_temporal_offset = 0.0
        streams = self.streaming_vae and not return_latents
        in_thread = streams and self.vae_device is not None
        parts = []
        if streams:
            scale = [self.vae.mean.to(noise.dtype), 1.0 / self.vae.std.to(noise.dtype)]
            self.vae.model.clear_cache()
        if in_thread:
            vae_work_queue, vae_queue_lock = [], threading.Lock()
            vae_work_ready, done, faults = threading.Event(), threading.Event(), []

            def _vae_thread_fn():
                try:
                    while True:
                        vae_work_ready.wait()
                        vae_work_ready.clear()
                        while True:
                            with vae_queue_lock:
                                if not vae_work_queue:
                                    break
                                item = vae_work_queue.pop(0)
                            if item is None:
                                done.set()
                                return
                            parts.append(self.vae.model.cached_decode(item, scale).float().clamp_(-1, 1))
                except Exception as error:  # noqa: BLE001 (as the real one)
                    faults.append(error)
                    done.set()

            threading.Thread(target=_vae_thread_fn, daemon=True).start()
        for index in range(num_blocks):
            prompt = conditional_dict_list[index]
            for block in range(self.num_transformer_blocks):
                self.crossattn_cache_pos[block]["is_init"] = False
                self.crossattn_cache_neg[block]["is_init"] = False
            is_boundary = index > 0 and raw_prompts[index].startswith(self.scene_cut_prefix)
            if is_boundary:
                shots += 1
                self._dit_model.rope_temporal_offset = shots * self.multi_shot_rope_offset
            begin = cache_start_frame - num_input_frames
            latents = noise[:, begin : begin + size]
            scheduler = self._initialize_sample_scheduler(noise)
            for t in scheduler.timesteps:
                flow, _ = forward(latents, prompt, zero + t, self.kv_cache_pos)
                if use_cfg:
                    without, _ = forward(latents, unconditional_dict, zero + t, self.kv_cache_neg)
                    flow = without + self.guidance_scale * (flow - without)
                latents = latents - flow / len(scheduler.timesteps)
            if fault("nan_at_position", current_start_frame):
                latents = latents * float("nan")
            output[:, cache_start_frame : cache_start_frame + size] = latents
            forward(latents, prompt, zero, self.kv_cache_pos)
            if use_cfg:
                forward(latents, unconditional_dict, zero, self.kv_cache_neg)
            is_cut = index > 0 and raw_prompts[index].startswith(self.scene_cut_prefix)
            if is_cut and self.multi_shot_sink and self.sink_size:
                self._pin_current_chunk(self.kv_cache_pos, size)
            if in_thread:
                with vae_queue_lock:
                    vae_work_queue.append(latents.permute(0, 2, 1, 3, 4).contiguous())
                vae_work_ready.set()
            elif streams:
                chunk = latents.permute(0, 2, 1, 3, 4).contiguous()
                parts.append(self.vae.model.cached_decode(chunk, scale).float().clamp_(-1, 1))
            current_start_frame += size
            cache_start_frame += size
        if return_latents:
            return output
        if in_thread:
            with vae_queue_lock:
                vae_work_queue.append(None)
            vae_work_ready.set()
            done.wait()
            if faults:
                raise RuntimeError(f"decoding failed: {faults[0]}") from faults[0]
        if streams:
            video = torch.cat(parts, dim=2).permute(0, 2, 1, 3, 4)
            self.vae.model.clear_cache()
            self.collected = video.shape[1]
            return video
        return self.vae.decode_to_pixel(output)

    def _initialize_kv_cache(self, batch_size, dtype, device):
        fault("oom_at_cache", self.local_attn_size)

        def layer():
            heads, size = _SHAPE["num_heads"], _SHAPE["head_dim"]
            block = self.num_frame_per_block * self.frame_seq_length
            blocks = self.local_attn_size * self.frame_seq_length // block

            def zeros():
                if not self.quantize_kv:
                    return torch.zeros([batch_size, blocks * block, heads, size], dtype=dtype)
                return [
                    quantize_to_fp4(torch.zeros([block * heads, size]), self.kv_quant_config) for _ in range(blocks)
                ]

            return {
                "k": zeros(),
                "v": zeros(),
                "quantized": self.quantize_kv,
                "block_token_size": block,
                "max_blocks": blocks,
                "num_heads": heads,
                "global_end_index": torch.tensor([0]),
                "local_end_index": torch.tensor([0]),
                "pinned_start": torch.tensor([-1]),
                "pinned_len": torch.tensor([0]),
            }

        self.kv_cache_pos = [layer() for _ in range(self.num_transformer_blocks)]
        self.kv_cache_neg = [layer() for _ in range(self.num_transformer_blocks)]

    def _initialize_crossattn_cache(self, batch_size, dtype, device):
        self.crossattn_cache_pos = [{"is_init": False} for _ in range(self.num_transformer_blocks)]
        self.crossattn_cache_neg = [{"is_init": False} for _ in range(self.num_transformer_blocks)]

    def clear_cache(self):
        self.kv_cache_pos = self.kv_cache_neg = self.crossattn_cache_pos = self.crossattn_cache_neg = None

    def _initialize_sample_scheduler(self, noise):
        return SimpleNamespace(timesteps=torch.linspace(1000, 250, self.sampling_steps))

    def _set_all_modules_global_sink_size(self, value):
        self._dit_model.global_sink_size = value

    def _pin_current_chunk(self, kv_cache, current_num_frames):
        length = min(self.sink_size, current_num_frames) * self.frame_seq_length
        for cache in kv_cache:
            cache["pinned_start"].fill_(int(cache["local_end_index"]) - current_num_frames * self.frame_seq_length)
            cache["pinned_len"].fill_(length)
