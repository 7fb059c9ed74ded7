"""Contract double, not LongLive: a causal decoder with state; like the real one it decodes whole clips only."""

from __future__ import annotations

import torch
from utils.fault import fault


def unpatchify(x, patch_size):
    b, c, f, h, w = x.shape
    x = x.reshape(b, c // patch_size**2, patch_size, patch_size, f, h, w)
    return x.permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c // patch_size**2, f, h * patch_size, w * patch_size)


class Decoder3d(torch.nn.Module):
    """Each latent gives four frames (the first one gives one) that lean on the latent before."""

    def forward(self, x, feat_cache=None, feat_idx=None, first_chunk=False):
        before = feat_cache[0]
        assert (before is None) == first_chunk
        feat_cache[0] = x.clone()
        frames = [x] if first_chunk else [x * (k + 1) / 4 + before * (3 - k) / 4 for k in range(4)]
        return torch.cat(frames, dim=2).repeat_interleave(3, dim=1)


class WanVAE_(torch.nn.Module):  # noqa: N801 (the real one's name)
    def __init__(self):
        super().__init__()
        self.decoder = Decoder3d()
        self.conv2 = torch.nn.Identity()
        self.decoded = 0
        self.clear_cache()

    def decode(self, z, scale):
        self.clear_cache()
        z = z / scale[1].view(1, -1, 1, 1, 1) + scale[0].view(1, -1, 1, 1, 1)
        parts = [
            self.decoder(z[:, :, i : i + 1], feat_cache=self._feat_map, feat_idx=[0], first_chunk=i == 0)
            for i in range(z.shape[2])
        ]
        self.clear_cache()
        return unpatchify(torch.cat(parts, dim=2), patch_size=2)

    def clear_cache(self):
        fault("decoder_cleared", 0)
        self._feat_map = [None]
        self._conv_idx = [0]
