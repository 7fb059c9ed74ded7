import pytest
import torch

from dataplanes.longlive.reference.kv_tensor import KvFormat, KvRule, encode, stored_bytes
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
