from pathlib import Path

import av
import numpy as np
import pytest
import torch

from dataplanes.longlive.reference.shapes import draw_clip
from dataplanes.longlive.reference.video_file import write_video


def test_the_file_shows_the_frames(tmp_path: Path) -> None:
    clip = draw_clip(12, torch.Generator().manual_seed(0)).frames()
    frames = (clip * 255).round().to(torch.uint8).movedim(1, -1)
    path = tmp_path / "clips" / "one.mp4"
    write_video(path, frames, enlarged=4)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (128, 128, 24)
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(shown) == 12
    expected = frames.repeat_interleave(4, 1).repeat_interleave(4, 2).numpy()
    difference = np.abs(np.stack(shown).astype(int) - expected)
    # Colour has half the resolution in the file.
    assert difference.mean() < 6


def test_a_file_that_could_not_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(av, "VideoFrame", type("Full", (), {"from_ndarray": staticmethod(fail)}))
    path = tmp_path / "one.mp4"
    path.write_bytes(b"earlier")
    with pytest.raises(OSError, match="No space"):
        write_video(path, torch.zeros(2, 32, 32, 3, dtype=torch.uint8))
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("one.mp4", b"earlier")]


def test_no_frames_make_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none"):
        write_video(tmp_path / "empty.mp4", torch.empty(0, 32, 32, 3, dtype=torch.uint8))
    assert not (tmp_path / "empty.mp4").exists()
