"""The admin API over real sockets: routes, problems, OpenAPI."""

from __future__ import annotations

import asyncio
import gzip
import io
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from controld.admin import operations
from controld.admin.backend import (
    AdminBackend,
    CandidateImport,
    CandidateListing,
    DecisionFilter,
    HypotheticalContext,
    PolicyEdit,
)
from controld.admin.event_stream import stream_events
from controld.admin.problem import NotFoundError
from controld.admin.server import AdminAddress, AdminServer
from controld.candidates.stored import ProfileFilter, ProfileKind
from controld.contract.errors import ControldError
from controld.obs.metrics import Metrics
from controld.policy.loader import SourceFile, parse_policies
from controld.profiling.errors import StudyNotFoundError


class BrokenStatus:
    """A daemon that does not serve yet, and whose page has a defect."""

    def ready(self) -> tuple[bool, str]:
        return False, "no policy yet"

    async def page(self) -> dict[str, Any]:
        raise RuntimeError("a defect")


class RecordedAgents:
    """Answers, like every part here, with what it was asked, so that a test sees how requests were understood."""

    async def dataplanes(self) -> list[dict[str, Any]]:
        return [{"agent_id": "prefill-0"}]

    async def spaces(self) -> list[dict[str, Any]]:
        return [{"kind": "sglang"}]


class RecordedEngines:
    async def listing(self) -> list[dict[str, Any]]:
        return [{"agent_id": "video-0"}]

    async def explain(self, agent_id: str) -> dict[str, Any]:
        if agent_id != "video 0":
            raise NotFoundError(f"nothing was decided for an engine {agent_id}", hint="engines: video 0")
        return {"agent_id": agent_id}


class RecordedCandidates:
    async def listing(self, wanted: ProfileFilter) -> CandidateListing:
        kv = [{"workload": wanted.workload, "number": number} for number in range(3)]
        video = [{"model": wanted.model, "number": number} for number in range(10, 12)]
        return CandidateListing(kv=kv, video=video, problems=[{"where": "row 1", "what": f"no {wanted.hardware}"}])

    async def export(self, kind: ProfileKind) -> dict[str, Any]:
        return {"profiles": [], "kind": kind}

    async def take(self, text: str, wanted: CandidateImport) -> dict[str, Any]:
        return {"length": len(text), "format": wanted.format, "model": wanted.model, "workload": wanted.workload}

    async def delete(self, wanted: ProfileFilter, *, dry_run: bool) -> dict[str, Any]:
        if wanted.config_id == "unknown":
            raise NotFoundError("no profile matches")
        return {**asdict(wanted), "dry_run": dry_run}


class RecordedDecisions:
    async def listing(self, wanted: DecisionFilter) -> dict[str, Any]:
        return {"limit": wanted.limit, "class": wanted.service_class, "arm": wanted.arm_id}

    async def explain(self, transfer_id: str) -> dict[str, Any]:
        raise NotFoundError(f"no decision {transfer_id}", gone=transfer_id == "old")

    async def explain_hypothetical(self, context: HypotheticalContext) -> dict[str, Any]:
        return {"bytes": context.size_bytes, "bandwidth": context.bandwidth_bytes_per_s, "load": context.load}


class RecordedLearned:
    async def posteriors(self) -> list[dict[str, Any]]:
        return []

    async def pins(self) -> list[dict[str, Any]]:
        return [{"arm_id": "a"}]

    async def release(self, arm_id: str, deployment: str | None) -> dict[str, Any]:
        if arm_id == "unknown":
            raise NotFoundError(f"no arm {arm_id} is out of use")
        return {"arm_id": arm_id, "deployment": deployment}


class RecordedPolicies:
    def __init__(self) -> None:
        self.accept_reload = True

    async def in_force(self) -> dict[str, Any]:
        return {"generation": 1}

    async def compare(self, edit: PolicyEdit) -> dict[str, Any]:
        parse_policies([SourceFile(file, content) for file, content in edit.files])
        return {"whole": edit.whole}

    async def reload(self) -> tuple[bool, dict[str, Any]]:
        return self.accept_reload, {"generation": 1, "problems": [] if self.accept_reload else ["x"]}


class RecordedStudies:
    async def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if not body:
            raise ControldError("nothing to study", code="study.empty", hint="name a workload")
        return body

    async def list(self) -> list[dict[str, Any]]:
        return []

    async def get(self, study_id: str) -> dict[str, Any]:
        if study_id == "unknown":
            raise StudyNotFoundError(study_id)
        return {"id": study_id}

    async def cancel(self, study_id: str) -> dict[str, Any]:
        return {"id": study_id, "state": "cancelled"}

    async def pause(self, study_id: str) -> dict[str, Any]:
        return {"id": study_id, "state": "paused"}

    async def resume(self, study_id: str) -> dict[str, Any]:
        return {"id": study_id, "state": "running"}

    async def compare(self, study_ids: Sequence[str]) -> tuple[dict[str, Any], ...]:
        return tuple({"id": study_id} for study_id in study_ids)

    async def events(self, study_id: str) -> AsyncIterator[dict[str, Any]]:
        for done in range(3):
            yield {"id": study_id, "done": done}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, RecordedPolicies, AdminServer]]:
    policies = RecordedPolicies()
    backend = AdminBackend(
        status=BrokenStatus(), agents=RecordedAgents(), engines=RecordedEngines(), candidates=RecordedCandidates(),
        decisions=RecordedDecisions(), learned=RecordedLearned(), policies=policies, studies=RecordedStudies(),
    )  # fmt: skip
    socket = tmp_path / "admin.sock"
    server = AdminServer(backend, Metrics(), (AdminAddress(socket=socket), AdminAddress(host="127.0.0.1")))
    await server.start()
    async with aiohttp.ClientSession("http://daemon", connector=aiohttp.UnixConnector(str(socket))) as client:
        yield client, policies, server
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
    async with client.get("/v1/engines/video%200/explain") as response:
        assert await response.json() == {"agent_id": "video 0"}
    async with client.get("/v1/engines") as response:
        assert await response.json() == {"engines": [{"agent_id": "video-0"}]}


async def test_candidates_come_in_pages_where_a_client_wants_them(served) -> None:  # type: ignore[no-untyped-def]
    async def page(query: str) -> tuple[list[int], int]:
        async with served[0].get(f"/v1/candidates?{query}") as response:
            answer = await response.json()
            return [one["number"] for one in answer["candidates"]], answer["total"]

    assert await page("workload=a") == ([0, 1, 2], 3)
    assert await page("limit=2") == ([0, 1], 3)
    assert await page("limit=2&offset=2") == ([2], 3)
    assert await page("offset=3") == ([], 3)
    assert await page("limit=2&kind=kv") == ([0, 1], 3)


async def test_each_kind_of_candidate_has_a_list_of_its_own(served) -> None:  # type: ignore[no-untyped-def]
    async def answer(query: str) -> dict[str, Any]:
        async with served[0].get(f"/v1/candidates?{query}") as response:
            found: dict[str, Any] = await response.json()
            return found

    both = await answer("limit=1&offset=1&hardware=cpu&workload=w&model=m")
    assert both == {
        "candidates": [{"workload": "w", "number": 1}], "total": 3,
        "video_candidates": [{"model": "m", "number": 11}], "video_total": 2,
        "problems": [{"where": "row 1", "what": "no cpu"}],
    }  # fmt: skip
    assert (await answer("kind=kv")).keys() == {"candidates", "total", "problems"}
    assert (await answer("kind=video")).keys() == {"video_candidates", "video_total", "problems"}
    for query, kind in (("", "kv"), ("?kind=kv", "kv"), ("?kind=video", "video")):
        async with served[0].get(f"/v1/candidates/export{query}") as response:
            assert (await response.json())["kind"] == kind


async def test_candidates_are_deleted_by_what_is_named(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    query = "kind=video&workload=w&model=m&hardware=cpu%2F1&config_id=c"
    wanted = {"kind": "video", "workload": "w", "model": "m", "hardware": "cpu/1", "config_id": "c"}
    for suffix, dry_run in (("", False), ("&dry_run=false", False), ("&dry_run=true", True)):
        async with client.delete(f"/v1/candidates?{query}{suffix}") as response:
            assert await response.json() == {**wanted, "dry_run": dry_run}
    for query, status in (("config_id=unknown", 404), ("dry_run=yes&kind=kv", 400), ("arm=a", 400), ("kind=x", 400)):
        async with client.delete(f"/v1/candidates?{query}") as response:
            assert response.status == status, query


@pytest.mark.parametrize(
    ("path", "status", "code", "named"),
    [
        ("/v1/decisions?limit=0", 400, "field.invalid", "limit"),
        ("/v1/decisions?limit=1e2", 400, "field.invalid", "limit"),
        ("/v1/decisions?limits=3", 400, "field.invalid", "limits"),
        ("/v1/decisions?limit=3&limit=4", 400, "field.invalid", "limit"),
        ("/v1/decisions?arm=a&arm=a", 400, "field.invalid", "arm"),
        ("/v1/candidates?workload=a&workload=b", 400, "field.invalid", "workload"),
        ("/v1/candidates?limit=0", 400, "field.invalid", "limit"),
        ("/v1/candidates?offset=-1", 400, "field.invalid", "offset"),
        ("/v1/candidates?kind=audio", 400, "field.invalid", "kind"),
        ("/v1/candidates/export?kind=", 400, "field.invalid", "kind"),
        ("/v1/explain?bytes=20MB&bytes=1MB&bandwidth=1Gbit", 400, "field.invalid", "bytes"),
        ("/v1/explain?bytes=20MB&bandwidth=1Gbit&load=0&load=1", 400, "field.invalid", "load"),
        ("/v1/studies/compare?ids=a&ids=b", 400, "field.invalid", "ids"),
        ("/v1/explain?bytes=20&bandwidth=1Gbit", 400, "quantity.unit_missing", "bytes"),
        ("/v1/explain?bytes=20MB", 400, "field.invalid", "bandwidth"),
        ("/v1/explain?bytes=20MB&bandwidth=1Gbit&load=nan", 400, "field.invalid", "load"),
        ("/v1/decisions/x/explain", 404, "resource.not_found", "x"),
        ("/v1/decisions/old/explain", 410, "resource.gone", "old"),
        ("/v1/engines/x/explain", 404, "resource.not_found", "x"),
        ("/v1/studies/unknown", 404, "resource.not_found", "unknown"),
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


@pytest.mark.parametrize("path", ["/v1/studies", "/v1/policies/diff"])
@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (b'{"workload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, "nested deeper"),
        (b'{"workload": ' + b"[" * 40 + b"]" * 40 + b"}", {}, "nested deeper"),
        (b'{"a": ' * 50_000, {}, "nested deeper"),
        (b'{"workload": "a", "workload": "b"}', {}, "'workload' is there twice"),
        (b'{"workload": {"a": 1, "a": 1}}', {}, "'a' is there twice"),
        (b'{"workload": NaN}', {}, "NaN"),
        (b'{"workload": 1e999}', {}, "1e999"),
        (b'{"workload": ' + b"9" * 5000 + b"}", {}, "not JSON"),
        (b"{}", {"Content-Type": "application/json; charset=klingon"}, "klingon"),
        (b'{"workload": "\xff"}', {}, "not UTF-8"),
        (b"this is no gzip", {"Content-Encoding": "gzip"}, "unpacked"),
        (b"this is no deflate", {"Content-Encoding": "deflate"}, "unpacked"),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_clients_mistake(served, path, body, headers, said) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.post(path, data=body, headers=headers) as response:
        problem = await response.json()
        assert (response.status, problem["code"]) == (400, "field.invalid")
        assert problem["title"].startswith("body: ")
        assert said in problem["title"]


async def test_a_client_that_leaves_amid_its_body_is_no_fault_of_ours(served) -> None:  # type: ignore[no-untyped-def]
    client, _, server = served
    _, writer = await asyncio.open_unix_connection(server.bound[0].removeprefix("unix://"))
    writer.write(b"POST /v1/studies HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    async with client.get("/healthz") as response:  # answered later than the other is begun
        assert response.status == 200
    writer.close()
    await writer.wait_closed()
    async with client.get("/healthz"), client.get("/metrics") as response:
        assert not re.search(r'controld_internal_errors_total\{where="admin"\} [1-9]', await response.text())


async def test_a_packed_body_is_read_and_counts_by_what_it_holds(served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    monkeypatch.setattr(operations, "MAX_STUDY_BYTES", 1000)
    for length, status in ((900, 201), (1_000_000, 400)):
        packed = gzip.compress(b'{"workload": "w"' + b" " * length + b"}")
        async with client.post("/v1/studies", data=packed, headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == status


async def test_a_document_of_candidates_may_be_long_and_is_passed_on_as_it_is(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    path = "/v1/candidates/import"
    async with client.post(path, data=io.BytesIO(b"x" * 3_000_000)) as response:
        assert await response.json() == {"length": 3_000_000, "format": "controld", "model": None, "workload": None}
    async with client.post(f"{path}?format=kvserve&workload=qa&model=m", data="ä") as response:
        assert await response.json() == {"length": 1, "format": "kvserve", "model": "m", "workload": "qa"}
    for query, body in (("format=xml", b"{}"), ("workload=qa", b"{}"), ("format=kvserve&model=", b"{}"), ("", b"\xff")):
        async with client.post(f"{path}?{query}", data=body) as response:
            assert response.status == 400, query


async def test_a_document_of_candidates_may_not_be_endless(served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    monkeypatch.setattr(operations, "MAX_IMPORT_BYTES", 1000)
    async with client.post("/v1/candidates/import", data=b"x" * 1001) as response:
        assert response.status == 400
        assert "longer than 1000" in (await response.json())["title"]


async def test_reload_says_when_it_was_refused(served) -> None:  # type: ignore[no-untyped-def]
    client, policies, _ = served
    async with client.post("/v1/reload") as response:
        assert response.status == 200
    policies.accept_reload = False
    async with client.post("/v1/reload") as response:
        assert response.status == 422
        assert (await response.json())["problems"] == ["x"]


async def test_a_policy_edit_comes_as_files_and_its_problems_go_back_with_their_places(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    path, good = "/v1/policies/diff", (Path(__file__).parents[2] / "policies/chat.yaml").read_text()
    async with client.post(path, json={"files": [{"file": "a.yaml", "content": good}], "whole": False}) as response:
        assert await response.json() == {"whole": False}
    broken = {"files": [{"file": "a.yaml", "content": "kind: Policy\nname: \udcff\n"}]}
    async with client.post(path, json=broken) as response:
        assert response.status == 422
        problem = await response.json()
        assert problem["code"] == "policy.invalid"
        assert {one["file"] for one in problem["problems"]} == {"a.yaml"}
        assert any(one["text"].startswith("a.yaml:2:7") for one in problem["problems"])
    for body, named in (
        ([], "body"),
        ({"files": []}, "files"),
        ({"files": [{"file": "a"}]}, "files[0]"),
        ({"files": [{"file": "a", "content": 1}]}, "files[0]"),
        ({"files": [{"file": "a", "content": "\ud800"}]}, "files[0].content"),
        ({"files": [{"file": "a", "content": ""}] * 2}, "files[1].file"),
        ({"files": [{"file": "a", "content": ""}], "whole": 1}, "whole"),
        ({"files": [{"file": "a", "content": ""}], "all": True}, "body"),
    ):
        async with client.post(path, json=body) as response:
            assert response.status == 400, body
            assert named in (await response.json())["title"]


async def test_study_events_stream(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get("/v1/studies/s1/events") as response:
        assert response.content_type == "text/event-stream"
        assert (await response.text()).count("data: ") == 3


async def test_studies_are_paused_resumed_and_compared(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    for verb, state in (("pause", "paused"), ("resume", "running")):
        async with client.post(f"/v1/studies/s1/{verb}") as response:
            assert await response.json() == {"id": "s1", "state": state}
    async with client.get("/v1/studies/compare?ids=a,b") as response:
        assert await response.json() == {"studies": [{"id": "a"}, {"id": "b"}]}
    for query in ("", "?ids=", "?ids=" + ",".join("abcdefghijklmnopq")):
        async with client.get(f"/v1/studies/compare{query}") as response:
            assert response.status == 400
            assert "ids" in (await response.json())["title"]


async def test_a_silent_stream_says_that_it_is_alive_and_a_reader_may_leave(tmp_path: Path) -> None:
    released = asyncio.Event()
    closed = asyncio.Event()

    async def events() -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"number": 1}
            await released.wait()
            yield {"number": 2}
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream_events(request, events(), comment_s=0.02)

    application = web.Application()
    application.router.add_get("/", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    async with (
        aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as client,
        client.get("/") as response,
        asyncio.timeout(30),
    ):
        assert await response.content.readline() == b'data: {"number": 1}\n'
        while not (line := await response.content.readline()).startswith(b":"):
            assert line == b"\n"
        released.set()
        while not (line := await response.content.readline()).startswith(b"data"):
            assert line in (b"\n", b": still here\n")
        assert line == b'data: {"number": 2}\n'
    async with asyncio.timeout(30):
        await closed.wait()
    await runner.cleanup()


async def test_openapi_describes_every_route_that_is_served(served) -> None:  # type: ignore[no-untyped-def]
    client, _, server = served
    async with client.get("/v1/openapi.json") as response:
        document = await response.json()
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    router = server._application.router
    routed = {(route.resource.canonical, route.method) for route in router.routes() if route.method != "HEAD"}
    assert described == routed - {("/v1/openapi.json", "GET")}


async def test_an_arm_is_released_by_name(served) -> None:  # type: ignore[no-untyped-def]
    client, _, _ = served
    async with client.get("/v1/pins") as response:
        assert await response.json() == {"pins": [{"arm_id": "a"}]}
    async with client.post("/v1/pins/9c1e/release?deployment=chat") as response:
        assert await response.json() == {"arm_id": "9c1e", "deployment": "chat"}
    async with client.post("/v1/pins/unknown/release") as response:
        assert response.status == 404
    async with client.post("/v1/pins/9c1e/release?class=chat") as response:
        assert response.status == 400
