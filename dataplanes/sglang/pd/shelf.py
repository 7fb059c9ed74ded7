"""Codecs that are ready to use; one that is not is made ready in the background while its transfers go raw."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping

import torch

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import NO_ARTEFACTS, KVCodec, KVLayout, decode_frame
from dataplanes.sglang.pd.edge import Counting, Guarded


class CodecShelf:
    """Codecs of one layout by configuration id.

    Making one ready runs it once each way on a piece of ordinary size: whatever a codec compiles, allocates or imports
    on first use, it does there and never on a transfer.

    Args:
        layout: of the pool.
        warm_tokens: size of that piece.
        counting: takes counts of codecs that fail.
        artefacts: calibrated data that configurations may name.
    """

    def __init__(
        self, layout: KVLayout, warm_tokens: int, counting: Counting, artefacts: Mapping[str, object] = NO_ARTEFACTS
    ) -> None:
        self._counting = counting
        self._artefacts = artefacts
        self._layout = layout
        self._warm_tokens = warm_tokens
        self._ready: dict[str, KVCodec | None] = {}
        self._wanted: queue.SimpleQueue[Configuration | None] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the background thread."""
        threading.Thread(target=self._work, name="controld-codecs", daemon=True).start()

    def stop(self) -> None:
        """End the background thread after what it is doing; it touches nothing of SGLang's, so none waits for it."""
        self._wanted.put(None)

    def find(self, configuration: Configuration) -> KVCodec | None:
        """The codec if it is ready; else None, and it will be made ready."""
        codec = self._ready.get(configuration.config_id)
        if codec is None:
            self.want([configuration])
        return codec

    def want(self, configurations: Iterable[Configuration]) -> None:
        """Have these made ready in the background, each once."""
        for configuration in configurations:
            with self._lock:
                if configuration.config_id in self._asked:
                    continue
                self._asked.add(configuration.config_id)
            self._wanted.put(configuration)

    def make_ready(self, configuration: Configuration) -> KVCodec:
        """Build a codec and run it once each way.

        Raises:
            CodecError: the layout cannot carry the configuration.
        """
        codec = KVCodec(configuration, self._layout, artefacts=self._artefacts)
        planes = [
            torch.ones(self._warm_tokens, plane.heads, plane.head_dim, dtype=self._layout.dtype.torch_dtype)
            for plane in self._layout.planes
        ]
        frame = codec.encode(
            torch.stack(planes) if self._layout.is_dense else planes, first_token=0, request_tokens=self._warm_tokens
        )
        decode_frame(frame, artefacts=self._artefacts)
        self._ready[configuration.config_id] = codec
        return codec

    def _work(self) -> None:
        while (configuration := self._wanted.get()) is not None:
            with Guarded(self._counting, f"configuration {configuration.config_id} stays unused"):
                self.make_ready(configuration)
