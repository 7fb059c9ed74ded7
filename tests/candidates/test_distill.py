from __future__ import annotations

import dataclasses
import math

import pytest

from controld.candidates.distill import distill, pareto_front, select_profiles
from controld.candidates.measurement import TrialMeasurement
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import CoderMeasurement, SegmentLoss

LOSSY = Configuration({"transform": "none", "key_levels": 12})


def trial(losses: dict[tuple[int, int], float], **changes: object) -> TrialMeasurement:
    values: dict[str, object] = {
        "lossy_part": LOSSY,
        "workload": "dialogue",
        "model_fingerprint": "f",
        "losses": tuple(
            SegmentLoss(prompt_tokens=t, segment=s, loss_nats=v, top1_agreement=1.0) for (t, s), v in losses.items()
        ),
        "coders": tuple(
            CoderMeasurement(
                code=code,
                prompt_tokens=tokens,
                segment=0,
                raw_bytes=tokens * 20_000,
                wire_bytes=tokens * 20_000 // ratio,
                encode_s=1e-3 + tokens * 1e-5,
                decode_s=tokens * 5e-6,
            )
            for code, ratio in (("bits", 4), ("entropy", 5))
            for tokens in (256, 1024, 2048)
        ),
        "sender_hardware": "cpu-a",
        "receiver_hardware": "cpu-a",
        "measured_unix_s": 100.0,
        "corpus": "wiki",
    }
    return TrialMeasurement(**{**values, **changes})  # type: ignore[arg-type]


def test_one_profile_for_each_coder_with_the_worst_lengths_loss() -> None:
    measured = trial({(256, 0): 0.01, (256, 1): 0.012, (2048, 0): 0.03, (2048, 1): 0.02})
    profiles = distill([measured])
    assert [p.configuration["code"] for p in profiles] == ["bits", "entropy"]
    for p, ratio in zip(profiles, (4, 5), strict=True):
        assert p.worst_prompt_tokens == 2048
        assert p.loss_mean_nats == pytest.approx(0.025)
        assert p.loss_se_nats == pytest.approx(0.005)
        assert p.loss_samples == 2
        assert p.ratio == pytest.approx(ratio, rel=1e-3)
        assert p.encode.a_s == pytest.approx(1e-3)
        assert p.encode.b_s_per_byte == pytest.approx(1e-5 / 20_000)
        assert p.median_transfer_bytes == 1024 * 20_000
    assert profiles[0].quality_key == profiles[1].quality_key


def test_the_upper_bound_is_the_largest_over_the_lengths() -> None:
    # The shorter length has the smaller mean, and by far the less certain one.
    measured = trial({(256, 0): 0.0, (256, 1): 0.04, (2048, 0): 0.025, (2048, 1): 0.025})
    p = distill([measured])[0]
    assert p.worst_prompt_tokens == 2048
    assert p.loss_upper_nats == pytest.approx(0.02 + 6.314 * 0.02, rel=1e-3)


def test_fidelities_of_one_lossy_part_are_put_together_and_the_newest_segment_counts() -> None:
    old = trial({(256, 0): 0.5, (256, 1): 0.02}, measured_unix_s=1.0)
    new = trial({(256, 0): 0.02, (256, 2): 0.02}, measured_unix_s=2.0)
    for order in ([old, new], [new, old]):
        p = distill(order)[0]
        assert (p.loss_samples, p.loss_mean_nats) == (3, pytest.approx(0.02))


def test_rounding_below_zero_is_zero_loss() -> None:
    p = distill([trial({(256, 0): -1e-9, (256, 1): 0.0})])[0]
    assert (p.loss_mean_nats, p.loss_upper_nats) == (0.0, 0.0)


def test_nothing_measured_gives_no_profile() -> None:
    assert distill([trial({})]) == []
    assert distill([trial({(256, 0): 0.1}, coders=())]) == []


def test_a_lossy_part_has_no_coder() -> None:
    with pytest.raises(FieldError):
        trial({}, lossy_part=LOSSY.with_coder("bits"))


def test_profiles_of_this_place_win_and_quality_never_crosses_models_or_workloads() -> None:
    losses = {(256, 0): 0.01, (256, 1): 0.01}
    everywhere = distill(
        [
            trial(losses),
            trial(losses, sender_hardware="cpu-b", measured_unix_s=200.0),
            trial(losses, model_fingerprint="g"),
            trial(losses, workload="code"),
        ]
    )
    place = {"model_fingerprint": "f", "workload": "dialogue", "receiver_hardware": "cpu-a"}
    here = select_profiles(everywhere, sender_hardware="cpu-a", **place)
    assert [p.sender_hardware for p in here] == ["cpu-a", "cpu-a"]
    there = select_profiles(everywhere, sender_hardware="cpu-b", **place)
    assert [p.sender_hardware for p in there] == ["cpu-b", "cpu-b"]
    elsewhere = select_profiles(everywhere, sender_hardware="cpu-c", **place)
    assert [p.measured_unix_s for p in elsewhere] == [200.0, 200.0]
    assert {(p.model_fingerprint, p.workload) for p in here} == {("f", "dialogue")}


def test_the_front_drops_what_another_profile_beats() -> None:
    bits, entropy = distill([trial({(256, 0): 0.01, (256, 1): 0.01})])
    assert pareto_front([bits, entropy]) == [entropy]


def test_errors_of_reconstruction_are_averaged_over_all_segments_as_logarithms() -> None:
    def measured(*errors: float | None) -> TrialMeasurement:
        losses = tuple(
            SegmentLoss(prompt_tokens=256, segment=n, loss_nats=0.01, top1_agreement=1.0, reconstruction_error=error)
            for n, error in enumerate(errors)
        )
        return dataclasses.replace(trial({}), losses=losses)

    (one, _) = distill([measured(0.02, 0.08, None, 0.0)])
    assert one.error_mean == pytest.approx(0.04)
    assert one.error_log_sd == pytest.approx(math.log(4) / math.sqrt(2))
    assert one.error_samples == 2, "what was stored raw and what was not measured say nothing of the codec"
    (exact, _) = distill([measured(0.0, 0.0, 0.0)])
    assert (exact.error_mean, exact.error_log_sd, exact.error_samples) == (0.0, 0.0, 3)
    (silent, _) = distill([measured(None, None)])
    assert silent.error_samples == 0


def test_the_length_with_the_largest_errors_says_what_is_normal() -> None:
    """A finely coded end of the request is most of a short prompt and little of the long ones that are served."""
    losses = tuple(
        SegmentLoss(prompt_tokens=tokens, segment=n, loss_nats=0.01, top1_agreement=1.0, reconstruction_error=error)
        for tokens, errors in ((256, (0.01, 0.02, 0.01)), (2048, (0.04, 0.05)))
        for n, error in enumerate(errors)
    )
    (one, _) = distill([dataclasses.replace(trial({}), losses=losses)])
    assert one.error_mean == pytest.approx(math.sqrt(0.04 * 0.05))
    assert one.error_samples == 2
