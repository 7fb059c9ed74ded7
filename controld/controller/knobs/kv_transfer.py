"""Cost model of one KV transfer between two machines.

For V raw bytes cut into K chunks whose stages overlap, T = rtt + e1 + w1 + d1 + (K - 1) max(e1, w1, d1), where e1, w1
and d1 are the seconds of one chunk: a K-th of encode `ae + be V`, wire `V/(r B)` and decode `ad + bd V`. Raw bytes are
not chunked: rtt + a + b V + V/B.

Each stage is a server; so is the connection itself where it carries one transfer at a time, as the worker of an SGLang
peer does. Waiting is that of the busiest server (`base.queue`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from controld.controller.envelope import Lines
from controld.controller.knobs.base import Array, AtRest, Context, Prediction, Stage, StageModels
from controld.controller.knobs.chunked import (
    BYTES,
    DECODE,
    ENCODE,
    WIRE,
    axes,
    chunk_counts,
    coded_stage_seconds,
    column,
    decode_seconds,
    overlapped,
    wire_seconds,
    work_of_servers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """The knob "how is this transfer's KV coded".

    Args:
        chunk_bytes: raw bytes of one chunk in the plane; a transfer of V has ceil(V / chunk_bytes) chunks.
        rtt_s: round trip paid once a transfer.
        exclusive_connection: whether a peer's connection serves one transfer at a time.
        switch_cost_s: seconds that a change of arm costs.
    """

    chunk_bytes: float = 1.5e6
    rtt_s: float = 5e-4
    exclusive_connection: bool = True
    switch_cost_s: float = 0.0

    @property
    def name(self) -> str:
        return "kv_transfer"

    @property
    def work_stages(self) -> tuple[str, ...]:
        return ("encode", "the link", "decode", "the connection")

    def to_document(self) -> dict[str, Any]:
        """The parameters, JSON-ready."""
        return {
            "chunk_bytes": self.chunk_bytes,
            "rtt_s": self.rtt_s,
            "exclusive_connection": self.exclusive_connection,
            "switch_cost_s": self.switch_cost_s,
        }

    def at_rest(self, models: StageModels, factors: Array, context: Context) -> AtRest:
        """See `Knob.at_rest`."""
        size, bandwidth = axes(context)
        chunks = chunk_counts(column(models.framed), size, self.chunk_bytes)
        # What raw pays beside the wire is part of what its effects report as wire, so both take the wire's correction.
        encode_factor = np.where(models.framed, factors[:, ENCODE], factors[:, WIRE])
        encode = column(encode_factor) * (column(models.encode_a_s) + size * column(models.encode_b_s_per_byte))
        decode = decode_seconds(models, factors, size)
        wire = wire_seconds(models, factors, size, bandwidth)
        service = self.rtt_s + overlapped((encode, wire, decode), chunks)
        servers = (encode, wire, decode, service if self.exclusive_connection else 0.0)
        return AtRest(
            encode_s=encode,
            wire_s=wire,
            decode_s=decode,
            service_s=service,
            server_s=work_of_servers(servers, service.shape),
        )

    def predict(
        self,
        models: StageModels,
        factors: Array,
        context: Context,
        *,
        share: float = 1.0,
        other_work: Array | None = None,
    ) -> Prediction:
        """See `Knob.predict`."""
        return self.at_rest(models, factors, context).under_load(context, share, other_work)

    def lines(self, models: StageModels, factors: Array, sizes_bytes: Array) -> Lines:
        """The arms at rest as maxima of two lines over 1 / bandwidth: bound by the slower codec stage, or by the wire.

        Args:
            factors: multipliers by arm and stage, shape [arms, stages].
            sizes_bytes: shape [sizes].
        """
        size = sizes_bytes[None, :]
        chunks = chunk_counts(models.framed[:, None], size, self.chunk_bytes)
        encode_factor = np.where(models.framed, factors[:, ENCODE], factors[:, WIRE])[:, None]
        encode = encode_factor * (models.encode_a_s[:, None] + size * models.encode_b_s_per_byte[:, None])
        decode = factors[:, DECODE, None] * (models.decode_a_s[:, None] + size * models.decode_b_s_per_byte[:, None])
        wire_bytes = (models.wire_share * factors[:, BYTES] * factors[:, WIRE])[:, None] * size
        codec_bound = overlapped((encode, decode), chunks)
        return Lines(
            intercept_s=self.rtt_s + np.stack([codec_bound, (encode + decode) / chunks], axis=1),
            slope_bytes=np.stack([wire_bytes / chunks, wire_bytes], axis=1),
        )

    def break_even_raw_s(
        self, models: StageModels, factors: Array, sizes_bytes: Array, *, margin: float
    ) -> Array | None:
        """See `Knob.break_even_raw_s`; raw is the first arm.

        Where a connection serves one transfer at a time it is the busiest server, and its work is the service time: an
        arm that is quicker at rest waits less, too, under every load. Otherwise that is not so.
        """
        if not self.exclusive_connection:
            return None
        lines = self.lines(models, factors, sizes_bytes)
        behind_s = margin * lines.intercept_s - lines.intercept_s[:1]
        saved_bytes = lines.slope_bytes[:1] - margin * lines.slope_bytes
        x = np.where(saved_bytes > 0, behind_s / np.where(saved_bytes > 0, saved_bytes, 1.0), np.inf)
        return np.asarray(np.maximum(x, 0.0).max(axis=1) * sizes_bytes)

    def stage_seconds(
        self, models: StageModels, arm: int, *, raw_bytes: float, wire_bytes: float, bandwidth: float
    ) -> dict[Stage, float]:
        """See `Knob.stage_seconds`."""
        encode = models.encode_a_s[arm] + models.encode_b_s_per_byte[arm] * raw_bytes
        if not models.framed[arm]:
            return {Stage.WIRE: float(encode + raw_bytes / bandwidth)} if bandwidth > 0 else {}
        coded = coded_stage_seconds(models, arm, raw_bytes=raw_bytes, wire_bytes=wire_bytes, bandwidth=bandwidth)
        return {Stage.ENCODE: float(encode), **coded}
