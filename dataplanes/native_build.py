"""Compiles C files for this machine's processor at first use, and loads them.

Why C beside torch: a fused torch.compile kernel must be specialised for every configuration (12 to 25 seconds each the
first time), and holds up Python's other threads while it runs. A C file takes about a second once per machine, serves
every configuration, releases the interpreter lock for the whole call and is faster.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)

FLAGS: Final = (
    "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
# GCC otherwise leaves half of each vector of these processors idle.
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)
SAME_AS_REFERENCE: Final = "-ffp-contract=off"
"""No multiplication fused with an addition: the bits are a torch reference's."""
FUSED: Final = "-ffp-contract=fast"
_COMPILE_TIMEOUT_S: Final = 120


def load_compiled(source: Path, contraction: str) -> ctypes.CDLL | None:
    """The library of a C file, or None (logged, with the reason) where it cannot be built or loaded.

    Args:
        source: the C file; headers beside it count as part of it.
        contraction: `SAME_AS_REFERENCE` or `FUSED`.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        _LOG.warning("no C compiler: the slower torch reference runs")
        return None
    try:
        flags = (*FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ()), contraction)
        return ctypes.CDLL(str(built(compiler, source, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        _LOG.warning(
            "kernels of %s are unavailable, the slower torch reference runs: %s %s", source.name, error, detail
        )
        return None


def built(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    """Path of the compiled kernels; compiles them unless the cache has them for these sources, compiler, processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=30).stdout
    headers = [header.read_text() for header in sorted(source.parent.glob("*.h"))]
    identity = "\0".join([source.read_text(), *headers, *flags, version, _processor()])
    target = _cache_folder() / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists() and _is_ours(target):
        return target
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as file:
        unfinished = Path(file.name)
    try:
        subprocess.run(
            [compiler, *flags, "-o", str(unfinished), str(source)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        unfinished.chmod(0o700)
        # Several servers may start at once; each replaces a whole file by an equal one.
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _cache_folder() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "controld" / "kvcodec"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:
        # RuntimeError: a service user without a home.
        _LOG.info("no lasting cache for compiled kernels: %s", error)
    return Path(tempfile.mkdtemp(prefix="controld-kvcodec-"))


def _is_ours(path: Path) -> bool:
    """Whether nobody else could have written what would be loaded."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
