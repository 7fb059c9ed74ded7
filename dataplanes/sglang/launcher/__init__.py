"""Starts real SGLang servers on this machine: a prefill server, a decode server and a router, or one unsplit server.

with SglangPair(PairSettings(model=path, log_dir=logs)) as pair:
    answer = pair.client().generate(token_ids, max_new_tokens=16)
"""

from dataplanes.sglang.launcher.client import Generation, GenerationError, SglangClient
from dataplanes.sglang.launcher.pair import SglangPair, UnsplitServer
from dataplanes.sglang.launcher.process import LaunchError, ServerProcess
from dataplanes.sglang.launcher.settings import PairSettings, Role, RouterKind, ServerSettings

__all__ = [
    "Generation",
    "GenerationError",
    "LaunchError",
    "PairSettings",
    "Role",
    "RouterKind",
    "ServerProcess",
    "ServerSettings",
    "SglangClient",
    "SglangPair",
    "UnsplitServer",
]
