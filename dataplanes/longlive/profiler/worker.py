"""The worker: an agent of role `profiler` that measures what the daemon asks for, one trial at a time."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from typing import NoReturn

import torch

from controld.contract.errors import ControldError
from dataplanes.agent import Agent, AgentIdentity
from dataplanes.longlive.agent import KIND, TIER
from dataplanes.longlive.profiler.identity import MODEL_NAME, model_fingerprint
from dataplanes.longlive.profiler.trial import VideoTrialRunner

_log = logging.getLogger(__name__)

ROLE = "profiler"


class WorkerError(ControldError):
    """The worker cannot start."""


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
        role=ROLE,
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
    if not settings.address:
        raise WorkerError("no address", code="profiler.address", hint="--address or CONTROLD_ADDRESS")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = Agent(identity_of(runner, settings), settings.address)
    agent.on_trial(lambda task, progress, cancelled: runner.run(task, progress, lambda: cancelled() or stop.is_set()))
    agent.attached()
    agent.start()
    _log.info("profiling the reference engine for %s", settings.address)
    stop.wait()
    agent.close()
    logging.shutdown()
    # A trial may be inside native code, whose threads abort the process when the interpreter is taken down under them.
    os._exit(0)
