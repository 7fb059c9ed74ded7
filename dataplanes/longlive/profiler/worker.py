"""The worker: an agent of role `profiler` that measures what the daemon asks for, one trial at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import NoReturn

import torch

from dataplanes.agent import AgentIdentity
from dataplanes.agent.profiling_worker import PROFILER_ROLE, WorkerError, serve_trials
from dataplanes.longlive.agent import KIND, TIER
from dataplanes.longlive.profiler.identity import MODEL_NAME, model_fingerprint
from dataplanes.longlive.profiler.trial import VideoTrialRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How the worker presents itself.

    Args:
        address: the daemon's fleet address.
        agent_id: stable name; empty makes one of the host's.
        device: of the engine.
    """

    address: str
    deployment: str
    agent_id: str
    checkpoint: str
    device: str


def identity_of(runner: VideoTrialRunner, settings: WorkerSettings) -> AgentIdentity:
    """What the worker says of itself. Raises: WorkerError: no such checkpoint."""
    try:
        fingerprint = model_fingerprint(settings.checkpoint)
    except OSError as error:
        raise WorkerError(f"no weights: {error}", code="profiler.checkpoint", hint="--checkpoint trained") from error
    return AgentIdentity(
        deployment=settings.deployment,
        agent_id=settings.agent_id or f"profiler-{socket.gethostname()}-{MODEL_NAME}",
        kind=KIND,
        role=PROFILER_ROLE,
        model_name=MODEL_NAME,
        model_fingerprint=fingerprint,
        device=settings.device,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        space_json=runner.space.to_json(),
        tiers=(TIER,),
    )


def serve(runner: VideoTrialRunner, settings: WorkerSettings) -> NoReturn:
    """Measure until SIGTERM or SIGINT, then end the process; survives daemons that come and go.

    Raises:
        WorkerError: no address, or no such checkpoint.
    """
    serve_trials(identity_of(runner, settings), settings.address, runner.run)
