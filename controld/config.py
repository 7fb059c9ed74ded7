"""The daemon's own settings file: strict, complete with defaults, paths relative to the file itself."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from controld.obs.logs import LogFormat
from controld.policy.problem import ConfigErrors, Problem
from controld.policy.settings import DurationS, Reading, StrictModel, refuse
from controld.policy.strict_yaml import Scalar, Table, parse

ENVIRONMENT_VARIABLE = "CONTROLD_CONFIG"
SYSTEM_FILE = Path("/etc/controld/controld.yaml")
CHECKOUT_FILE = Path("etc/controld.yaml")

_MAX_SOCKET_PATH_BYTES = 107
_UNIX = "unix:"
_KIND = "Daemon"


class LogLevel(StrEnum):
    """What is logged at least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Where policies are and how changes of them are seen.

    Args:
        directory: of the files.
        watch: whether file events are used; polling happens in any case.
        poll_interval_s: between two looks at their bytes.
        settle_s: how long the bytes must stay the same before they are read.
    """

    directory: Path
    watch: bool
    poll_interval_s: float
    settle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Where agents connect and how long they may act without the daemon."""

    listen: tuple[Address, ...]
    lease_s: float
    renew_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """Where people and scripts connect. The command line uses the socket."""

    socket: Path
    listen: TcpAddress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole file, valid.

    Args:
        file: it came from.
        state_dir: for everything that must outlive the process.
        artefacts_dir: of calibrated codec artefacts, which the daemon hands to the planes that need them.
        plan_interval_s: the least time between two plans.
        stop_grace_s: what each component gets to finish.
    """

    file: Path
    state_dir: Path
    artefacts_dir: Path
    policy: PolicySettings
    fleet: FleetSettings
    admin: AdminSettings
    plan_interval_s: float
    stop_grace_s: float
    log_level: LogLevel
    log_format: LogFormat


def _address(value: object) -> Address:
    if not isinstance(value, str):
        raise refuse("must be an address in a string", "unix:/run/controld/fleet.sock or 127.0.0.1:7480")
    if value.startswith(_UNIX):
        path = value.removeprefix(_UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or path.startswith("//"):
            raise refuse(f'"{value}" names no path', "unix:/run/controld/fleet.sock")
        return UnixAddress(Path(path))
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise refuse(f'"{value}" is not host:port', "127.0.0.1:7480, [::1]:7480 or unix:/path")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise refuse(f'"{value}" is not host:port', "put an IPv6 address in brackets: [::1]:7480")
    return TcpAddress(host.strip("[]"), int(port))


def _loopback(value: object) -> TcpAddress:
    address = _address(value)
    if not isinstance(address, TcpAddress):
        raise refuse(f'"{value}" is not host:port', "the unix socket has a key of its own: admin.socket")
    try:
        loopback = address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise refuse(f'"{value}" is not a loopback address', "use 127.0.0.1 and a proxy that authenticates")
    return address


AnyAddress = Annotated[Address, PlainValidator(_address)]
LoopbackAddress = Annotated[TcpAddress, PlainValidator(_loopback)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]


class StateKeys(StrictModel):
    dir: PathText | None = None


class ArtefactKeys(StrictModel):
    dir: PathText | None = None


class PolicyFileKeys(StrictModel):
    dir: PathText = "policies"
    watch: bool = True
    poll_interval: DurationS = 2.0
    settle: DurationS = 0.25


class FleetKeys(StrictModel):
    listen: Annotated[list[AnyAddress], Field(min_length=1)] | None = None
    lease: DurationS = 600.0
    renew_interval: DurationS = 30.0


class AdminKeys(StrictModel):
    socket: PathText | None = None
    listen: LoopbackAddress | None = None


class PlannerKeys(StrictModel):
    interval: DurationS = 1.0


class LogKeys(StrictModel):
    level: Annotated[LogLevel, Field(strict=False)] = LogLevel.INFO
    format: Annotated[LogFormat, Field(strict=False)] = LogFormat.TEXT


class ConfigKeys(StrictModel):
    api_version: Annotated[Literal["controld/v1"], Field(alias="apiVersion")]
    kind: Literal["Daemon"]
    state: StateKeys = StateKeys()
    artefacts: ArtefactKeys = ArtefactKeys()
    policy: PolicyFileKeys = PolicyFileKeys()
    fleet: FleetKeys = FleetKeys()
    admin: AdminKeys = AdminKeys()
    planner: PlannerKeys = PlannerKeys()
    log: LogKeys = LogKeys()
    stop_grace: DurationS = 5.0


def find_config_file(named: Path | None) -> Path:
    """The named file; else `$CONTROLD_CONFIG`; else the system's; else a checkout's."""
    if named is not None:
        return named
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(os.environ[ENVIRONMENT_VARIABLE])
    return SYSTEM_FILE if SYSTEM_FILE.exists() or not CHECKOUT_FILE.exists() else CHECKOUT_FILE


def is_config_file(file: Path) -> bool:
    """Whether a file says that it holds settings of the daemon, rightly or not."""
    try:
        root = parse(file.read_bytes()).root
    except OSError:
        return False
    kind = root.get("kind") if isinstance(root, Table) else None
    return isinstance(kind, Scalar) and kind.value == _KIND


def load_config(file: Path) -> Config:
    """Read and check the settings file.

    Raises:
        ConfigErrors: with every problem of it.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        hint = f"name one with --config or ${ENVIRONMENT_VARIABLE}"
        raise ConfigErrors([Problem(str(file), 0, 0, "", f"cannot be read: {error.strerror}", hint)]) from error
    reading = Reading(str(file), content)
    keys = reading.validate(ConfigKeys)
    if keys is not None and not reading.problems:
        config = _to_config(file, keys)
        _check(reading, config)
        if not reading.problems:
            return config
    raise ConfigErrors(reading.problems)


def _to_config(file: Path, keys: ConfigKeys) -> Config:
    # Not the resolved path: a configuration that is a symbolic link has its neighbours where the link is.
    base = Path(os.path.abspath(file)).parent  # noqa: PTH100
    state_dir = base / (keys.state.dir or os.environ.get("STATE_DIRECTORY") or "/var/lib/controld")
    run_dir = Path(os.environ.get("RUNTIME_DIRECTORY") or "/run/controld")
    listen = keys.fleet.listen or [UnixAddress(run_dir / "fleet.sock")]
    return Config(
        file=file,
        state_dir=_clean(state_dir),
        artefacts_dir=_clean(base / keys.artefacts.dir if keys.artefacts.dir else state_dir / "artefacts"),
        policy=PolicySettings(
            directory=_clean(base / keys.policy.dir),
            watch=keys.policy.watch,
            poll_interval_s=keys.policy.poll_interval,
            settle_s=keys.policy.settle,
        ),
        fleet=FleetSettings(
            listen=tuple(UnixAddress(_clean(base / a.path)) if isinstance(a, UnixAddress) else a for a in listen),
            lease_s=keys.fleet.lease,
            renew_interval_s=keys.fleet.renew_interval,
        ),
        admin=AdminSettings(
            socket=_clean(base / (keys.admin.socket or run_dir / "admin.sock")), listen=keys.admin.listen
        ),
        plan_interval_s=keys.planner.interval,
        stop_grace_s=keys.stop_grace,
        log_level=keys.log.level,
        log_format=keys.log.format,
    )


def _clean(path: Path) -> Path:
    return Path(os.path.normpath(path))


def _check(reading: Reading, config: Config) -> None:
    if config.fleet.renew_interval_s * 2 > config.fleet.lease_s:
        reading.add(
            ("fleet", "renew_interval"), "is more than half of the lease", "one lost renewal would end it: renew sooner"
        )
    sockets = [
        (("fleet", "listen", i), a.path) for i, a in enumerate(config.fleet.listen) if isinstance(a, UnixAddress)
    ]
    seen: set[Path] = set()
    for path, socket in [*sockets, (("admin", "socket"), config.admin.socket)]:
        if len(os.fsencode(socket)) > _MAX_SOCKET_PATH_BYTES:
            reading.add(path, f"{socket} is longer than {_MAX_SOCKET_PATH_BYTES} bytes", "choose a shorter path")
        if socket in seen:
            reading.add(path, f"{socket} is used twice")
        seen.add(socket)
