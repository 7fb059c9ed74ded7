from __future__ import annotations

from pathlib import Path

import pytest

from controld.config import (
    TcpAddress,
    UnixAddress,
    find_config_file,
    is_config_file,
    load_config,
)
from controld.policy.problem import ConfigErrors

HEAD = "apiVersion: controld/v1\nkind: Daemon\n"


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "controld.yaml"
    file.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_config(file)
    return [str(problem).removeprefix(f"{file}:") for problem in caught.value.problems]


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "controld.yaml"
    file.parent.mkdir()
    file.write_text(
        HEAD
        + "state: {dir: ../state}\npolicy: {dir: ../policies}\n"
        + "fleet: {listen: [unix:run/f.sock, 'unix:///run/x.sock', '0.0.0.0:7480', '[::1]:0']}\n"
        + "admin: {socket: run/a.sock, listen: '127.0.0.1:7481'}\n"
    )
    config = load_config(file)
    assert config.state_dir == tmp_path / "state"
    assert config.policy.directory == tmp_path / "policies"
    assert config.fleet.listen == (
        UnixAddress(tmp_path / "etc/run/f.sock"),
        UnixAddress(Path("/run/x.sock")),
        TcpAddress("0.0.0.0", 7480),
        TcpAddress("::1", 0),
    )
    assert [str(a) for a in config.fleet.listen[1:]] == ["unix:///run/x.sock", "0.0.0.0:7480", "[::1]:0"]
    assert (config.admin.socket, config.admin.listen) == (tmp_path / "etc/run/a.sock", TcpAddress("127.0.0.1", 7481))


def test_defaults_are_what_systemd_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "controld.yaml"
    file.write_text(HEAD)
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/private/controld")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/controld")
    config = load_config(file)
    assert config.state_dir == Path("/var/lib/private/controld")
    assert config.artefacts_dir == Path("/var/lib/private/controld/artefacts")
    assert config.fleet.listen == (UnixAddress(Path("/run/controld/fleet.sock")),)
    assert config.admin.socket == Path("/run/controld/admin.sock")
    assert config.policy.directory == tmp_path / "policies"
    assert (config.fleet.lease_s, config.fleet.renew_interval_s, config.plan_interval_s) == (600, 30, 1)


def test_the_example_of_the_repository_is_right() -> None:
    file = Path(__file__).parents[2] / "etc" / "controld.yaml"
    assert is_config_file(file)
    config = load_config(file)
    assert (config.policy.directory / "chat.yaml").is_file()
    assert config.state_dir == file.parents[1] / "build" / "state"
    assert config.artefacts_dir == file.parents[1] / "build" / "models" / "artefacts"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("admin: {listen: '0.0.0.0:80'}", '3:17: admin.listen: "0.0.0.0:80" is not a loopback address (use 127.0.0.1'),
        ("admin: {listen: 'unix:/x'}", '3:17: admin.listen: "unix:/x" is not host:port (the unix socket has a key'),
        ("fleet: {listen: [localhost]}", '3:18: fleet.listen[0]: "localhost" is not host:port'),
        ("fleet: {listen: ['h:99999']}", '3:18: fleet.listen[0]: "h:99999" is not host:port'),
        ("fleet: {listen: ['::1:80']}", '3:18: fleet.listen[0]: "::1:80" is not host:port (put an IPv6'),
        ("fleet: {listen: ['unix:']}", '3:18: fleet.listen[0]: "unix:" names no path'),
        ("fleet: {listen: [5]}", "3:18: fleet.listen[0]: must be an address in a string"),
        ("fleet: {listen: []}", "3:17: fleet.listen: is empty"),
        ("fleet: {lease: 600}", '3:16: fleet.lease: "600" has no unit (write 600ms or 0.6s)'),
        ("fleet: {lease: 40s}", "3:8: fleet.renew_interval: is more than half of the lease"),
        ("fleet: {renew_interval: 400s}", "3:25: fleet.renew_interval: is more than half of the lease"),
        ("policy: {watch: yes}", '3:17: policy.watch: must be true or false, not "yes"'),
        ("policy: {poll_interval: 0s}", '3:25: policy.poll_interval: "0s" is not above zero'),
        ("log: {level: trace}", '3:14: log.level: "trace" is not known (known: debug, info, warning, error)'),
        ("log: {format: jsn}", '3:15: log.format: "jsn" is not known (did you mean json?)'),
        ("polcy: {}", "3:1: polcy: unknown key (did you mean policy?)"),
        ("state: {dir: /s}\nstate: {dir: /t}", "4:1: state: duplicate key (first at line 3, column 1)"),
        (f"admin: {{socket: /{'x' * 120}}}", "is longer than 107 bytes"),
        ("fleet: {listen: ['unix:/a', 'unix:/a']}", "3:29: fleet.listen[1]: /a is used twice"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(tmp_path: Path, line: str, problem: str) -> None:
    (found,) = problems(tmp_path, HEAD + line + "\n")
    assert problem in found


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "kind: Demon\nstop_grace: 5\nlog: {level: x}\n")) == 4


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"absent\.yaml: cannot be read: No such file or directory \(name one with"):
        load_config(tmp_path / "absent.yaml")


def test_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTROLD_CONFIG", raising=False)
    monkeypatch.setattr("controld.config.SYSTEM_FILE", tmp_path / "system.yaml")
    monkeypatch.chdir(tmp_path)
    assert find_config_file(None) == tmp_path / "system.yaml"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "controld.yaml").touch()
    assert find_config_file(None) == Path("etc/controld.yaml")
    (tmp_path / "system.yaml").touch()
    assert find_config_file(None) == tmp_path / "system.yaml"
    monkeypatch.setenv("CONTROLD_CONFIG", "/elsewhere.yaml")
    assert find_config_file(None) == Path("/elsewhere.yaml")
    assert find_config_file(Path("named.yaml")) == Path("named.yaml")
