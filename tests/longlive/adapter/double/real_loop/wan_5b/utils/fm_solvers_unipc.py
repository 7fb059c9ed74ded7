"""Stands in for LongLive's solver: the double's arithmetic."""

import torch


class FlowUniPCMultistepScheduler:
    def __init__(self, num_train_timesteps, shift, use_dynamic_shifting):
        pass

    def set_timesteps(self, steps, device, shift):
        self.timesteps = torch.linspace(1000, 250, steps)

    def step(self, flow, t, latents, return_dict):
        return (latents - flow / len(self.timesteps),)
