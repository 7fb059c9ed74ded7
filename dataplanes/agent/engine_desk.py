"""What a video engine has to tell the daemon: its state, its answer to the last setting, and its chunks."""

from __future__ import annotations

import threading
from collections import deque

from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert_video import chunk_reports_to_proto, setting_applied_to_proto
from controld.contract.video import Applied, ChunkReport, EngineState
from dataplanes.agent.counters import Counters

CHUNKS_PER_MESSAGE = 64
CHUNKS_KEPT = 1024
ANSWERS_KEPT = 16


class EngineDesk:
    """Written by the engine's thread, emptied by the stream's.

    Answers to settings are told in order, and the last one again on every new stream, for the daemon may have been
    restarted. Chunk reports are telemetry: while nobody listens the oldest are dropped and counted.

    Args:
        state: the engine's, before it says more.
    """

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._lock = threading.Lock()
        self._answers: deque[Applied] = deque(maxlen=ANSWERS_KEPT)
        self._last_answer: Applied | None = None
        self._chunks: deque[ChunkReport] = deque()
        self._counters: Counters | None = None

    def count_with(self, counters: Counters) -> None:
        """Where dropped reports are counted."""
        self._counters = counters

    def applied(self, answer: Applied) -> None:
        """An engine's answer to a setting."""
        with self._lock:
            self._answers.append(answer)
            self._last_answer = answer

    def chunk(self, report: ChunkReport) -> None:
        """A chunk was made."""
        with self._lock:
            if len(self._chunks) >= CHUNKS_KEPT:
                self._chunks.popleft()
                if self._counters is not None:
                    self._counters.count("chunk_reports_dropped")
            self._chunks.append(report)

    def new_stream(self) -> None:
        """Tell the last answer again."""
        with self._lock:
            if not self._answers and self._last_answer is not None:
                self._answers.append(self._last_answer)

    def take_applied(self) -> pb.AgentMessage | None:
        """The next answer to send."""
        with self._lock:
            answer = self._answers.popleft() if self._answers else None
        return pb.AgentMessage(setting_applied=setting_applied_to_proto(answer)) if answer is not None else None

    def take_chunks(self) -> pb.AgentMessage | None:
        """The next batch of reports to send."""
        with self._lock:
            batch = [self._chunks.popleft() for _ in range(min(CHUNKS_PER_MESSAGE, len(self._chunks)))]
        return pb.AgentMessage(chunk_reports=chunk_reports_to_proto(batch)) if batch else None
