"""What a sender's KV looks like: planes, their roles and shapes, and how planes of one shape form stacks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from dataplanes.kvcodec.errors import CodecError

Planes = Tensor | Sequence[Tensor]
"""A dense tensor `[planes, tokens, heads, head_dim]`, or one `[tokens, heads, head_dim]` per plane."""


class PlaneRole(enum.Enum):
    """What a plane holds. A latent plane (MLA) is quantised with the key's parameters."""

    KEY = "key"
    VALUE = "value"
    LATENT = "latent"


class KVDtype(enum.Enum):
    """Element type of the KV pool."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same type in torch."""
        return _TORCH_DTYPES[self]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize

    @classmethod
    def of(cls, dtype: torch.dtype) -> KVDtype:
        """The member for a torch dtype.

        Raises:
            CodecError: KV of that dtype is not supported.
        """
        for member, known in _TORCH_DTYPES.items():
            if known is dtype:
                return member
        raise CodecError(f"KV of {dtype} cannot be coded", code="codec.dtype", hint="bfloat16, float16 or float32")


_TORCH_DTYPES = {
    KVDtype.BFLOAT16: torch.bfloat16,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.FLOAT32: torch.float32,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's keys, values or latents: `[tokens, heads, head_dim]`."""

    role: PlaneRole
    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.heads < 1 or self.head_dim < 1:
            raise CodecError(f"a plane of {self.heads} heads of {self.head_dim}", code="codec.layout")


@dataclass(frozen=True, slots=True)
class Stack:
    """Planes of one role and shape, coded together: positions in the layout and the shape they share."""

    positions: tuple[int, ...]
    plane: Plane

    @property
    def as_slice(self) -> slice | None:
        """The positions as a slice where they are evenly spaced, so that a dense tensor yields a view."""
        first, last, count = self.positions[0], self.positions[-1], len(self.positions)
        step = self.positions[1] - first if count > 1 else 1
        if self.positions == tuple(range(first, last + 1, step)):
            return slice(first, last + 1, step)
        return None


@dataclass(frozen=True)
class KVLayout:
    """The planes of one rank in the order in which they are coded, their element type and the page size.

    Args:
        planes: in coding order; SGLang's order (all keys, then all values) and layer by layer are both fine.
        dtype: element type of every plane.
        page_tokens: tokens per page; chunks start at page boundaries.
    """

    planes: tuple[Plane, ...]
    dtype: KVDtype
    page_tokens: int

    def __post_init__(self) -> None:
        if not self.planes or self.page_tokens < 1:
            raise CodecError("a layout needs at least one plane and a positive page size", code="codec.layout")

    @classmethod
    def keys_then_values(
        cls, *, layers: int, heads: int, head_dim: int, dtype: KVDtype, page_tokens: int, value_dim: int | None = None
    ) -> KVLayout:
        """`layers` key planes followed by `layers` value planes, as SGLang's MHA pool lists them."""
        keys = (Plane(PlaneRole.KEY, heads, head_dim),) * layers
        values = (Plane(PlaneRole.VALUE, heads, value_dim or head_dim),) * layers
        return cls(planes=keys + values, dtype=dtype, page_tokens=page_tokens)

    @classmethod
    def latents(cls, *, layers: int, latent_dim: int, dtype: KVDtype, page_tokens: int) -> KVLayout:
        """`layers` latent planes of one head, as SGLang's MLA pool lists them."""
        return cls(planes=(Plane(PlaneRole.LATENT, 1, latent_dim),) * layers, dtype=dtype, page_tokens=page_tokens)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Layouts are keys of caches on the path of every transfer.
        return hash((self.planes, self.dtype, self.page_tokens))

    @cached_property
    def token_bytes(self) -> int:
        """Raw bytes of one token over all planes."""
        return sum(plane.heads * plane.head_dim for plane in self.planes) * self.dtype.element_bytes

    def raw_bytes(self, tokens: int) -> int:
        """Raw bytes of `tokens` tokens."""
        return tokens * self.token_bytes

    @cached_property
    def is_dense(self) -> bool:
        """Whether all planes have one shape, so that they may be passed as one tensor."""
        return len({(plane.heads, plane.head_dim) for plane in self.planes}) == 1

    @cached_property
    def roles(self) -> frozenset[PlaneRole]:
        """The roles that occur."""
        return frozenset(plane.role for plane in self.planes)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Planes grouped by role and shape, in order of first occurrence."""
        positions: dict[Plane, list[int]] = {}
        for position, plane in enumerate(self.planes):
            positions.setdefault(plane, []).append(position)
        return tuple(Stack(positions=tuple(found), plane=plane) for plane, found in positions.items())

    def planes_by_table(self) -> dict[PlaneRole, list[int]]:
        """Positions of key (or latent) planes and of value planes, in order: the index in a list is the layer."""
        found: dict[PlaneRole, list[int]] = {}
        for position, plane in enumerate(self.planes):
            table = PlaneRole.VALUE if plane.role is PlaneRole.VALUE else PlaneRole.KEY
            found.setdefault(table, []).append(position)
        return found

    def run_lengths(self) -> list[list[str | int]]:
        """`[role, heads, head_dim, count]` per run of equal planes: the form that frames carry."""
        return [[plane.role.value, plane.heads, plane.head_dim, len(list(run))] for plane, run in groupby(self.planes)]

    def chunk(self, planes: Planes, rows: Tensor | None = None, *, request_tokens: int = 0) -> ChunkPlanes:
        """Planes, or a pool's planes and the rows of a chunk's tokens, after checking everything about them.

        Raises:
            CodecError: they are not this layout's planes, or a row lies outside.
        """
        count = self.check_planes(planes)
        if rows is not None:
            if rows.dtype is not torch.int64 or rows.dim() != 1 or rows.device != planes[0].device:
                raise CodecError("rows are a flat int64 tensor beside the planes", code="codec.rows")
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= count):
                raise CodecError(f"a row outside 0..{count - 1}", code="codec.rows")
            rows = rows.contiguous()
        return ChunkPlanes(planes, rows, request_tokens)

    def check_planes(self, planes: Planes) -> int:
        """The number of tokens in `planes`, after checking count, shapes and dtype.

        Raises:
            CodecError: they are not this layout's planes.
        """
        if isinstance(planes, Tensor):
            if planes.dim() != 4 or not self.is_dense:
                raise CodecError("a dense tensor is [planes, tokens, heads, head_dim]", code="codec.shape")
            first = self.planes[0]
            if (planes.shape[0], planes.shape[2], planes.shape[3]) != (len(self.planes), first.heads, first.head_dim):
                raise CodecError(f"a tensor of shape {tuple(planes.shape)} is not this layout", code="codec.shape")
            self._check_dtype(planes)
            return int(planes.shape[1])
        if len(planes) != len(self.planes):
            raise CodecError(f"{len(planes)} planes where {len(self.planes)} were announced", code="codec.shape")
        tokens = int(planes[0].shape[0])
        for tensor, plane in zip(planes, self.planes, strict=True):
            if tuple(tensor.shape) != (tokens, plane.heads, plane.head_dim):
                raise CodecError(f"a plane of shape {tuple(tensor.shape)} is not {plane}", code="codec.shape")
            self._check_dtype(tensor)
        return tokens

    def _check_dtype(self, tensor: Tensor) -> None:
        if tensor.dtype is not self.dtype.torch_dtype:
            raise CodecError(f"{tensor.dtype} where {self.dtype.value} was announced", code="codec.dtype")


@dataclass(frozen=True, slots=True)
class ChunkPlanes:
    """One chunk's planes where they lie: tokens in order, or rows of a pool.

    Args:
        planes: `[tokens, heads, head_dim]` each, or the whole pool's.
        rows: int64 `[tokens]`, the pool's row of each token, on the planes' device; None if the planes hold exactly
            the chunk's tokens.
        request_tokens: length of the request that they are a part of; 0 where nobody knows.
    """

    planes: Planes
    rows: Tensor | None
    request_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return int(self.planes[0].shape[0] if self.rows is None else self.rows.shape[0])

    def between(self, start: int, stop: int) -> ChunkPlanes:
        """The tokens start .. stop - 1 of the chunk, where they lie."""
        if (start, stop) == (0, self.tokens):
            return self
        if self.rows is not None:
            return ChunkPlanes(self.planes, self.rows[start:stop], self.request_tokens)
        if isinstance(self.planes, Tensor):
            return ChunkPlanes(self.planes[:, start:stop], None, self.request_tokens)
        return ChunkPlanes([plane[start:stop] for plane in self.planes], None, self.request_tokens)

    def listed(self, stack: Stack) -> list[Tensor]:
        """The planes of a stack as they lie, `rows` not applied."""
        return [self.planes[position] for position in stack.positions]

    def read(self, stack: Stack) -> Tensor:
        """`[planes of the stack, tokens, heads, head_dim]`: a view where the planes are dense and in order."""
        if self.rows is not None:
            return torch.stack([plane.index_select(0, self.rows) for plane in self.listed(stack)])
        if isinstance(self.planes, Tensor):
            span = stack.as_slice
            return self.planes[span] if span is not None else self.planes[list(stack.positions)]
        return torch.stack(self.listed(stack))

    def write(self, values: Tensor, stack: Stack) -> None:
        """Store a stack in place, converting to the planes' dtype."""
        span = stack.as_slice
        if self.rows is None and isinstance(self.planes, Tensor) and span is not None:
            self.planes[span].copy_(values)
            return
        for index, plane in enumerate(self.listed(stack)):
            if self.rows is None:
                plane.copy_(values[index])
            else:
                plane.index_copy_(0, self.rows, values[index].to(plane.device, plane.dtype))


def flat_bytes(x: Tensor) -> Tensor:
    """The elements in order as one row of bytes; a view where the tensor is contiguous."""
    flat = x.contiguous().view(-1)
    # A single element may keep any stride and still count as contiguous, but cannot be viewed as bytes.
    return (flat if flat.stride(0) == 1 else flat.clone()).view(torch.uint8)
