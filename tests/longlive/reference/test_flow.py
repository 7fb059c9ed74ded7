import itertools

import torch

from dataplanes.longlive.reference import flow


def test_levels_go_from_noise_to_data_and_linger_at_noise() -> None:
    assert flow.levels(1) == [1.0, 0.0]
    four = flow.levels(4)
    assert (four[0], four[-1]) == (1.0, 0.0)
    assert four[2] == flow.SHIFT / (1 + flow.SHIFT)
    assert [round(level, 4) for level in flow.levels(2)] == [1.0, 0.8333, 0.0]


def test_with_the_true_velocity_any_number_of_steps_ends_at_the_data() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    for steps in (1, 3, 8):
        levels = flow.levels(steps)
        x = flow.mix(data, noise, torch.tensor(1.0))
        for level, next_level in itertools.pairwise(levels):
            x = flow.denoise_step(x, level, next_level, lambda _x, _level: noise - data)
        assert torch.allclose(x, data, atol=1e-12)
