"""The stage of a whole chunk: joint vectors to entropy-coded bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dataplanes.kvcodec.errors import FrameError, FrameErrorReason
from dataplanes.kvcodec.layout import ChunkPlanes, KVLayout, PlaneRole
from dataplanes.kvcodec.native.predictive_kernels import JointPlanes, PackedArtefact, PredictiveKernel
from dataplanes.kvcodec.native.stack_kernels import has_whole_tokens
from dataplanes.kvcodec.predictive.artefact import PredictiveArtefact
from dataplanes.kvcodec.predictive.place import Place, position_classes
from dataplanes.kvcodec.predictive.reference import ReferencePredictor
from dataplanes.kvcodec.predictive.rotary import angles, rotate
from dataplanes.kvcodec.stages import Bytes, Stage
from dataplanes.numerics.bounds import output_rounding


class PredictiveStage(Stage):
    """All planes of a chunk under one artefact and step.

    Its sections are coded already: the coder's tables are the artefact's, and the codec passes them through.

    Args:
        layout: one key and one value plane a layer, as the artefact wants them.
        artefact: of the model.
        step: one of the artefact's.
    """

    def __init__(self, layout: KVLayout, artefact: PredictiveArtefact, step: float) -> None:
        self._layout = layout
        self._artefact = artefact
        self._kernel = PredictiveKernel(_packed(artefact), step)
        self._step = step
        self._keys, self._values = (
            [position for position, plane in enumerate(layout.planes) if plane.role is role]
            for role in (PlaneRole.KEY, PlaneRole.VALUE)
        )

    def section_sizes(self, tokens: int, first_token: int) -> tuple[int, ...]:
        """The most that coded bytes can be; more than the planes themselves are stored raw instead."""
        return (self._layout.raw_bytes(tokens),)

    def encode(self, chunk: ChunkPlanes, first_token: int) -> list[Bytes] | None:
        """See the base class."""
        place = Place(first_token, chunk.request_tokens)
        keys, values = self._host_planes(chunk)
        symbols = self._kernel.quantise(JointPlanes(keys, values, chunk.rows), place)
        if symbols is None:
            return None
        coded = self._kernel.code(symbols, chunk.tokens, place)
        return [coded] if coded.size < self._layout.raw_bytes(chunk.tokens) else None

    def decode(self, sections: Sequence[Bytes], chunk: ChunkPlanes, first_token: int) -> None:
        """See the base class.

        Raises:
            FrameError: the bytes are not a chunk's symbols; nothing was written.
        """
        place = Place(first_token, chunk.request_tokens)
        symbols = self._kernel.uncode(np.ascontiguousarray(sections[0]), chunk.tokens, place)
        if symbols is None:
            raise FrameError(FrameErrorReason.PAYLOAD, "entropy-coded symbols do not end where they should")
        listed = chunk.planes
        keys, values = ([listed[p] for p in positions] for positions in (self._keys, self._values))
        if all(has_whole_tokens(plane) and plane.is_cpu for plane in (*keys, *values)):
            self._kernel.dequantise(symbols, JointPlanes(keys, values, chunk.rows), place)
            return
        heads, dtype = self._artefact.heads, self._layout.dtype.torch_dtype
        dims = (self._artefact.key_dim, self._artefact.value_dim)
        fresh = [[torch.empty(chunk.tokens, heads, dim, dtype=dtype) for _ in self._keys] for dim in dims]
        self._kernel.dequantise(symbols, JointPlanes(fresh[0], fresh[1], None), place)
        for target, source in zip((*keys, *values), (*fresh[0], *fresh[1]), strict=True):
            rows = slice(None) if chunk.rows is None else chunk.rows
            target[rows] = source.to(target.device)

    def write_bound(self, chunk: ChunkPlanes, bounds: ChunkPlanes, first_token: int) -> None:
        """See the base class."""
        keys, values = self._host_planes(chunk)
        artefact, rows = self._artefact, slice(None) if chunk.rows is None else chunk.rows
        cosines, sines = angles(artefact.rotary, first_token, chunk.tokens)
        stacked_keys = torch.stack([plane[rows] for plane in keys]).float()
        stacked_values = torch.stack([plane[rows] for plane in values]).float()
        joint = torch.zeros(artefact.layers, chunk.tokens, artefact.width)
        split = artefact.heads * artefact.key_dim
        end = split + artefact.heads * artefact.value_dim
        joint[..., :split] = rotate(stacked_keys, cosines, sines, -1).flatten(2)
        joint[..., split:end] = stacked_values.flatten(2)
        quantised = ReferencePredictor(artefact, self._step).quantise(
            joint,
            position_classes(Place(first_token, chunk.request_tokens), chunk.tokens, artefact.bands),
            with_bound=True,
        )
        if quantised is None:
            return
        # A coefficient on the border of two cells may fall into the other one.
        bound = quantised.bound * 1.01 + 1e-4 * joint.abs()
        key_bound, value_bound = bound[..., :split].view(stacked_keys.shape), bound[..., split:end]
        # |cos| and |sin| add up what rotation mixes; a half that is not subtracted needs the other sign.
        mixed = rotate(key_bound, cosines.abs(), sines.abs(), 1)
        half = artefact.rotary.dim // 2
        mixed[..., :half] += 2 * key_bound[..., half : 2 * half] * sines.abs()[:, None]
        self._write(bounds, self._keys, stacked_keys, mixed)
        self._write(bounds, self._values, stacked_values, value_bound.view(stacked_values.shape))

    def _write(self, bounds: ChunkPlanes, positions: Sequence[int], x: Tensor, bound: Tensor) -> None:
        bound = bound + output_rounding(x, bound, self._layout.dtype.torch_dtype)
        for layer, position in enumerate(positions):
            bounds.planes[position].copy_(bound[layer])

    def _host_planes(self, chunk: ChunkPlanes) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = ([_readable(chunk.planes[p]) for p in part] for part in (self._keys, self._values))
        return keys, values


def _readable(plane: Tensor) -> Tensor:
    # A copy that copies nothing would still let go of the interpreter's lock, once a plane.
    plane = plane if plane.is_cpu else plane.cpu()
    return plane if has_whole_tokens(plane) else plane.contiguous()


@lru_cache(maxsize=8)
def _packed(artefact: PredictiveArtefact) -> PackedArtefact:
    return PackedArtefact(artefact)
