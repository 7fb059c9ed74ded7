import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.quality import Quality, QualityMeter, SegmentLoss, _compare, standard_error
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import BACKGROUND, draw_clip

TINY = ModelShape(dim=64, heads=4, layers=2, feed_forward=64)


def _clip(seed: int = 0):
    return draw_clip(45, torch.Generator().manual_seed(seed), held_out=True)


def _loss(frames: torch.Tensor) -> float:
    return _compare(0, frames, _clip(), 9).loss


def test_the_truth_loses_nothing_and_no_shape_loses_all() -> None:
    clip = _clip()
    nothing = torch.tensor(BACKGROUND).view(1, 3, 1, 1).expand(45, 3, 32, 32)
    assert _loss(clip.frames()) < 0.01
    assert 0.9 < _loss(nothing) < 1.1


def test_early_or_late_is_no_loss_but_blur_colour_and_place_are() -> None:
    frames = _clip().frames()
    early = torch.cat([frames[:9], frames[12:], frames[-3:]])
    assert _loss(early) < 0.01
    blurred = frames.unfold(0, 8, 1).mean(-1)
    assert _loss(torch.cat([frames[:9], blurred[:36]])) > 0.1
    assert _loss(_clip().recoloured((_clip().prompt.colour + 1) % 8).frames()) > 0.1
    assert _loss(frames.roll(8, dims=3 if _clip().prompt.text.endswith("upright") else 2)) > 0.1


def test_a_frozen_clip_has_no_motion() -> None:
    frames = _clip().frames()
    frozen = frames[:9].repeat(5, 1, 1, 1)
    frozen[:] = frames[0]
    assert _compare(0, frozen, _clip(), 9).motion == 0.0
    assert _compare(0, frames, _clip(), 9).motion == pytest.approx(1.0)


def test_a_setting_is_compared_clip_by_clip() -> None:
    def quality(*losses: float) -> Quality:
        segments = tuple(SegmentLoss(segment=n, loss=loss, motion=1.0) for n, loss in enumerate(losses))
        return Quality(setting_id="x", segments=segments)

    mean, error = quality(1.1, 5.1, 3.1).excess(quality(1.0, 5.0, 3.0))
    assert mean == pytest.approx(0.1) and error == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="other segments"):
        quality(1.0).excess(quality(1.0, 2.0))
    assert standard_error([1.0]) == float("inf")
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_a_segment_is_the_same_clip_and_noise_every_time() -> None:
    meter = QualityMeter("untrained", TINY)
    setting = Configuration({**FULL, "steps": 1})
    first, again = (meter.measure(setting, range(1)) for _ in range(2))
    assert first == again
    assert first.setting_id == setting.config_id


@pytest.mark.slow
def test_steps_and_precision_cost_quality_beyond_three_standard_errors() -> None:
    meter, segments = QualityMeter(), range(16)
    four = meter.measure(FULL, segments)
    two = meter.measure(Configuration({**FULL, "steps": 2}), segments)
    w4a4 = Configuration({**FULL, "weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain"})
    low = meter.measure(w4a4, segments)
    for worse in (two, low):
        more, error = worse.excess(four)
        assert more > 3 * error
    assert four.loss < 0.5
