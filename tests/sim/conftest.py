"""Codecs, worlds and requests that the simulator's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.controller.goals import ClassGoal, TableRequest
from controld.sim.link import LinkTruth
from controld.sim.schedule import RateSchedule
from controld.sim.world import CodecTruth, World


def build_profile(levels: int = 12, **changes: object) -> Profile:
    values: dict[str, object] = {
        "configuration": Configuration({"transform": "hadamard", "key_levels": levels, "code": "bits"}),
        "workload": "general",
        "model_fingerprint": "f",
        "loss_mean_nats": 0.01,
        "loss_se_nats": 0.0005,
        "loss_samples": 8,
        "worst_prompt_tokens": 2048,
        "ratio": 4.0,
        "encode": StageTime(1e-3, 1 / 600e6),
        "decode": StageTime(1e-3, 1 / 800e6),
        "median_transfer_bytes": 14e6,
        "sender_hardware": "p",
        "receiver_hardware": "d",
    }
    return Profile(**{**values, **changes})  # type: ignore[arg-type]


PROFILES = (
    build_profile(12, ratio=6.0, encode=StageTime(2e-3, 1 / 200e6), decode=StageTime(2e-3, 1 / 300e6)),
    build_profile(8, ratio=3.0),
    build_profile(6, ratio=1.4, encode=StageTime(2e-4, 1 / 4e9), decode=StageTime(2e-4, 1 / 4e9)),
)


def build_request(**changes: object) -> TableRequest:
    values: dict[str, object] = {
        "tier": "pd",
        "link_group": "default",
        "goals": (ClassGoal(name="default", workload="general", max_quality_loss_nats=0.02),),
        "profiles": PROFILES,
        "sender_hardware": "p",
        "receiver_hardware": "d",
    }
    return TableRequest(**{**values, **changes})  # type: ignore[arg-type]


def build_world(bytes_per_s: float = 12.5e6, **changes: object) -> World:
    values: dict[str, object] = {
        "codecs": {profile.arm_id: CodecTruth.of(profile) for profile in PROFILES},
        "link": LinkTruth(schedule=RateSchedule.constant(bytes_per_s)),
    }
    return World(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(name="request_for")
def request_fixture() -> Callable[..., TableRequest]:
    return build_request


@pytest.fixture(name="world_of")
def world_fixture() -> Callable[..., World]:
    return build_world


@pytest.fixture
def arms() -> tuple[str, ...]:
    """Ids of the three profiles, from the best ratio to the quickest codec."""
    return tuple(profile.arm_id for profile in PROFILES)


@pytest.fixture(name="profile")
def profile_fixture() -> Callable[..., Any]:
    return build_profile
