"""The worker: an agent of role `profiler` that measures what the daemon asks for, one trial at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import NoReturn

import torch

from dataplanes.agent import AgentIdentity
from dataplanes.agent.profiling_worker import PROFILER_ROLE, serve_trials
from dataplanes.sglang.hardware import device_name
from dataplanes.sglang.model_identity import ModelIdentity
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.trial import TrialRunner

KIND = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How the worker presents itself.

    Args:
        address: the daemon's fleet address.
        agent_id: stable name; None makes one of host and model.
        codec_threads: what codec times are measured with; part of the hardware that profiles are keyed by.
    """

    address: str
    deployment: str
    agent_id: str | None
    codec_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is measured, and on what: profiles are keyed by it."""

    model: ModelIdentity
    space_json: str
    device: str
    torch_version: str

    @classmethod
    def here(cls, bench: ModelBench) -> Place:
        """A bench of this process."""
        return cls(
            model=bench.identity,
            space_json=bench.space.to_json(),
            device=device_name(),
            torch_version=torch.__version__,
        )


def identity_of(place: Place, settings: WorkerSettings, slot: int | None = None) -> AgentIdentity:
    """What the worker says of itself; the space is the one that serving planes of this model advertise.

    Args:
        slot: which of several workers of one process; part of its name.
    """
    model = place.model
    name = settings.agent_id or f"profiler-{socket.gethostname()}-{model.name}"
    return AgentIdentity(
        deployment=settings.deployment,
        agent_id=name if slot is None else f"{name}-{slot}",
        kind=KIND,
        role=PROFILER_ROLE,
        model_name=model.name,
        model_fingerprint=model.fingerprint,
        kv_dtype=model.kv_dtype,
        kv_bytes_per_token=model.kv_bytes_per_token,
        device=place.device,
        torch_version=place.torch_version,
        threads=settings.codec_threads,
        space_json=place.space_json,
        tiers=("pd", "prefix_store"),
    )


def serve(bench: ModelBench, runner: TrialRunner, settings: WorkerSettings) -> NoReturn:
    """Measure until SIGTERM or SIGINT, then end the process; survives daemons that come and go.

    Raises:
        WorkerError: no address.
    """
    serve_trials(identity_of(Place.here(bench), settings), settings.address, runner.run)
