import pytest
import torch

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.reference.shapes import BACKGROUND, MOTIONS, Prompt, draw_clip, parse_prompt


def test_a_prompt_is_read_in_any_order() -> None:
    assert parse_prompt("Diagonally moves the purple ring.") == parse_prompt("a purple ring, diagonally")


def test_every_prompt_reads_its_own_text() -> None:
    prompt = Prompt(shape=3, colour=7, motion=2)
    assert parse_prompt(prompt.text) == prompt


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a red hexagon moves sideways", "'hexagon' is not in"),
        ("a red circle", "names no motion"),
        ("red blue circle sideways", "a second colour, 'blue'"),
        ("", "names no shape"),
    ],
)
def test_a_prompt_that_it_cannot_show_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        parse_prompt(text)


@pytest.mark.parametrize("motion", range(len(MOTIONS)))
def test_every_frame_of_a_clip_is_near_one_of_its_path(motion: int) -> None:
    generator = torch.Generator().manual_seed(motion)
    clip = draw_clip(40, generator)
    while clip.prompt.motion != motion:
        clip = draw_clip(40, generator)
    frames, valid = clip.frames().flatten(1), clip.path_frames().flatten(1)
    background = torch.tensor(BACKGROUND).view(3, 1, 1).expand(3, 32, 32).flatten()
    energy = (valid - background).square().sum(1).mean()
    assert float(torch.cdist(frames, valid).square().amin(1).max() / energy) < 0.01


def test_held_out_clips_are_never_trained_on() -> None:
    generator = torch.Generator().manual_seed(0)
    trained = {(c.prompt.shape, c.prompt.colour) for c in (draw_clip(1, generator) for _ in range(200))}
    held_out = {(c.prompt.shape, c.prompt.colour) for c in (draw_clip(1, generator, held_out=True) for _ in range(50))}
    assert held_out and not trained & held_out


def test_the_speed_wanders_but_the_path_does_not() -> None:
    clip = draw_clip(60, torch.Generator().manual_seed(3))
    speeds = clip.phases.diff().abs()
    assert float(speeds.std()) > 0.05
    assert bool((clip.phases.diff().sign() == clip.phases.diff()[0].sign()).all())
