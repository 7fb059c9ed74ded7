"""What is started, how it is watched and how it ends, with small real processes in place of SGLang."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dataplanes.sglang.launcher import (
    GenerationError,
    LaunchError,
    PairSettings,
    Role,
    RouterKind,
    ServerProcess,
    ServerSettings,
    SglangClient,
)
from dataplanes.sglang.launcher.process import free_port, wait_until_ready
from dataplanes.sglang.launcher.settings import (
    SettingsError,
    router_command,
    server_command,
    server_environment,
)

# A server that is healthy after a moment and keeps a child of its own, as SGLang does.
SERVER = textwrap.dedent("""
    import http.server, signal, subprocess, sys, time
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print("child", child.pid, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *a): pass
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")


def start(log_dir: Path, *arguments: str, program: str = SERVER) -> ServerProcess:
    port = free_port()
    return ServerProcess(
        name="small",
        command=[sys.executable, "-c", program, str(port), *arguments],
        environment=os.environ,
        log_dir=log_dir,
        host="127.0.0.1",
        port=port,
    )


def child_pid(server: ServerProcess) -> int:
    return int(server.log_file.read_text().split()[1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(pid: int, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize("arguments", [(), ("deaf",)], ids=["obeys SIGTERM", "ignores SIGTERM"])
def test_stop_ends_the_server_and_its_children(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    server = start(tmp_path, *arguments)
    try:
        wait_until_ready([server], deadline_s=120)
        child = child_pid(server)
        assert is_alive(child)
        assert server.ready_after_s is not None
        assert server.tree_rss_bytes() > 1_000_000
    finally:
        server.stop(grace_s=0.3)
    assert not server.is_running()
    assert not is_alive(child)


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = start(tmp_path, program="print('the reason'); raise SystemExit(3)")
    with pytest.raises(LaunchError, match=r"small ended with status 3(.|\n)*the reason") as caught:
        wait_until_ready([server], deadline_s=120)
    assert caught.value.code == "launcher.server_died"
    server.stop()


def test_a_server_that_is_never_ready_is_reported_when_time_is_up(tmp_path: Path) -> None:
    server = start(tmp_path, program="import time; print('still loading', flush=True); time.sleep(300)")
    try:
        limit = time.monotonic() + 60
        while not server.log_file.read_text() and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(LaunchError, match=r"not ready within 1 s(.|\n)*still loading") as caught:
            wait_until_ready([server], deadline_s=1)
    finally:
        server.stop()
    assert caught.value.code == "launcher.not_ready"


def test_a_server_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from dataplanes.sglang.launcher import ServerProcess
        server = ServerProcess(name="small", command=[sys.executable, "-c", "import time; time.sleep(300)"],
                               environment=os.environ, log_dir=Path({str(tmp_path)!r}), host="127.0.0.1", port=1)
        print(server.pid, flush=True)
        time.sleep(300)
    """)
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server_pid = int(process.stdout.readline())
    assert is_alive(server_pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert ends_within(server_pid, 60)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_commands_carry_the_settings(model_folder: Path) -> None:
    settings = ServerSettings(
        model=model_folder, page_tokens=16, chunked_prefill_tokens=512, radix_cache=False, extra_arguments=("--x",)
    )
    command = server_command(settings, Role.PREFILL, host="198.18.0.2", port=4000, bootstrap_port=4001)
    pairs = dict(itertools.pairwise(command))
    assert pairs["--page-size"] == "16"
    assert pairs["--chunked-prefill-size"] == "512"
    assert pairs["--host"] == "198.18.0.2"
    assert pairs["--disaggregation-mode"] == "prefill"
    assert pairs["--disaggregation-transfer-backend"] == "mooncake_tcp"
    assert pairs["--disaggregation-bootstrap-port"] == "4001"
    assert "--disable-radix-cache" in command
    assert "--sleep-on-idle" in command
    assert command[-1] == "--x"
    unsplit = server_command(settings, Role.UNSPLIT, host="127.0.0.1", port=4000, bootstrap_port=0)
    assert "--disaggregation-mode" not in unsplit


def test_environment_passes_controld_through_and_names_the_servers_own_address(model_folder: Path) -> None:
    settings = ServerSettings(model=model_folder, transfer_timeout_s=77, environment={"A": "1", "B": "1"})
    base = {"CONTROLD_ADDRESS": "unix:/run/controld.sock", "MC_TCP_PROTO": "1", "PYTHONPATH": "/mine"}
    environment = server_environment(settings, host="198.18.0.2", extra={"B": "2"}, base=base)
    assert environment["CONTROLD_ADDRESS"] == "unix:/run/controld.sock"
    assert environment["SGLANG_HOST_IP"] == "198.18.0.2"
    assert environment["MC_TRANSFER_TIMEOUT"] == environment["MC_TCP_STATUS_TIMEOUT_SEC"] == "77"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert (environment["A"], environment["B"]) == ("1", "2")
    # Unacknowledged framing would let a status message overtake the KV.
    assert environment["MC_TCP_PROTO"] == "2"
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"
    assert "CONTROLD_ADDRESS" not in server_environment(settings, host="127.0.0.1", extra={}, base={})


def test_router_command_differs_by_kind() -> None:
    def command(kind: RouterKind) -> list[str]:
        return router_command(
            kind,
            host="127.0.0.1",
            port=1,
            prefill_url="http://a:2",
            bootstrap_port=3,
            decode_url="http://b:4",
            metrics_port=5,
        )

    assert "--mini-lb" in command(RouterKind.MINI_LB)
    assert "--mini-lb" not in command(RouterKind.GATEWAY)
    position = command(RouterKind.GATEWAY).index("--prefill")
    assert command(RouterKind.GATEWAY)[position : position + 3] == ["--prefill", "http://a:2", "3"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chunked_prefill_tokens": 100}, "chunked_prefill_tokens"),
        ({"pool_tokens": 64}, "pool_tokens"),
        ({"page_tokens": 0}, "page_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(model_folder: Path, changes: dict[str, int], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        ServerSettings(model=model_folder, **changes)  # type: ignore[arg-type]


def test_a_missing_model_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="make setup"):
        ServerSettings(model=tmp_path / "absent")


class FakeStream(ThreadingHTTPServer):
    """Plays back prepared events, so that the client's handling of broken streams can be tested."""

    daemon_threads = True

    def __init__(self) -> None:
        self.events: list[object] = []
        self.status = 200
        self.seen: dict[str, object] = {}
        self.delay_s = 0.0
        """Between the first event and the second."""

        super().__init__(("127.0.0.1", 0), FakeHandler)


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeStream

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen = json.loads(body)
        self.send_response(self.server.status)
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            if event is self.server.events[0]:
                time.sleep(self.server.delay_s)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    server = FakeStream()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def event(tokens: list[int], completed: int, *, finished: object = None) -> dict[str, object]:
    meta = {"id": "r1", "prompt_tokens": 3, "completion_tokens": completed, "finish_reason": finished}
    return {"output_ids": tokens, "meta_info": meta}


def client_of(stream: FakeStream) -> SglangClient:
    return SglangClient("127.0.0.1", stream.server_address[1], timeout_s=60)


@pytest.mark.parametrize("cumulative", [True, False], ids=["all tokens so far", "only the new tokens"])
def test_tokens_are_collected_and_times_measured(stream: FakeStream, cumulative: bool) -> None:
    stream.delay_s = 0.5  # far more than the first token takes
    second, third = ([7, 8], [7, 8, 9]) if cumulative else ([8], [9])
    stream.events = [event([7], 1), event(second, 2), event(third, 3, finished={"type": "length"})]
    answer = client_of(stream).generate([1, 2, 3], max_new_tokens=3, extra_key="class=chat", priority=2)
    assert answer.token_ids == (7, 8, 9)
    assert 0 < answer.ttft_s < 0.45 < answer.jct_s
    assert stream.seen["extra_key"] == "class=chat"
    assert stream.seen["priority"] == 2
    assert stream.seen["input_ids"] == [1, 2, 3]


def test_an_answer_that_ends_early_is_an_error(stream: FakeStream) -> None:
    stream.events = [event([7], 1)]
    with pytest.raises(GenerationError, match="ended early"):
        client_of(stream).generate([1], max_new_tokens=3)


def test_an_aborted_request_is_an_error(stream: FakeStream) -> None:
    stream.events = [event([], 0, finished={"type": "abort", "message": "KV transfer failed"})]
    with pytest.raises(GenerationError, match="KV transfer failed"):
        client_of(stream).generate([1], max_new_tokens=3)


def test_a_refusal_is_an_error_with_its_status(stream: FakeStream) -> None:
    stream.status = 503
    with pytest.raises(GenerationError, match="503"):
        client_of(stream).generate([1], max_new_tokens=3)


def test_an_absent_server_is_an_error_not_a_crash() -> None:
    with pytest.raises(GenerationError, match="broke off"):
        SglangClient("127.0.0.1", free_port(), timeout_s=1).generate([1], max_new_tokens=1)


def test_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_pair_over_a_link_moves_only_prefill(model_folder: Path) -> None:
    class Up:
        inside_address = "198.18.0.2"
        outside_address = "198.18.0.1"
        inside = ("nsenter", "--net=/proc/1/ns/net", "--")

    settings = PairSettings(server=ServerSettings(model=model_folder), log_dir=model_folder)
    linked = settings.over_link(Up())  # type: ignore[arg-type]
    assert linked.prefill_host == "198.18.0.2"
    assert linked.decode_host == "198.18.0.1"
    assert linked.prefill_prefix[0] == "nsenter"
    assert settings.prefill_prefix == ()


def test_launcher_command_reports_a_missing_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplanes.sglang.launcher", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no model" in done.stderr
