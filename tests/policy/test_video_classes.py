"""What a policy says of video engines, and what it must not."""

from __future__ import annotations

import pytest

from controld.policy.loader import SourceFile, parse_policies
from controld.policy.model import Objective, Policy, PolicySet, VideoTargets, content_hash
from controld.policy.problem import PolicyErrors

VIDEO = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: video-fleet}
select: {kind: longlive, deployment: video}
classes:
  - name: live
    match: {extra_key: "class=live"}
    workload: shapes
    tiers: [video]
    max_quality_loss: 0.05
    video: {fps: 24, first_frame: 2s, memory: 20GB}
  - name: default
    workload: shapes
    tiers: [video]
guard: {drift: 0.5, motion: 70%}
"""


def parse(text: str) -> Policy:
    (policy,) = parse_policies([SourceFile("v.yaml", text.encode())])
    return policy


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyErrors) as caught:
        parse(text)
    return [str(problem) for problem in caught.value.problems]


def changed(old: str, new: str) -> str:
    assert old in VIDEO
    return VIDEO.replace(old, new, 1)


def test_targets_become_si_units_and_what_is_left_out_is_no_target() -> None:
    policy = parse(VIDEO)
    live, default = policy.classes
    assert live.video == VideoTargets(fps=24.0, first_frame_s=2.0, memory_bytes=20e9, percentile=90.0)
    assert (live.max_quality_loss, live.objective) == (0.05, Objective.QUALITY)
    assert (default.video, default.max_quality_loss) == (None, 0.0)
    assert policy.guard.drift == 0.5
    assert policy.guard.motion == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("fps: 24", "fps: 5e-324", '11:18: classes[0].video.fps: 5e-324 is below 0.01'),
        ("first_frame: 2s", "first_frame: 1e300s", '11:35: classes[0].video.first_frame'),
        ("memory: 20GB", "memory: 0.3B", "11:47: classes[0].video.memory"),
        ("memory: 20GB", "memory: 20", '11:47: classes[0].video.memory: "20" has no unit (write 20MB)'),
        ("fps: 24", "fps: 0", "11:18: classes[0].video.fps: 0 is below 0.01"),
        ("fps: 24", 'fps: "24"', '11:18: classes[0].video.fps: must be a number, not "24"'),
        ("first_frame", "first_fram", "first_fram: unknown key (did you mean first_frame?)"),
        ("{fps: 24, first_frame: 2s, memory: 20GB}", "{percentile: 50}", "11:12: classes[0].video: has no target"),
        ("max_quality_loss: 0.05", "max_quality_loss_nats: 0.05", "10:5: classes[0].max_quality_loss_nats: planes of"
         " kind longlive have no such key (write max_quality_loss: error above the reference setting's"),
        ("max_quality_loss: 0.05", "slo: {ttft: 300ms}", "10:5: classes[0].slo: planes of kind longlive have no such"),
        ("max_quality_loss: 0.05", "explore: 2%", "10:5: classes[0].explore: planes of kind longlive have no such key"),
        ("max_quality_loss: 0.05", "objective: energy", "10:16: classes[0].objective: an engine's energy is not known"),
        ("max_quality_loss: 0.05", "pin: raw", '10:10: classes[0].pin: "raw" is no setting'),
        ("tiers: [video]", "tiers: [pd]", 'planes of kind longlive have no tier "pd" (tiers: video)'),
        ("drift: 0.5", "sample: 1%", "15:9: guard.sample: planes of kind longlive have no such key"),
        ("max_quality_loss: 0.05", "learn: false", "10:5: classes[0].learn: planes of kind longlive have no such key"),
        ("classes:", "links: {default: {rate: 1Gbit}}\nclasses:",
         "5:1: links: planes of kind longlive have no such key"),
        ("classes:", "tenants: [{name: default, weight: 1, share: 10%}]\nclasses:",
         "tenants[0].share: planes of kind longlive have no such key"),
        ("motion: 70%", "motion: 0.7", 'guard.motion: "0.7" has no unit (write 2%)'),
    ],
)  # fmt: skip
def test_a_wrong_target_is_one_line_at_its_place(old: str, new: str, line: str) -> None:
    found = problems(changed(old, new))
    assert len(found) == 1
    assert line in found[0]


def test_a_kv_policy_has_no_frames(good: str) -> None:
    wrong = good.replace("    explore: 2%\n", "    video: {fps: 24}\n    max_quality_loss: 0.1\n")
    wrong = wrong.replace("guard: {", "guard: {drift: 0.5, ")
    found = problems(wrong)
    assert [line.split(": ")[1] for line in found] == [
        "classes[0].video", "classes[0].max_quality_loss", "guard.drift",
    ]  # fmt: skip


def test_the_hash_of_a_kv_policy_does_not_know_of_video(good: str) -> None:
    # The generation of every policy would rise with the release that brought video.
    policy = parse(good)
    assert content_hash([policy]) == "fbc0bc94c87f0e09bc6cabda5bf7483132a8d2114adebe358bdb68a3f049cc9f"


def test_every_target_counts_in_the_hash() -> None:
    hashes = {content_hash([parse(text)]) for text in (VIDEO, changed("24", "25"), changed("70%", "60%"))}
    assert len(hashes) == 3
    policy = parse(VIDEO)
    assert PolicySet(1, "h", (policy,)).for_plane("longlive", "video") is policy
