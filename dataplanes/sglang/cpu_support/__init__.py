"""What SGLang 0.5.23 needs on a machine without an accelerator: stand-ins for three CUDA packages and one plugin.

SGLang imports `triton`, `torchvision` and `sgl_kernel` at module level even where a text model on a CPU never calls
them, and no wheel of the three works beside a CPU build of torch. The folder `stand_ins` holds packages of those names
that import and refuse to compute, and `controld_cpu_shim`, an SGLang plugin that gives the PD and HiCache paths the
host-to-host copies that otherwise come from CUDA.

Only the launcher uses this, by putting `STAND_INS` first on a server's `PYTHONPATH`; the controld plugin never does.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"


def needed() -> bool:
    """Whether SGLang's servers on this machine need the stand-ins (no CUDA device)."""
    # A launcher that refuses its arguments, or only prints help, need not wait seconds for torch.
    import torch

    return not torch.cuda.is_available()


def shadowed_packages() -> list[str]:
    """Names of installed packages that the stand-ins hide.

    A CUDA build of torch brings triton along, which finds no driver here; nothing else should be among them.
    """
    return [name for name in ("triton", "torchvision", "sgl_kernel") if importlib.util.find_spec(name) is not None]
