"""Builders shared by the controller's tests, as fixtures: profiles, requests, effects and a true link."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.contract.decision import RAW
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.controller.goals import ClassGoal, TableRequest
from controld.controller.grid import Grid


def build_profile(levels: int = 12, **changes: object) -> Profile:
    values: dict[str, object] = {
        "configuration": Configuration({"transform": "hadamard", "key_levels": levels, "code": "bits"}),
        "workload": "dialogue",
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


def build_request(*profiles: Profile, goals: tuple[ClassGoal, ...] = (), **changes: object) -> TableRequest:
    values: dict[str, object] = {
        "tier": "pd",
        "link_group": "default",
        "goals": goals or (ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.02),),
        "profiles": profiles,
        "sender_hardware": "p",
        "receiver_hardware": "d",
    }
    return TableRequest(**{**values, **changes})  # type: ignore[arg-type]


def build_effect(**changes: object) -> Effect:
    values: dict[str, object] = {
        "transfer_id": "t0",
        "half": Half.SENDER,
        "arm_id": RAW,
        "table_version": 1,
        "service_class": "default",
        "tier": "pd",
        "link_group": "default",
        "tokens": 600,
        "chunks": 1,
        "raw_bytes": 14_000_000,
        "wire_bytes": 14_000_000,
        "encode_s": 0.0,
        "wire_s": 1.4,
        "decode_s": 0.0,
        "wait_s": 0.0,
        "total_s": 1.4,
        "path": Path.RAW,
        "verdict": Verdict.VERIFIED,
        "bandwidth_bytes_per_s": 1e7,
        "finished_unix_s": 10_000.0,
    }
    return Effect(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class TrueLink:
    """What really happens, written apart from the controller's model: serial stages with log-normal noise."""

    bandwidth_bytes_per_s: float
    noise: float = 0.1
    slowdown: dict[str, float] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def mean_s(self, profile: Profile | None, raw_bytes: float) -> float:
        """Expected seconds of a transfer."""
        return sum(self._stages(profile, raw_bytes)) * math.exp(self.noise**2 / 2)

    def effect(self, profile: Profile | None, raw_bytes: float, transfer_id: str, now_unix_s: float) -> Effect:
        """One transfer."""
        encode, wire, decode = (
            s * math.exp(self.noise * self.generator.standard_normal()) for s in self._stages(profile, raw_bytes)
        )
        return build_effect(
            transfer_id=transfer_id,
            arm_id=RAW if profile is None else profile.arm_id,
            raw_bytes=int(raw_bytes),
            wire_bytes=int(raw_bytes / (1.0 if profile is None else profile.ratio)),
            encode_s=encode,
            wire_s=wire,
            decode_s=decode,
            total_s=encode + wire + decode,
            path=Path.RAW if profile is None else Path.CODED,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            finished_unix_s=now_unix_s,
        )

    def _stages(self, profile: Profile | None, raw_bytes: float) -> tuple[float, float, float]:
        if profile is None:
            return 0.0, 1e-3 + raw_bytes / self.bandwidth_bytes_per_s, 0.0
        slow = self.slowdown.get(profile.arm_id, 1.0)
        wire = raw_bytes / profile.ratio / self.bandwidth_bytes_per_s
        return slow * profile.encode.seconds(raw_bytes), wire, slow * profile.decode.seconds(raw_bytes)


@pytest.fixture(name="profile")
def profile_fixture() -> Callable[..., Profile]:
    return build_profile


@pytest.fixture(name="request_for")
def request_fixture() -> Callable[..., TableRequest]:
    return build_request


@pytest.fixture(name="effect")
def effect_fixture() -> Callable[..., Effect]:
    return build_effect


@pytest.fixture(name="true_link")
def link_fixture() -> type[TrueLink]:
    return TrueLink


@pytest.fixture
def small_grid() -> Grid:
    """Few cells, so that simulations re-plan cheaply."""
    return Grid(
        size_edges_bytes=(4e6, 8e6, 16e6, 32e6),
        bandwidth_edges_bytes_per_s=tuple(1e6 * 2 ** (i / 2) for i in range(28)),
        load_edges=(0.3,),
    )
