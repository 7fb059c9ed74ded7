"""The plugin as SGLang loads it: found by its entry point, hooked where it should be, inert where it should not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dataplanes.sglang import cpu_support

pytestmark = pytest.mark.slow  # each test imports SGLang in a process of its own

PREAMBLE = """
import warnings; warnings.simplefilter("ignore")
from sglang.srt.plugins import load_plugins
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
import sglang.srt.disaggregation.utils as utils
import sglang.srt.managers.disagg_service as service
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
"""


def run(code: str, **environment: str) -> None:
    """Run code in a fresh process with SGLang importable and no daemon's address but the given one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CONTROLD_")}
    if cpu_support.needed():
        kept |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(cpu_support.STAND_INS)}
    subprocess.run([sys.executable, "-c", PREAMBLE + code], check=True, timeout=300, env=kept | environment)


def test_with_an_address_the_manager_is_ours_and_everything_else_sglang_s() -> None:
    run(
        """
before = utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.SENDER)
load_plugins()
manager = utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER)
assert manager.__name__ == "ControldKVManager", manager
assert issubclass(manager, MooncakeKVManager)
assert utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER) is manager
assert utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.SENDER) is before
assert utils.get_kv_class(TransferBackend.FAKE, KVClassType.MANAGER).__name__ == "FakeKVManager"
assert service.get_kv_class is utils.get_kv_class
assert hasattr(PrefillBootstrapQueue.create_sender, "__wrapped__")
""",
        CONTROLD_ADDRESS="unix:///nowhere",
    )


def test_without_an_address_nothing_is_hooked() -> None:
    run(
        """
load_plugins()
assert utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER) is MooncakeKVManager
assert not hasattr(PrefillBootstrapQueue.create_sender, "__wrapped__")
"""
    )


def test_a_sglang_that_has_moved_on_is_not_hooked() -> None:
    run(
        """
real = MooncakeKVManager.send_kvcache
MooncakeKVManager.send_kvcache = lambda self, session, pages, something_new: real(self)
load_plugins()
manager = utils.get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER)
assert manager.__name__ == "UnhookedKVManager", manager
assert "send_kvcache" not in vars(manager)
""",
        CONTROLD_ADDRESS="unix:///nowhere",
    )
