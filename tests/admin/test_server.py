"""The admin API over real sockets: routes, problems, OpenAPI."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controld.admin.backend import DecisionFilter, HypotheticalContext
from controld.admin.problem import NotFoundError
from controld.admin.server import AdminAddress, AdminServer
from controld.contract.errors import ControldError
from controld.obs.metrics import Metrics


class RecordedBackend:
    """Answers with what it was asked, so that a test sees how requests were understood."""

    def __init__(self) -> None:
        self.accept_reload = True

    def ready(self) -> tuple[bool, str]:
        return False, "no policy yet"

    async def status(self) -> dict[str, Any]:
        raise RuntimeError("a defect")

    async def dataplanes(self) -> list[dict[str, Any]]:
        return [{"agent_id": "prefill-0"}]

    async def candidates(self, workload: str | None) -> list[dict[str, Any]]:
        return [{"workload": workload}]

    async def decisions(self, wanted: DecisionFilter) -> dict[str, Any]:
        return {"limit": wanted.limit, "class": wanted.service_class, "arm": wanted.arm_id}

    async def explain(self, transfer_id: str) -> dict[str, Any]:
        raise NotFoundError(f"no decision {transfer_id}", gone=transfer_id == "old")

    async def explain_hypothetical(self, context: HypotheticalContext) -> dict[str, Any]:
        return {"bytes": context.size_bytes, "bandwidth": context.bandwidth_bytes_per_s, "load": context.load}

    async def posteriors(self) -> list[dict[str, Any]]:
        return []

    async def policies(self) -> dict[str, Any]:
        return {"generation": 1}

    async def reload(self) -> tuple[bool, dict[str, Any]]:
        return self.accept_reload, {"generation": 1, "problems": [] if self.accept_reload else ["x"]}

    async def start_study(self, specification: dict[str, Any]) -> dict[str, Any]:
        if not specification:
            raise ControldError("nothing to study", code="study.empty", hint="name a workload")
        return specification

    async def studies(self) -> list[dict[str, Any]]:
        return []

    async def study(self, study_id: str) -> dict[str, Any]:
        return {"id": study_id}

    async def cancel_study(self, study_id: str) -> dict[str, Any]:
        return {"id": study_id, "state": "cancelled"}

    async def study_events(self, study_id: str) -> AsyncIterator[dict[str, Any]]:
        for done in range(3):
            yield {"id": study_id, "done": done}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, RecordedBackend, AdminServer]]:
    backend = RecordedBackend()
    socket = tmp_path / "admin.sock"
    server = AdminServer(backend, Metrics(), (AdminAddress(socket=socket), AdminAddress(host="127.0.0.1")))
    await server.start()
    async with aiohttp.ClientSession("http://daemon", connector=aiohttp.UnixConnector(str(socket))) as client:
        yield client, backend, server
    await server.stop()
    assert not socket.exists()


async def test_unix_socket_is_private_and_tcp_answers(served) -> None:  # type: ignore[no-untyped-def]
    client, _, server = served
    socket_path = server.bound[0].removeprefix("unix://")
    assert Path(socket_path).stat().st_mode & 0o777 == 0o600
    async with aiohttp.ClientSession() as tcp, tcp.get(server.bound[1] + "/healthz") as response:
        assert response.status == 200
    async with client.get("/readyz") as response:
        assert response.status == 503
        assert (await response.json())["reason"] == "no policy yet"


async def test_requests_are_understood_with_units(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get("/v1/explain?class=chat&bytes=20MB&bandwidth=200Mbit") as response:
        assert await response.json() == {"bytes": 20e6, "bandwidth": 25e6, "load": 0.0}
    async with client.get("/v1/decisions?limit=7&arm=raw") as response:
        assert await response.json() == {"limit": 7, "class": None, "arm": "raw"}


@pytest.mark.parametrize(
    ("path", "status", "code", "named"),
    [
        ("/v1/decisions?limit=0", 400, "field.invalid", "limit"),
        ("/v1/decisions?limit=1e2", 400, "field.invalid", "limit"),
        ("/v1/decisions?limits=3", 400, "field.invalid", "limits"),
        ("/v1/explain?bytes=20&bandwidth=1Gbit", 400, "quantity.unit_missing", "bytes"),
        ("/v1/explain?bytes=20MB", 400, "field.invalid", "bandwidth"),
        ("/v1/explain?bytes=20MB&bandwidth=1Gbit&load=nan", 400, "field.invalid", "load"),
        ("/v1/decisions/x/explain", 404, "resource.not_found", "x"),
        ("/v1/decisions/old/explain", 410, "resource.gone", "old"),
        ("/v1/nothing", 404, "route.unknown", ""),
        ("/v1/status", 500, "internal", ""),
    ],
)
async def test_problems_have_stable_codes_and_name_the_field(served, path, status, code, named) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get(path) as response:
        problem = await response.json()
        assert response.content_type == "application/problem+json"
        assert (response.status, problem["status"], problem["code"]) == (status, status, code)
        assert named in problem["title"]
        assert "defect" not in problem["title"], "the inside of an error stays inside"


async def test_a_broken_request_is_counted_and_the_server_goes_on(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get("/v1/status") as response:
        assert response.status == 500
    async with client.get("/metrics") as response:
        assert re.search(r'controld_internal_errors_total\{where="admin"\} 1', await response.text())


async def test_bodies_are_checked(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    for body, status in ((b"{", 400), (b"[]", 400), (b"{}", 422), (b'{"workload": "w"}', 201)):
        async with client.post("/v1/studies", data=body) as response:
            assert response.status == status, body


async def test_reload_says_when_it_was_refused(served) -> None:  # type: ignore[no-untyped-def]
    client, backend, _ = served
    async with client.post("/v1/reload") as response:
        assert response.status == 200
    backend.accept_reload = False
    async with client.post("/v1/reload") as response:
        assert response.status == 422
        assert (await response.json())["problems"] == ["x"]


async def test_study_events_stream(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get("/v1/studies/s1/events") as response:
        assert response.content_type == "text/event-stream"
        assert (await response.text()).count("data: ") == 3


async def test_openapi_describes_every_route_that_is_served(served) -> None:  # type: ignore[no-untyped-def]
    client, _, server = served
    async with client.get("/v1/openapi.json") as response:
        document = await response.json()
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    router = server._application.router
    routed = {(route.resource.canonical, route.method) for route in router.routes() if route.method != "HEAD"}
    assert described == routed - {("/v1/openapi.json", "GET")}
