"""The worker process: makes one engine and answers requests until its owner is gone.

python -m dataplanes.longlive.adapter.worker_main FD, started by `WorkerProcess` only.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from controld.contract.errors import ControldError
from dataplanes.longlive.adapter.channel import Answer, Channel, ChannelClosedError, Failure, Request
from dataplanes.longlive.engine import EngineError

START = "start"
METHODS = frozenset({"capabilities", "load", "unload", "plan", "apply", "open", "step", "push_prompt", "close"})


def _end_with_owner(channel: Channel, requests: queue.Queue[Request]) -> None:
    # In a thread of its own: an owner that is killed while the engine works must not leave the engine running.
    try:
        while True:
            requests.put(channel.receive())
    except ChannelClosedError:
        pass
    finally:
        # With what the engine started (compilers, ranks): the session is this process's own.
        os.killpg(0, signal.SIGKILL)


def _make(target: str, keywords: Any) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(**keywords)


def _answer(engine: Any, request: Request) -> Answer | Failure:
    try:
        if request.method not in METHODS:
            return Failure(request.number, f"unknown method {request.method!r}", "engine.refused", "")
        return Answer(request.number, getattr(engine, request.method)(*request.arguments, **request.keywords))
    except ControldError as error:
        applied = error.applied if isinstance(error, EngineError) else ()
        return Failure(request.number, error.message, error.code, error.hint, applied)
    # Whatever the engine's own code raises is told to the owner, whole in the log.
    except Exception as error:  # noqa: BLE001 - the process edge
        traceback.print_exc()
        return Failure(request.number, f"{type(error).__name__}: {error}", "engine.failed", "see the worker's log")


def main() -> None:
    """Serve until the owner's end of the socket closes."""
    if os.getpgrp() != os.getpid():
        raise SystemExit("worker_main leads a session of its own; it is started by WorkerProcess")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # The owner has one request under way at a time.
    requests: queue.Queue[Request] = queue.Queue()
    threading.Thread(target=_end_with_owner, args=(channel, requests), daemon=True).start()
    start = requests.get()
    try:
        engine = _make(start.arguments[0], start.keywords)
    except Exception as error:  # noqa: BLE001 - the process edge
        traceback.print_exc()
        code = error.code if isinstance(error, ControldError) else "engine.failed"
        message = str(error) if isinstance(error, ControldError) else f"{type(error).__name__}: {error}"
        channel.send(Failure(start.number, message, code, ""))
        return
    channel.send(Answer(start.number, os.getpid()))
    while True:
        channel.send(_answer(engine, requests.get()))


if __name__ == "__main__":
    main()
