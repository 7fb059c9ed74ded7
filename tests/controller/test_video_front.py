"""Which settings of a video engine no other one beats, and the cost model behind it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.controller.video_front import (
    seconds_per_frame,
    session_memory_bytes,
    video_front,
    video_objectives,
)


def profile(steps: int = 4, vae: str = "async", kv_bytes: int = 100, **changes: Any) -> VideoProfile:
    values: dict[str, Any] = {
        "configuration": Configuration({"steps": steps, "vae": vae, "kv": kv_bytes}), "source": Source.MEASURED,
        "forward_s": 0.05, "vae_s": 0.1, "frames_per_chunk": 8, "loss_mean": 0.01, "loss_se": 0.001,
        "loss_samples": 30, "memory": VideoMemory(weights_bytes=100, kv_bytes=kv_bytes, activation_bytes=50),
    }  # fmt: skip
    return VideoProfile(**{**values, **changes})


def test_a_frame_takes_its_part_of_a_chunk_with_decoding() -> None:
    assert seconds_per_frame(profile()) == pytest.approx(5 * 0.05 / 8), "decoding lies beside the passes"
    assert seconds_per_frame(profile(vae="stream")) == pytest.approx((5 * 0.05 + 0.1) / 8)
    assert seconds_per_frame(profile(steps=1)) == pytest.approx(2 * 0.05 / 8)


def test_memory_is_that_of_the_first_session() -> None:
    memory = VideoMemory(weights_bytes=100, kv_bytes=40, activation_bytes=50, session_bytes=9)
    assert session_memory_bytes(profile(memory=memory)) == 190
    assert session_memory_bytes(profile(memory=None)) is None


def test_what_is_beaten_in_all_three_is_off_the_front() -> None:
    best, fast, small = profile(loss_mean=0.0), profile(steps=2, loss_mean=0.05), profile(kv_bytes=28, loss_mean=0.02)
    slow = profile(vae="stream", loss_mean=0.0)
    large = profile(steps=2, kv_bytes=300, loss_mean=0.05)
    assert video_front([slow, best, fast, large, small]) == [best, fast, small]


def test_a_loss_below_zero_is_chance_and_beats_no_loss_by_nothing() -> None:
    reference, lucky = profile(loss_mean=0.0), profile(kv_bytes=28, loss_mean=-0.003)
    assert video_front([reference, lucky]) == [lucky], "as good, as fast and smaller"
    larger = profile(kv_bytes=128, loss_mean=-0.003)
    assert video_front([reference, larger]) == [reference]


def test_an_unknown_loss_beats_nobody_and_an_unknown_memory_no_known_one() -> None:
    known, unmeasured = profile(), profile(steps=1, loss_mean=None)
    assert video_front([known, unmeasured]) == [known]
    boundless = profile(steps=3, memory=None)
    assert video_front([known, boundless]) == [known, boundless], "it is faster"
    assert video_front([known, profile(memory=None, kv_bytes=1)]) == [known]
    assert video_objectives([boundless])[0, 2] == math.inf
    assert video_objectives([]).shape == (0, 3)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.sampled_from([28, 100]), st.one_of(st.none(), st.sampled_from([-0.01, 0.0, 0.02])),
            st.booleans(),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_the_front_is_what_a_comparison_of_every_pair_leaves(
    drawn: list[tuple[int, int, float | None, bool]],
) -> None:
    profiles = [
        profile(steps, kv_bytes=size, loss_mean=loss, **({} if has_memory else {"memory": None}))
        for steps, size, loss, has_memory in drawn
    ]
    points = video_objectives(profiles)
    front = {id(one) for one in video_front(profiles)}
    for one, point in zip(profiles, points, strict=True):
        beaten = any(np.all(other <= point) and np.any(other < point) for other in points)
        assert (id(one) in front) is not (beaten or one.loss_mean is None)
