"""Outside implementations of KV codecs behind one face, for `codecs.py`: measured where they import.

None is a dependency. Bytes are counted in the implementation's favour: what it would need on a wire if its codes were
packed, without headers. What each package takes to install and what was left out stands in docs/kv_presets.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEPT_SHARES = (0.75, 0.5)
"""Of a prompt's tokens, for methods that drop the others."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """What a codec made of planes.

    Args:
        wire_bytes: what would have to be sent.
        content: for the codec's own `decode`.
    """

    wire_bytes: float
    content: Any


class OutsideCodec(ABC):
    """Takes planes `[planes, tokens, heads, head_dim]` (bfloat16, keys of all layers, then values) there and back."""

    name: str
    is_lossless = False

    @abstractmethod
    def encode(self, planes: Tensor) -> Coded:
        """Everything that decoding needs."""

    @abstractmethod
    def decode(self, coded: Coded) -> Tensor:
        """Planes of the shape and dtype that were given."""


class TokenDropper(ABC):
    """Keeps some tokens of each head as they are, so that a receiver has a shorter cache."""

    name: str

    @abstractmethod
    def keep(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of one layer, `[1, heads, tokens, head_dim]` to fewer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """An implementation that cannot be measured here, and why."""

    name: str
    reason: str


class _TorchaoNvfp4(OutsideCodec):
    """Codes of 4 bits packed, e4m3 scales of 16, a float32 scale per plane."""

    def __init__(self) -> None:
        self._module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        self.name = f"torchao {_version('torchao')} NVFP4"

    def encode(self, planes: Tensor) -> Coded:
        """See the base class."""
        parts = []
        for plane in planes:
            scale = self._module.per_tensor_amax_to_scale(plane.abs().amax().float())
            parts.append(self._module.NVFP4Tensor.to_nvfp4(plane.flatten(1), per_tensor_scale=scale))
        size = sum(part.qdata.nbytes + part.scale.nbytes + 4 for part in parts)
        return Coded(size, (planes.shape, parts))

    def decode(self, coded: Coded) -> Tensor:
        """See the base class."""
        shape, parts = coded.content
        return torch.stack([part.dequantize(torch.bfloat16) for part in parts]).view(shape)


class _TorchaoMx(OutsideCodec):
    """OCP microscaling: a power of two for each 32 elements."""

    def __init__(self, name: str, element: torch.dtype) -> None:
        self._module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        self._element = element
        self.name = f"torchao {_version('torchao')} {name}"

    def encode(self, planes: Tensor) -> Coded:
        """See the base class."""
        coded = self._module.MXTensor.to_mx(planes.flatten(0, 1).flatten(1), self._element, 32)
        return Coded(coded.qdata.nbytes + coded.scale.nbytes, (planes.shape, coded))

    def decode(self, coded: Coded) -> Tensor:
        """See the base class."""
        shape, content = coded.content
        return torch.as_tensor(content.dequantize(torch.bfloat16)).view(shape)


class _Turboquant(OutsideCodec):
    """The PyPI package of that name, with a float32 norm per head vector; it keeps a byte a code, counted as `bits`."""

    def __init__(self, bits: int, head_dim: int) -> None:
        if not hasattr(np, "trapz"):
            # NumPy 2.4 dropped this name, which the package calls.
            vars(np)["trapz"] = np.trapezoid
        self._quantiser = importlib.import_module("turboquant.core").TurboQuantMSE(head_dim, bits, device="cpu")
        self._bits = bits
        self.name = f"turboquant {_version('turboquant')}, {bits} bits"

    def encode(self, planes: Tensor) -> Coded:
        """See the base class."""
        indices, norms = self._quantiser.quantize(planes)
        return Coded(indices.numel() * self._bits / 8 + norms.numel() * 4, (indices, norms))

    def decode(self, coded: Coded) -> Tensor:
        """See the base class."""
        indices, norms = coded.content
        values: Tensor = self._quantiser.dequantize(indices, norms)
        return values.bfloat16()


class ConstrictionAns(OutsideCodec):
    """Lossless: high and low bytes apart, each with the table of its own frequencies."""

    is_lossless = True

    def __init__(self) -> None:
        self._stream = importlib.import_module("constriction").stream
        self.name = f"constriction {_version('constriction')} ANS, raw bytes"

    def encode(self, planes: Tensor) -> Coded:
        """See the base class."""
        data = planes.contiguous().view(torch.uint8).flatten().numpy()
        size, halves = 0, []
        for half in (data[0::2], data[1::2]):
            counts = np.bincount(half, minlength=256).astype(np.float32) + 1e-3
            model = self._stream.model.Categorical(counts / counts.sum(), perfect=False)
            coder = self._stream.stack.AnsCoder()
            coder.encode_reverse(half.astype(np.int32), model)
            words = coder.get_compressed()
            size += words.nbytes + 2 * 256
            halves.append((words, model, len(half)))
        return Coded(size, (planes.shape, halves))

    def decode(self, coded: Coded) -> Tensor:
        """See the base class."""
        shape, halves = coded.content
        data = np.empty(2 * halves[0][2], np.uint8)
        for start, (words, model, count) in enumerate(halves):
            data[start::2] = self._stream.stack.AnsCoder(words).decode(model, count)
        return torch.from_numpy(data).view(torch.bfloat16).view(shape)


class _NvcompAns(OutsideCodec):
    """Lossless, on a GPU: KVServe's coder. Not run where this was written."""

    is_lossless = True

    def __init__(self) -> None:
        self._nvcomp = importlib.import_module("nvidia.nvcomp")
        if not torch.cuda.is_available():
            raise ImportError("nvCOMP is installed, but there is no GPU")
        self._codec = self._nvcomp.Codec(algorithm="ANS")
        self.name = f"nvCOMP {self._nvcomp.__version__} ANS, raw bytes, on a GPU (host copies included)"

    def encode(self, planes: Tensor) -> Coded:
        """See the base class."""
        data = planes.contiguous().view(torch.uint8).flatten().cuda()
        coded = self._codec.encode(self._nvcomp.as_array(data))
        torch.cuda.synchronize()
        return Coded(coded.buffer_size, (planes.shape, coded))

    def decode(self, coded: Coded) -> Tensor:
        """See the base class."""
        shape, content = coded.content
        data = torch.as_tensor(self._codec.decode(content), device="cuda")
        return data.view(torch.uint8).view(torch.bfloat16).view(shape).cpu()


class _Kvpress(TokenDropper):
    """A press that looks at keys alone."""

    def __init__(self, press: str, share: float) -> None:
        self._press = getattr(importlib.import_module("kvpress"), press)(compression_ratio=1 - share)
        self.name = f"kvpress {_version('kvpress')} {press}, {share:.0%} kept"

    def keep(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        module = SimpleNamespace(head_dim=keys.shape[-1])
        kept: tuple[Tensor, Tensor] = self._press.compress(module, None, keys, values, None, {})
        return kept


Builder = Callable[[], OutsideCodec | TokenDropper]


def builders(head_dim: int) -> dict[str, Builder]:
    """All that are known, by name; a builder raises where its package is not installed."""
    return {
        "torchao NVFP4": _TorchaoNvfp4,
        "torchao MXFP8": lambda: _TorchaoMx("MXFP8 e4m3", torch.float8_e4m3fn),
        "torchao MXFP4": lambda: _TorchaoMx("MXFP4", torch.float4_e2m1fn_x2),
        **{f"turboquant, {bits} bits": lambda bits=bits: _Turboquant(bits, head_dim) for bits in (2, 3, 4)},
        "constriction ANS": ConstrictionAns,
        "nvCOMP ANS": _NvcompAns,
        **{
            f"kvpress {press}, {share:.0%} kept": lambda press=press, share=share: _Kvpress(press, share)
            for press in ("KnormPress", "KeyDiffPress", "StreamingLLMPress")
            for share in KEPT_SHARES
        },
    }


def find_outside(head_dim: int) -> tuple[list[OutsideCodec], list[TokenDropper], list[Absent]]:
    """Codecs and droppers that run here, and those that do not."""
    codecs: list[OutsideCodec] = []
    droppers: list[TokenDropper] = []
    absent: list[Absent] = []
    for name, build in builders(head_dim).items():
        try:
            found = build()
            if isinstance(found, OutsideCodec):
                _check(found, head_dim)
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            absent.append(Absent(name=name, reason=f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        if isinstance(found, OutsideCodec):
            codecs.append(found)
        else:
            droppers.append(found)
    return codecs, droppers, absent


def _check(codec: OutsideCodec, head_dim: int) -> None:
    """Once there and back on a little KV: some packages import where they do not run."""
    planes = torch.randn(2, 16, 2, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    decoded = codec.decode(codec.encode(planes))
    if decoded.shape != planes.shape or decoded.dtype != planes.dtype:
        raise ValueError(f"gives back {decoded.dtype} {list(decoded.shape)} for {planes.dtype} {list(planes.shape)}")
    if codec.is_lossless and not torch.equal(decoded.view(torch.int16), planes.view(torch.int16)):
        raise ValueError("is not lossless")


def shortened(dropper: TokenDropper, planes: Sequence[Tensor] | Tensor) -> list[tuple[Tensor, Tensor]]:
    """What a dropper keeps of each layer's keys and values, `[1, heads, tokens, head_dim]`."""
    layers = len(planes) // 2
    pairs = ((planes[layer], planes[layers + layer]) for layer in range(layers))
    return [dropper.keep(*(plane.transpose(0, 1)[None].float() for plane in pair)) for pair in pairs]


def _version(package: str) -> str:
    return importlib.metadata.version(package)
