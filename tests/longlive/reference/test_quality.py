import pytest
import torch

from controld.contract.configuration import Configuration
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.quality import Quality, QualityMeter, SegmentLoss, _segment_loss, standard_error
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import BACKGROUND, Clip, draw_clip

TINY = ModelShape(dim=64, heads=4, layers=2, feed_forward=64)


def _clip() -> Clip:
    return draw_clip(33, torch.Generator().manual_seed(0), held_out=True)


def _loss(frames: torch.Tensor) -> float:
    return _segment_loss(0, frames, _clip().prompt).loss


def test_a_frozen_session_has_no_motion() -> None:
    frames = _clip().frames()
    frozen = _segment_loss(0, frames[:1].repeat(33, 1, 1, 1), _clip().prompt)
    assert (frozen.motion, frozen.flicker) == (0.0, 0.0)
    moving = _segment_loss(0, frames, _clip().prompt)
    assert moving.motion > 0.01
    assert moving.flicker == pytest.approx(float((frames[1:] - frames[:-1]).abs().mean())), "as a chunk report counts"


def test_truth_loses_nothing_no_shape_loses_all_and_fading_is_no_way_out() -> None:
    frames, background = _clip().frames(), torch.tensor(BACKGROUND).view(3, 1, 1)
    assert _loss(frames) < 0.01
    assert _loss(background.expand(33, 3, 32, 32) + 1e-4) > 0.95
    faded = [_loss(background + (frames - background) * strength) for strength in (0.75, 0.5, 0.25)]
    assert 0.02 < faded[0] < faded[1] - 0.1 < faded[2] - 0.3


def test_a_setting_is_compared_session_by_session() -> None:
    def quality(*losses: float) -> Quality:
        segments = tuple(SegmentLoss(segment=n, loss=loss, motion=1.0, flicker=1.0) for n, loss in enumerate(losses))
        return Quality(setting_id="x", segments=segments)

    mean, error = quality(1.1, 5.1, 3.1).excess(quality(1.0, 5.0, 3.0))
    assert mean == pytest.approx(0.1) and error == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="other segments"):
        quality(1.0).excess(quality(1.0, 2.0))
    assert standard_error([1.0]) == float("inf")
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_a_segment_is_the_same_session_every_time() -> None:
    meter = QualityMeter("untrained", TINY)
    setting = Configuration({**FULL, "steps": 1})
    first, again = (meter.measure(setting, range(1)) for _ in range(2))
    assert first == again
    assert first.setting_id == setting.config_id


@pytest.mark.slow
def test_steps_and_precision_cost_quality_beyond_three_standard_errors() -> None:
    meter, segments = QualityMeter(), range(192)
    four = meter.measure(FULL, segments)
    two = meter.measure(Configuration({**FULL, "steps": 2}), segments)
    # With 4over6, the form of the NVFP4 checkpoint that LongLive-2.0 released; plain scaling is within three here.
    w4a4 = Configuration({**FULL, "weights": "nvfp4", "activations": "nvfp4", "block_rule": "4over6"})
    for worse in (two, meter.measure(w4a4, segments)):
        more, error = worse.excess(four)
        assert more > 3 * error
    assert meter.reconstruct(segments).loss < four.loss < 0.12
