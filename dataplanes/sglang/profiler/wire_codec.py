"""The KV codec as a sender and a receiver use it: a prompt in frames, from and into memory that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import NO_ARTEFACTS, CodecError, KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.sglang.model_identity import ModelIdentity
from dataplanes.sglang.profiler.quality import Planes

FRAME_BYTES: Final = 1_500_000
"""Raw bytes of one frame, about: the size in which the data plane cuts its transfers.

Smaller frames repeat side data and coder tables more often, larger ones leave the caches.
"""

Frames = Sequence[torch.Tensor]


def layout_of(model: ModelIdentity, *, page_tokens: int = 1) -> KVLayout:
    """The planes of one rank that holds the whole model, in the order in which SGLang lists them.

    Raises:
        CodecError: the model keeps latents, which the evaluation here cannot replace.
    """
    if model.latent_dim:
        raise CodecError("models with latent KV are not profiled yet", code="codec.layout")
    return KVLayout.keys_then_values(
        layers=model.layers,
        heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=KVDtype.of(getattr(torch, model.kv_dtype)),
        page_tokens=page_tokens,
    )


class FrameCodec:
    """One configuration over one layout, with the buffers of one transfer, reused from call to call.

    What `encode` and `decode` return is overwritten by the next call.

    Args:
        frame_bytes: raw bytes of a frame, at most; but always a multiple of the codec's groups and pages.
        artefacts: calibrated data that the configuration may name.

    Raises:
        CodecError: the layout cannot carry the configuration.
    """

    def __init__(
        self,
        configuration: Configuration,
        layout: KVLayout,
        *,
        frame_bytes: int = FRAME_BYTES,
        artefacts: Mapping[str, object] = NO_ARTEFACTS,
    ) -> None:
        if not layout.is_dense:
            raise CodecError("layers of different shapes are not profiled yet", code="codec.layout")
        self._artefacts = artefacts
        self._codec = KVCodec(configuration, layout, artefacts=artefacts)
        alignment = self._codec.chunk_alignment_tokens
        self.frame_tokens = max(frame_bytes // layout.token_bytes // alignment, 1) * alignment
        self._buffers: list[torch.Tensor] = []
        self._received = torch.empty(0)

    def encode(self, planes: Planes) -> Frames:
        """The frames of a prompt, in order."""
        tokens = int(planes[0].shape[0])
        starts = range(0, tokens, self.frame_tokens)
        while len(self._buffers) < len(starts):
            # Filled, so that its pages are there before anything is timed.
            self._buffers.append(torch.full((self._codec.max_frame_bytes(self.frame_tokens),), 0, dtype=torch.uint8))
        frames = []
        for index, start in enumerate(starts):
            piece = _cut(planes, start, min(start + self.frame_tokens, tokens))
            buffer = self._buffers[index]
            size = self._codec.encode_into(
                piece, buffer, first_token=start, chunk_index=index, chunk_count=len(starts), request_tokens=tokens
            )
            frames.append(buffer[:size])
        return frames

    def decode(self, frames: Frames, tokens: int) -> Planes:
        """The planes, in the codec's own memory."""
        layout = self._codec.layout
        plane = layout.planes[0]
        shape = (len(layout.planes), tokens, plane.heads, plane.head_dim)
        if self._received.shape != shape:
            self._received = torch.zeros(shape, dtype=layout.dtype.torch_dtype).fill_(0)
        for index, frame in enumerate(frames):
            start = index * self.frame_tokens
            out = self._received[:, start : start + self.frame_tokens]
            decode_frame(frame, out, artefacts=self._artefacts)
        return self._received


def _cut(planes: Planes, start: int, end: int) -> Planes:
    if isinstance(planes, torch.Tensor):
        return planes[:, start:end]
    return [plane[start:end] for plane in planes]
