"""gRPC settings that both ends of the stream must agree on."""

from __future__ import annotations

from controld.contract.rpc.convert import MAX_MESSAGE_BYTES

MAX_PAGE_BYTES = 3 * 1024 * 1024
"""A snapshot's resources are spread over messages of about this size; a single larger resource has one of its own."""

KEEPALIVE_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    # An idle stream is probed for ever; by default gRPC stops after two probes without data.
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Below the client's interval, or its probes would count as abuse and end the connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 1000 / 3)),
    ("grpc.so_reuseport", 0),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.http2.min_time_between_pings_ms", int(KEEPALIVE_S * 1000 / 3)),
)
