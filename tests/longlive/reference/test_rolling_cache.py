import itertools

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.longlive.reference import flow
from dataplanes.longlive.reference.checkpoint import full_transformer
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator, noise
from dataplanes.longlive.reference.kv_tensor import KvFormat, KvRule
from dataplanes.longlive.reference.live_bytes import LiveBytes
from dataplanes.longlive.reference.model import (
    CausalTransformer,
    ModelShape,
    from_tokens,
    prompt_words,
    rotary_angles,
    rotate,
    to_tokens,
)
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace, RollingCache, kept_chunks
from dataplanes.longlive.reference.shapes import Prompt
from dataplanes.numerics.native import fp8_kernels, nvfp4_kernels

TINY = ModelShape(dim=64, heads=4, layers=2, feed_forward=64)
EXACT = KvRule(plain_dtype=torch.float64)
PROMPT = Prompt(0, 0, 0)
CUTS = {4, 7}
"""Chunks that begin a shot."""


def _place(chunk: int) -> ChunkPlace:
    return ChunkPlace(chunk=chunk, shot=sum(cut <= chunk for cut in CUTS), starts_shot=chunk in CUTS)


def _seen_by(chunk: int, limits: CacheLimits) -> list[int]:
    """Written out from the definition, chunk by chunk, and from nothing else."""
    newest_cut = max((cut for cut in CUTS if cut < chunk), default=None)
    has_pin = limits.pins_shot and newest_cut is not None and newest_cut >= limits.sink
    recent = limits.window - 1 - limits.sink - (1 if has_pin else 0)
    return [
        old for old in range(chunk) if old < limits.sink or (has_pin and old == newest_cut) or chunk - old <= recent
    ]


ALL_LIMITS = [
    CacheLimits(window=2, sink=0, pins_shot=False),
    CacheLimits(window=3, sink=1, pins_shot=False),
    CacheLimits(window=3, sink=0, pins_shot=True),
    CacheLimits(window=5, sink=1, pins_shot=True),
]


@pytest.mark.parametrize("limits", ALL_LIMITS)
def test_the_cache_holds_what_the_definition_says(limits: CacheLimits) -> None:
    cache = RollingCache(limits, EXACT, 3, lambda x: x)
    tensors = [torch.zeros(1, 1, 16)]
    for chunk in range(12):
        held = [entry.chunk for entry in cache.entries]
        newest_cut = max((cut for cut in CUTS if cut < chunk), default=None)
        assert held == list(kept_chunks(chunk, limits, newest_cut)) == _seen_by(chunk, limits)
        assert len(held) <= limits.window - 1
        cache.append(tensors, tensors, _place(chunk))


class _BruteForce:
    """Keeps the keys and values of every chunk for ever, and picks those that a chunk sees by their numbers."""

    def __init__(self, model: CausalTransformer, limits: CacheLimits) -> None:
        self._model = model
        self._limits = limits
        self._history: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def make(self, chunk: int, steps: int) -> Tensor:
        x = to_tokens(noise(0, chunk, 3).double())
        levels = flow.levels(steps)
        for level, next_level in itertools.pairwise(levels):
            x = x + (next_level - level) * self._forward(chunk, x, level)[0]
        self._history[chunk] = self._forward(chunk, x, 0.0)[1]
        return from_tokens(x, 3)

    def _forward(self, chunk: int, x: Tensor, level: float) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        numbers = [*_seen_by(chunk, self._limits), chunk]
        shots = [_place(number).shot for number in numbers]
        slots = [
            3.0 * slot + frame + 8.0 * sorted(set(shots)).index(shots[slot])
            for slot in range(len(numbers))
            for frame in range(3)
        ]
        cosines, sines = rotary_angles(torch.tensor(slots, dtype=torch.float64), TINY.head_dim)
        mine: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mine.append((key[0], value[0]))
            pairs = [self._history[number][layer] for number in numbers[:-1]] + [mine[layer]]
            keys = rotate(torch.cat([pair[0] for pair in pairs]), cosines, sines)
            values = torch.cat([pair[1] for pair in pairs])
            asked = rotate(query[0], cosines[-48:], sines[-48:])
            scores = torch.einsum("qhd,khd->hqk", asked, keys) / TINY.head_dim**0.5
            return torch.einsum("hqk,khd->qhd", functional.softmax(scores, dim=-1), values)[None]

        with torch.no_grad():
            levels = torch.tensor([[level]], dtype=torch.float64)
            velocity = self._model(x[None, None], levels, prompt_words(PROMPT)[None, None], attend)
        return velocity[0, 0], mine


@pytest.mark.parametrize("limits", ALL_LIMITS)
def test_generation_is_that_of_explicit_index_sets(limits: CacheLimits) -> None:
    model = full_transformer("untrained", TINY).double()
    generator, brute = Generator(model, NoExchange()), _BruteForce(model, limits)
    generator.open("a", limits, EXACT)
    for chunk in range(9):
        made = generator.make("a", _place(chunk), PROMPT, 0, 2).latents
        assert torch.allclose(made, brute.make(chunk, 2).float(), atol=1e-6), chunk


def test_a_smaller_window_drops_at_once_and_a_larger_one_grows_again() -> None:
    cache = RollingCache(CacheLimits(window=5, sink=1, pins_shot=False), EXACT, 3, lambda x: x)
    tensors = [torch.zeros(1, 1, 16)]
    for chunk in range(8):
        cache.append(tensors, tensors, ChunkPlace(chunk=chunk))
    cache.limit(CacheLimits(window=2, sink=0, pins_shot=False))
    assert [entry.chunk for entry in cache.entries] == [7]
    cache.limit(CacheLimits(window=5, sink=1, pins_shot=False))
    cache.append(tensors, tensors, ChunkPlace(chunk=8))
    assert [entry.chunk for entry in cache.entries] == [7, 8]


def test_positions_stay_within_the_window_however_long_the_clip_is() -> None:
    limits = CacheLimits(window=5, sink=1, pins_shot=True)
    cache = RollingCache(limits, EXACT, 3, lambda x: x)
    tensors = [torch.zeros(1, 1, 16)]
    for chunk in range(100):
        cache.append(tensors, tensors, ChunkPlace(chunk=chunk, shot=chunk // 10, starts_shot=chunk % 10 == 0))
    times = cache.times(shot=10)
    assert len(times) == 15
    assert float(times.max()) <= 14 + 2 * 8
    assert bool((times.diff() > 0).all())


def test_another_precision_keeps_the_chunks_and_changes_their_bytes() -> None:
    cache = RollingCache(CacheLimits(window=5, sink=1, pins_shot=False), KvRule(), 3, lambda x: x)
    values = [torch.randn(48, 4, 32, generator=torch.Generator().manual_seed(0))]
    cache.append(values, values, ChunkPlace(chunk=0))
    plain = cache.bytes
    cache.convert(KvRule(format=KvFormat.NVFP4))
    assert [entry.chunk for entry in cache.entries] == [0]
    assert 3.5 < plain / cache.bytes < 3.56


STORED = [KvRule(), KvRule(format=KvFormat.FP8), KvRule(format=KvFormat.NVFP4, smooth=True), EXACT]


@pytest.mark.parametrize("rule", STORED, ids=lambda rule: rule.format.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_looks_at_its_history_in_order_and_then_at_itself(rule: KvRule, dtype: torch.dtype) -> None:
    cache, source = RollingCache(CacheLimits(window=4, sink=1, pins_shot=False), rule, 3, lambda x: x), _source()
    for chunk in range(6):
        keys, values = ([torch.randn(48, 4, 32, generator=source) for _ in range(2)] for _ in range(2))
        cache.append(keys, values, ChunkPlace(chunk=chunk))
    key, value = (torch.randn(48, 4, 32, generator=source, dtype=dtype) for _ in range(2))
    for layer in range(2):
        # Other strides than a new tensor's, as they come from other ranks.
        found = cache.read(layer, key.transpose(0, 1).contiguous().transpose(0, 1), value)
        expected = (
            torch.cat([*(entry.keys[layer].decode(dtype) for entry in cache.entries), key]),
            torch.cat([*(entry.values[layer].decode(dtype) for entry in cache.entries), value]),
        )
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_reading_holds_what_it_returns_and_leaves_nothing_behind() -> None:
    rule = KvRule(format=KvFormat.NVFP4)
    cache, source = RollingCache(CacheLimits(window=4, sink=1, pins_shot=False), rule, 3, lambda x: x), _source()
    one = torch.randn(48, 4, 32, generator=source)
    for chunk in range(6):
        cache.append([one], [one], ChunkPlace(chunk=chunk))
    held = cache.bytes
    with LiveBytes() as live:
        found = cache.read(0, one, one)
        assert live.peak_bytes == sum(tensor.nbytes for tensor in found) == 2 * 4 * one.nbytes
        del found
        assert live.now_bytes == 0
    assert cache.bytes == held


@pytest.mark.skipif(nvfp4_kernels.load_library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("format_", [KvFormat.FP8, KvFormat.NVFP4])
def test_a_clip_is_the_same_with_and_without_kernels(format_: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> list[Tensor]:
        generator = Generator(full_transformer("untrained", TINY), NoExchange())
        generator.open("a", ALL_LIMITS[-1], KvRule(format=format_, smooth=True))
        return [generator.make("a", _place(chunk), PROMPT, 0, 1).latents for chunk in range(6)]

    fast = make()
    for kernels in (nvfp4_kernels, fp8_kernels):
        monkeypatch.setattr(kernels, "load_library", lambda: None)
    assert all(torch.equal(*pair) for pair in zip(fast, make(), strict=True))


def _source() -> torch.Generator:
    return torch.Generator().manual_seed(0)
