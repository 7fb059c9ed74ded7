"""Cost model of loading a prefix's KV from a store, beside computing it again.

The store holds the KV coded, so a load pays no encoding: for V raw bytes in K overlapping chunks
T = latency + w1 + d1 + (K - 1) max(w1, d1); raw is one piece: latency + a + b V + V/B. Computing the prefix again moves
nothing and takes the prefill seconds of its tokens, a + b V + c V^2 (attention is quadratic in them, and V is
proportional to them). Waiting is that of the busiest server, as in `kv_transfer`: the prefill engine is one of them, so
recomputing under load pays for the room that it takes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from controld.controller.knobs.base import Array, AtRest, Context, Prediction, Stage, StageModels
from controld.controller.knobs.chunked import (
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

_LEAST_S = 1e-9
"""Ratios of times are taken, so a prefix of next to nothing still takes this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoad:
    """The knob "load this prefix in which coding, or compute it again".

    An arm that moves no bytes is the one that computes; its seconds stand in the encode coefficients and are corrected
    by the encode stage.

    Args:
        chunk_bytes: raw bytes of one chunk; a load of V has ceil(V / chunk_bytes) chunks.
        latency_s: of the store, paid once a load.
        exclusive_connection: whether a connection to the store serves one load at a time.
        switch_cost_s: seconds that a change of arm costs.
    """

    chunk_bytes: float = 1.5e6
    latency_s: float = 1e-3
    exclusive_connection: bool = False
    switch_cost_s: float = 0.0

    @property
    def name(self) -> str:
        return "kv_load"

    @property
    def work_stages(self) -> tuple[str, ...]:
        return ("prefill", "the link", "decode", "the connection")

    def to_document(self) -> dict[str, Any]:
        """The parameters, JSON-ready."""
        return {
            "chunk_bytes": self.chunk_bytes,
            "latency_s": self.latency_s,
            "exclusive_connection": self.exclusive_connection,
            "switch_cost_s": self.switch_cost_s,
        }

    def at_rest(self, models: StageModels, factors: Array, context: Context) -> AtRest:
        """See `Knob.at_rest`; `encode_s` is the prefill of the arm that computes, and raw's own overhead."""
        size, bandwidth = axes(context)
        framed, computes = column(models.framed), column(models.wire_share) == 0
        chunks = chunk_counts(framed, size, self.chunk_bytes)
        own = column(models.encode_a_s) + size * (
            column(models.encode_b_s_per_byte) + size * column(models.encode_c_s_per_byte2)
        )
        own_factor = np.where(computes, column(factors[:, ENCODE]), column(factors[:, WIRE]))
        own = np.where(framed, 0.0, own_factor * own)
        decode = decode_seconds(models, factors, size)
        wire = wire_seconds(models, factors, size, bandwidth)
        piped = self.latency_s + own + overlapped((wire, decode), chunks)
        service = np.where(computes, np.maximum(own, _LEAST_S), piped)
        connection = np.where(computes, 0.0, service) if self.exclusive_connection else 0.0
        servers = (np.where(computes, own, 0.0), wire, decode, connection)
        return AtRest(
            encode_s=np.broadcast_to(own, wire.shape),
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

    def break_even_raw_s(
        self, models: StageModels, factors: Array, sizes_bytes: Array, *, margin: float
    ) -> Array | None:
        """See `Knob.break_even_raw_s`. Which stage is the busiest depends on the load, and with it who is quicker."""
        return None

    def stage_seconds(
        self, models: StageModels, arm: int, *, raw_bytes: float, wire_bytes: float, bandwidth: float
    ) -> dict[Stage, float]:
        """See `Knob.stage_seconds`. Nothing is encoded on a load, so a coded arm has no such stage."""
        own = models.encode_a_s[arm] + raw_bytes * (
            models.encode_b_s_per_byte[arm] + raw_bytes * models.encode_c_s_per_byte2[arm]
        )
        if models.wire_share[arm] == 0:
            return {Stage.ENCODE: float(own)}
        if not models.framed[arm]:
            return {Stage.WIRE: float(self.latency_s + own + raw_bytes / bandwidth)} if bandwidth > 0 else {}
        return coded_stage_seconds(models, arm, raw_bytes=raw_bytes, wire_bytes=wire_bytes, bandwidth=bandwidth)
