"""A streaming client that times what a user sees: first token and whole answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from controld.contract.errors import ControldError


class GenerationError(ControldError):
    """A request got no complete answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished answer, timed on the client's side.

    Args:
        token_ids: the generated tokens.
        ttft_s: from sending the request to the first token's arrival.
        jct_s: from sending the request to the end of the answer.
        prompt_tokens: as the server counted them.
        cached_tokens: prompt tokens that the server found in its cache.
        request_id: SGLang's id of the request.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    jct_s: float
    prompt_tokens: int
    cached_tokens: int
    request_id: str


class SglangClient:
    """Talks to one SGLang server or router; one connection a request, usable from several threads.

    Args:
        host, port: where it listens.
        timeout_s: longest silence on the connection.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float = 600.0) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        extra_key: str | None = None,
        priority: int | None = None,
        ignore_eos: bool = True,
        request_id: str | None = None,
    ) -> Generation:
        """Complete a prompt greedily, streaming.

        Args:
            token_ids: the prompt.
            max_new_tokens: exactly this many tokens with `ignore_eos`, else at most.
            extra_key: names the service class (`class=chat`); SGLang also keys its prefix cache by it.
            priority: names the service class by number.
            ignore_eos: go on after the end token.
            request_id: name of the request in both servers; each makes up its own where none is given.

        Raises:
            GenerationError: the server refused, the stream broke or ended early.
        """
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        if extra_key is not None:
            body["extra_key"] = extra_key
        if priority is not None:
            body["priority"] = priority
        if request_id is not None:
            body["rid"] = request_id
        payload = json.dumps(body)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        started_s = time.perf_counter()
        try:
            connection.request("POST", "/generate", payload, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise GenerationError(
                    f"{self._host}:{self._port} answered {response.status}: {response.read()[:400].decode()}",
                    code="client.refused",
                )
            return self._read_stream(response, started_s)
        except (OSError, http.client.HTTPException) as error:
            raise GenerationError(
                f"the request to {self._host}:{self._port} broke off: {type(error).__name__}: {error}",
                code="client.connection",
            ) from error
        finally:
            connection.close()

    def _read_stream(self, response: http.client.HTTPResponse, started_s: float) -> Generation:
        first_token_s: float | None = None
        last: dict[str, Any] = {}
        tokens: list[int] = []
        for event in _events(response):
            if "error" in event:
                raise GenerationError(f"the server reported {event['error']}", code="client.server_error")
            reason = (event.get("meta_info") or {}).get("finish_reason")
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise GenerationError(f"the request was aborted: {reason.get('message')}", code="client.aborted")
            if event.get("output_ids") and first_token_s is None:
                first_token_s = time.perf_counter() - started_s
            tokens = _merge(tokens, event)
            last = event
        finished_s = time.perf_counter() - started_s
        meta = last.get("meta_info")
        if first_token_s is None or not isinstance(meta, dict) or not meta.get("finish_reason"):
            raise GenerationError(f"the answer ended early: {last!r:.300}", code="client.incomplete")
        return Generation(
            token_ids=tuple(tokens),
            ttft_s=first_token_s,
            jct_s=finished_s,
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            request_id=str(meta["id"]),
        )


def _merge(tokens: list[int], event: dict[str, Any]) -> list[int]:
    """Tokens so far. An event carries all of them or, with incremental output on, only the new ones."""
    new = [int(token) for token in event.get("output_ids") or ()]
    total = int((event.get("meta_info") or {}).get("completion_tokens") or 0)
    return new if len(new) == total else tokens + new


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON payloads of a stream of server-sent events."""
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        payload = line[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        event = json.loads(payload)
        if isinstance(event, dict):
            yield event
