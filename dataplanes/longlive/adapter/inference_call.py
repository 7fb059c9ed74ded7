"""One run of LongLive's inference in a thread of its own, let on chunk by chunk.

    owner:      advance() ........ returns          advance() ........ returns
    inference:  tick | chunk 0 ... | tick, waits ... | chunk 1 ......... | tick

The inference thread never runs ahead: what one chunk made is handed over before the next one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class CallCancelled(BaseException):
    """Unwinds the inference at a tick. No `Exception`, so that no handler in the checkout takes it for a fault."""


class InferenceCall:
    """A call under way.

    Args:
        run: LongLive's inference; calls `tick` at the begin of each chunk, in the thread that it runs in.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._ticks = 0
        self._allowed = 0
        self._cancelled = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="longlive-inference")

    @property
    def has_ended(self) -> bool:
        """Whether the inference returned, raised or was cancelled."""
        return self._ended

    def start(self) -> None:
        """Begin, and return when the first chunk waits to be let on.

        Raises:
            BaseException: what the inference raised before it.
        """
        self._thread.start()
        self._wait(lambda: self._ticks > 0)

    def advance(self) -> None:
        """Let one chunk be made; return when the next one waits, or the call has ended.

        Raises:
            BaseException: what the inference raised.
        """
        with self._changed:
            self._allowed += 1
            self._changed.notify_all()
        self._wait(lambda: self._ticks > self._allowed)

    def cancel(self) -> None:
        """End a call that waits at a tick; return when its thread is gone."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def tick(self) -> None:
        """The safe point, in the inference thread: wait to be let on.

        Raises:
            CallCancelled: the call is to end here.
        """
        with self._changed:
            self._ticks += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._cancelled or self._allowed >= self._ticks)
            if self._cancelled:
                raise CallCancelled

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or reached())
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            self._run()
        except CallCancelled:
            pass
        # Whatever it is, it is raised again in the owner's thread, which waits for it.
        except BaseException as caught:  # noqa: BLE001 - the thread's edge
            error = caught
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()
