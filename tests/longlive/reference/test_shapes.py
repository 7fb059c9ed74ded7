import pytest
import torch

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.reference.shapes import COLOURS, SHAPES, Prompt, distance_to_valid, draw_clip, parse_prompt


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


def test_every_true_frame_is_valid_and_others_are_not() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(12):
        clip = draw_clip(6, generator)
        frames, prompt = clip.frames(), clip.prompt
        assert float(distance_to_valid(frames, prompt).max()) < 0.02
        other = Prompt((prompt.shape + 1) % len(SHAPES), prompt.colour, prompt.motion)
        assert float(distance_to_valid(frames, other).mean()) > 0.04
        recoloured = clip.recoloured((prompt.colour + 2) % len(COLOURS)).frames()
        assert float(distance_to_valid(recoloured, prompt).mean()) > 0.04


def test_a_blur_over_places_is_not_valid() -> None:
    frames = draw_clip(40, torch.Generator().manual_seed(1)).frames()
    prompt = draw_clip(40, torch.Generator().manual_seed(1)).prompt
    blurred = frames.mean(0, keepdim=True)
    assert float(distance_to_valid(blurred, prompt)[0]) > 0.2


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
