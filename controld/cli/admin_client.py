"""The daemon's admin API from the command line: HTTP over its unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from controld.contract.errors import ControldError

_RETRY_S = 0.1


class AdminError(ControldError):
    """The daemon cannot be reached, or answered with a problem document.

    Args:
        status: of the HTTP response; 0 where there was none.
    """

    def __init__(self, message: str, *, code: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, code=code, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """What came back: the status and the JSON body."""

    status: int
    body: Any


class AdminClient:
    """Speaks to one daemon.

    Args:
        socket_path: of its admin socket.
        timeout_s: for each step of the exchange.
        patience_s: how long to try again while nobody listens, as while the daemon restarts.
    """

    def __init__(self, socket_path: Path, *, timeout_s: float = 30.0, patience_s: float = 0.0) -> None:
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._patience_s = patience_s

    @classmethod
    def from_arguments(cls, arguments: Namespace, *, patience_s: float = 0.0) -> AdminClient:
        """The client for the daemon that `--config` (or the settings file found) describes."""
        from controld.config import find_config_file, load_config

        return cls(load_config(find_config_file(arguments.config)).admin.socket, patience_s=patience_s)

    def get(self, path: str, **query: str | int | float | None) -> Any:
        """The body of a successful answer. Raises: AdminError."""
        chosen = {name: value for name, value in query.items() if value is not None}
        return self._succeed("GET", path + ("?" + urlencode(chosen) if chosen else ""), None)

    def post(self, path: str, body: Any = None, **query: str | None) -> Any:
        """The body of a successful answer; bytes are sent as they are. Raises: AdminError."""
        chosen = {name: value for name, value in query.items() if value is not None}
        return self._succeed("POST", path + ("?" + urlencode(chosen) if chosen else ""), body)

    def delete(self, path: str, **query: str | None) -> Any:
        """The body of a successful answer. Raises: AdminError."""
        chosen = {name: value for name, value in query.items() if value is not None}
        return self._succeed("DELETE", path + ("?" + urlencode(chosen) if chosen else ""), None)

    def request(self, method: str, path: str, body: Any = None) -> AdminResponse:
        """One exchange, whatever its status.

        Raises:
            AdminError: nobody listens, the exchange broke off, or the answer is not JSON.
        """
        connection = self._connect()
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if content else {})
            connection.request(method, path, body=content, headers=headers)
            response = connection.getresponse()
            return AdminResponse(response.status, json.loads(response.read() or b"null"))
        except TimeoutError as error:
            raise AdminError(
                f"the daemon did not answer {method} {path} within {self._timeout_s:g} s", code="admin.timeout"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminError(f"{method} {path} broke off: {error!r}", code="admin.broken") from error
        finally:
            connection.close()

    def events(self, path: str) -> Iterator[Any]:
        """Server-sent events, until the daemon ends them.

        Raises:
            AdminError: refused; or `admin.broken`, when the stream breaks off or is silent, as when the daemon dies.
        """
        connection = self._connect()
        try:
            connection.request("GET", path, headers={"Accept": "text/event-stream"})
            response = connection.getresponse()
            if response.status >= 400:
                self._check("GET", path, AdminResponse(response.status, json.loads(response.read() or b"null")))
            while line := response.readline():
                if line.startswith(b"data:"):
                    yield json.loads(line.removeprefix(b"data:"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminError(f"GET {path} broke off: {error!r}", code="admin.broken") from error
        finally:
            connection.close()

    def _succeed(self, method: str, path: str, body: Any) -> Any:
        return self._check(method, path, self.request(method, path, body))

    @staticmethod
    def _check(method: str, path: str, response: AdminResponse) -> Any:
        if response.status < 400:
            return response.body
        problem = response.body if isinstance(response.body, dict) else {}
        raise AdminError(
            str(problem.get("title", f"{method} {path} was answered with status {response.status}")),
            code=str(problem.get("code", f"http.{response.status}")),
            hint=str(problem.get("hint", "")),
            status=response.status,
        )

    def _connect(self) -> http.client.HTTPConnection:
        give_up_s = time.monotonic() + self._patience_s
        while True:
            connection = _UnixConnection(self._socket_path, self._timeout_s)
            try:
                connection.connect()
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() >= give_up_s:
                    raise AdminError(
                        f"no daemon listens on {self._socket_path}: {error.strerror or error}",
                        code="admin.unreachable",
                        hint="is controld serve running, with the same --config?",
                    ) from error
                time.sleep(_RETRY_S)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("controld", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))
