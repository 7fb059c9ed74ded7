"""A profiling worker's process: an agent that measures trials until it is told to end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Final, NoReturn

from controld.contract.errors import ControldError
from dataplanes.agent.agent import Agent
from dataplanes.agent.identity import AgentIdentity
from dataplanes.agent.trials import TrialHandler

_log = logging.getLogger(__name__)

PROFILER_ROLE: Final = "profiler"


class WorkerError(ControldError):
    """The worker cannot start."""


class TrialCancelledError(ControldError):
    """Somebody asked for the trial to end."""

    def __init__(self) -> None:
        super().__init__("the trial was cancelled", code="trial.cancelled")


def require_address(address: str) -> None:
    """Raises: WorkerError: no address."""
    if not address:
        raise WorkerError("no address", code="profiler.address", hint="--address or CONTROLD_ADDRESS")


def serve_trials(identity: AgentIdentity, address: str, run: TrialHandler) -> NoReturn:
    """Measure until SIGTERM or SIGINT, then end the process; survives daemons that come and go.

    Args:
        identity: of role `PROFILER_ROLE`.
        address: the daemon's fleet address.
        run: measures one trial, and looks now and then whether it is cancelled.

    Raises:
        WorkerError: no address.
    """
    require_address(address)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = Agent(identity, address)
    agent.on_trial(lambda task, progress, cancelled: run(task, progress, lambda: cancelled() or stop.is_set()))
    agent.attached()
    agent.start()
    _log.info("profiling %s for %s", identity.model_name, address)
    stop.wait()
    agent.close()
    logging.shutdown()
    # A trial may be inside native code, whose threads abort the process when the interpreter is taken down under them.
    os._exit(0)
