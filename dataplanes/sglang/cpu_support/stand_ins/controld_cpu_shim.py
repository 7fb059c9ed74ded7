"""SGLang plugin: let PD disaggregation and HiCache run where memory is host memory on both sides.

Found by the entry point in the `dist-info` folder beside this file. SGLang 0.5.23 assumes CUDA, and cores to spare, in
five places:

* the prefill scheduler copies page indices through pinned memory and a CUDA event,
* HiCache pins its host pool with cudaHostRegister,
* HiCache's page copies are operators of a CUDA package,
* `torch.cpu.Stream` lacks `synchronize`, and
* a scheduler that waits for a transfer polls without a pause. On a GPU server that costs a core nobody misses; here the
  two pollers take the cores (and the interpreter locks) that prefill, codec and network threads need.
"""

import logging
import time

import torch

logger = logging.getLogger(__name__)

# Longest pause of a scheduler that has transfers in flight and nothing to compute.
POLL_INTERVAL_S = 0.001


def copy_tokens(source_layers, target_layers, source_indices, target_indices, page_size):
    """HiCache `transfer_kv_direct`: copy tokens between two pools of the same layout, layer by layer."""
    for source, target in zip(source_layers, target_layers, strict=True):
        target[target_indices] = source[source_indices].reshape(-1, *target.shape[1:])


def _page_starts(source_indices, target_indices, page_size):
    return zip(source_indices[::page_size].tolist(), target_indices[::page_size].tolist(), strict=True)


def copy_all_layers_to_pages(source_layers, target_pools, source_indices, target_indices, page_size):
    """HiCache `transfer_kv_all_layer_direct_lf_pf`: device pool (by layer) to host pool (by page).

    The host pools are [pages, layers, page_size, heads, head_dim], keys then values; `source_layers` lists all key
    layers, then all value layers.
    """
    keys, values = target_pools
    layer_count = len(source_layers) // 2
    for source, target in _page_starts(source_indices, target_indices, page_size):
        page = target // page_size
        for layer in range(layer_count):
            for pool, tokens in ((keys, source_layers[layer]), (values, source_layers[layer_count + layer])):
                pool[page, layer].copy_(tokens[source : source + page_size].reshape(pool.shape[2:]))


def copy_one_layer_from_pages(source_pools, target_layers, source_indices, target_indices, layer_id, page_size):
    """HiCache `transfer_kv_per_layer_direct_pf_lf`: one layer of host pages back to the device pool."""
    for source, target in _page_starts(source_indices, target_indices, page_size):
        for pool, tokens in zip(source_pools, target_layers, strict=True):
            rows = tokens[target : target + page_size]
            rows.copy_(pool[source // page_size, layer_id].reshape(rows.shape))


def _allocate_unpinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return allocator.allocate(dims, dtype=dtype, device=device)


def _support_hicache():
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned
    mha.transfer_kv_direct = copy_tokens
    mha.transfer_kv_all_layer_direct_lf_pf = copy_all_layers_to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = copy_one_layer_from_pages
    for module in (common, mha):
        module._cuda_host_unregister = lambda *args, **kwargs: None

    pool_class = mha.MHATokenToKVPoolHost
    construct = pool_class.__init__

    def construct_unpinned(self, *args, **kwargs):
        kwargs["pin_memory"] = False
        construct(self, *args, **kwargs)

    pool_class.__init__ = construct_unpinned


def _support_pd():
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    # False selects the path that turns page indices into an array at once, without pinned memory or CUDA events.
    MooncakeKVSender.supports_host_tensor_indices = False


def _pause_while_waiting():
    from sglang.srt.managers.scheduler import Scheduler

    on_idle = Scheduler.on_idle

    def on_idle_then_pause(self):
        on_idle(self)
        if not self.is_fully_idle():
            time.sleep(POLL_INTERVAL_S)

    Scheduler.on_idle = on_idle_then_pause


def register():
    """Entry point: patch SGLang if it runs on a CPU."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    _support_hicache()
    _support_pd()
    _pause_while_waiting()
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    logger.info("PD and HiCache patched for host memory")
