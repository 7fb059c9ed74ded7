"""`controld reload` against a real server on a unix socket that reloads a real directory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from controld.cli.admin_client import AdminClient, AdminError
from controld.cli.main import main
from controld.policy.source import PolicySource


class Server:
    """The admin socket of a daemon, in a thread."""

    def __init__(self, socket: Path, source: PolicySource) -> None:
        self._socket = socket
        self._source = source
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._runner: web.AppRunner | None = None

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        application = web.Application()
        application.router.add_post("/v1/reload", self._reload)
        application.router.add_get("/v1/text", self._text)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._socket)).start()

    async def _reload(self, _: web.Request) -> web.Response:
        outcome = self._source.reload()
        return web.json_response(outcome.to_json(), status=200 if outcome.accepted else 422)

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(text="not JSON")


@pytest.fixture
def server(config_file: Path, policy_file: Path) -> Iterator[Server]:
    source = PolicySource(policy_file.parent)
    source.load_initial()
    found = Server(config_file.with_name("admin.sock"), source)
    yield found
    found.stop()


def test_it_says_what_is_in_force(server: Server, policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.start()
    assert main(["reload"]) == 0
    assert capsys.readouterr().out == "generation 1 in force, unchanged\n"
    policy_file.write_text(policy_file.read_text().replace("0.01", "0.02"))
    assert main(["reload", "--wait", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["generation"], outcome["changed"], outcome["problems"]) == (2, True, [])


def test_a_refusal_is_status_1_with_the_reasons(
    server: Server, policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    policy_file.write_text(policy_file.read_text() + "nonsense: 1\n")
    assert main(["reload", "--wait"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{policy_file}:7:1: nonsense: unknown key (known: apiVersion, kind, metadata, select, links, tenants, "
        "classes, guard)",
        "refused: generation 1 stays in force",
    ]
    assert main(["reload", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["line"] == 7


def test_without_a_daemon_it_fails_and_says_where_it_looked(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"controld: no daemon listens on {config_file.with_name('admin.sock')}: ")
    assert main(["reload", "--json", "--wait", "--timeout", "0.2"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "admin.unreachable"


def test_with_wait_it_outlasts_a_restart(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    starting = threading.Timer(0.3, server.start)
    starting.start()
    assert main(["reload", "--wait"]) == 0
    starting.join()
    assert "generation 1" in capsys.readouterr().out


def test_answers_that_are_not_the_api_are_errors(server: Server, config_file: Path) -> None:
    server.start()
    client = AdminClient(config_file.with_name("admin.sock"))
    with pytest.raises(AdminError) as broken:
        client.get("/v1/text")
    assert broken.value.code == "admin.broken"
    with pytest.raises(AdminError) as unknown:
        client.get("/v1/absent", limit=3, wanted=None)
    assert unknown.value.code in ("admin.broken", "http.404")
