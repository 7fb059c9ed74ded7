import pytest
import torch

from dataplanes.longlive.reference.kv_tensor import KvFormat, KvRule, KvTensor, encode, stored_bytes
from dataplanes.numerics.native import fp8_kernels, nvfp4_kernels
from dataplanes.numerics.nvfp4 import BlockRule


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _keys(offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(48, 4, 32, generator=generator) + offset * torch.randn(1, 4, 32, generator=generator)


def _error(rule: KvRule, x: torch.Tensor) -> float:
    decoded = encode(x, rule, is_key=True, agree=_same).decode(torch.float32)
    return float((decoded - x).norm() / x.norm())


@pytest.mark.parametrize("format_", list(KvFormat))
@pytest.mark.parametrize("smooth", [False, True])
def test_bytes_are_what_is_held(format_: KvFormat, smooth: bool) -> None:
    rule = KvRule(format=format_, smooth=smooth and format_ is not KvFormat.BF16)
    for is_key in (False, True):
        stored = encode(_keys(), rule, is_key=is_key, agree=_same)
        assert stored.bytes == stored_bytes(48, 128, rule, is_key=is_key)


def test_nvfp4_takes_0_5625_bytes_a_value_and_four_a_tensor() -> None:
    rule = KvRule(format=KvFormat.NVFP4)
    held = encode(_keys(), rule, is_key=True, agree=_same).bytes
    assert held == 0.5625 * 48 * 128 + 4
    assert round(2 * 48 * 128 / held, 2) == 3.55  # 3.56 but for the peak


def test_precision_orders_the_error() -> None:
    plain, fp8, nvfp4 = (_error(KvRule(format=one), _keys()) for one in KvFormat)
    four_over_six = _error(KvRule(format=KvFormat.NVFP4, block_rule=BlockRule.FOUR_OVER_SIX), _keys())
    assert plain < 0.003 < fp8 < 0.04 < four_over_six < nvfp4 < 0.12


def test_smoothing_spends_the_levels_on_what_differs() -> None:
    keys = _keys(offset=8.0)
    rough, smooth = (_error(KvRule(format=KvFormat.NVFP4, smooth=one), keys) for one in (False, True))
    assert smooth < rough / 4


def test_smoothing_leaves_values_alone() -> None:
    rule = KvRule(format=KvFormat.NVFP4, smooth=True)
    assert encode(_keys(), rule, is_key=False, agree=_same).mean is None


def test_ranks_agree_on_the_peak() -> None:
    keys = _keys()
    rule, peak = KvRule(format=KvFormat.NVFP4), keys.abs().max().view(1)
    whole = encode(keys, rule, is_key=True, agree=_same).decode(torch.float32)
    half = encode(keys[:, :2], rule, is_key=True, agree=lambda _: peak).decode(torch.float32)
    assert torch.equal(half, whole[:, :2])


def test_an_empty_chunk_stays_zero() -> None:
    for format_ in KvFormat:
        stored = encode(torch.zeros(48, 4, 32), KvRule(format=format_), is_key=True, agree=_same)
        assert not bool(stored.decode(torch.float32).any())


RULES = {
    "fp8": KvRule(format=KvFormat.FP8),
    "fp8 smooth": KvRule(format=KvFormat.FP8, smooth=True),
    "nvfp4": KvRule(format=KvFormat.NVFP4),
    "nvfp4 smooth": KvRule(format=KvFormat.NVFP4, smooth=True),
    "nvfp4 4over6 smooth": KvRule(format=KvFormat.NVFP4, block_rule=BlockRule.FOUR_OVER_SIX, smooth=True),
}


def _stress() -> dict[str, torch.Tensor]:
    keys, falling = _keys(offset=8.0), 2.0 ** -torch.arange(32.0)
    return {
        "keys": keys,
        "other shape": torch.randn(7, 3, 80, generator=torch.Generator().manual_seed(5)),
        "heads of another order": keys.transpose(0, 1)[:, :40],
        "outliers": torch.where(_keys() > 2.5, 1000 * _keys(), _keys()),
        "falling": keys * falling,
        "one number": torch.zeros(48, 4, 32).index_fill_(0, torch.tensor([3]), -1e-30),
        "tiny": keys * 1e-38,
        "large": keys * 2.0**80,
        "halves": torch.randint(-12, 13, (48, 4, 32), generator=torch.Generator().manual_seed(6)) / 2,
        "zero": torch.zeros(48, 4, 32),
    }


STRESS = _stress()


def _without_kernels(patch: pytest.MonkeyPatch) -> None:
    for kernels in (nvfp4_kernels, fp8_kernels):
        patch.setattr(kernels, "load_library", lambda: None)


@pytest.mark.skipif(nvfp4_kernels.load_library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("name", STRESS)
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_store_and_read_the_bits_of_torch(
    name: str, rule: KvRule, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = STRESS[name]
    # A rank sees the peak of all heads, which may not be its own.
    mine = x[:, : x.shape[1] // ranks]

    def agree(peak: torch.Tensor) -> torch.Tensor:
        return torch.maximum(peak, 3 * x.abs().max().view(1)) if ranks > 1 else peak

    fast = encode(mine, rule, is_key=True, agree=agree)
    decoded = {dtype: fast.decode(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    _without_kernels(monkeypatch)
    slow = encode(mine, rule, is_key=True, agree=agree)
    assert _held(fast) == _held(slow)
    assert fast.bytes == slow.bytes
    for dtype, values in decoded.items():
        assert values.shape == mine.shape and values.dtype is dtype
        assert _bytes(values) == _bytes(slow.decode(dtype)), dtype


def _held(tensor: KvTensor) -> list[bytes]:
    assert not isinstance(tensor.data, torch.Tensor)
    parts = (getattr(tensor.data, name, None) for name in ("codes", "scale", "packed", "block_scales", "peak"))
    return [_bytes(part) for part in (*parts, tensor.mean) if part is not None]


def _bytes(x: torch.Tensor) -> bytes:
    """A negative zero is no zero."""
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("rule", [KvRule(), *RULES.values()], ids=["bf16", *RULES])
def test_what_is_read_in_place_is_what_is_read(rule: KvRule) -> None:
    stored = encode(_keys(), rule, is_key=True, agree=_same)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = torch.full((3, 48, 4, 32), 7.0, dtype=dtype)
        stored.decode_into(out[1])
        assert torch.equal(out[1], stored.decode(dtype))
        assert bool((out[[0, 2]] == 7.0).all())
