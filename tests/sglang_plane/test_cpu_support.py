"""The stand-ins: SGLang's servers import, torch.compile works, and nothing pretends to compute."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from dataplanes.sglang import cpu_support

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(cpu_support.STAND_INS),
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}


def run(program: str, timeout_s: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_no_installed_package_is_hidden_that_could_work_here() -> None:
    assert set(cpu_support.shadowed_packages()) <= {"triton"}


def test_stand_ins_import_and_refuse_to_compute() -> None:
    answer = run("""
        import triton, triton.language as tl
        from triton.language.extra import libdevice
        from triton.compiler.errors import CompilationError
        import sgl_kernel, sgl_kernel.kvcacheio, torchvision.transforms.functional as functional

        @triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
        @triton.jit
        def kernel(x, n: tl.constexpr):
            return x

        refused = []
        for call in (lambda: kernel[(1,)](1, 2), lambda: sgl_kernel.rmsnorm(1), lambda: functional.resize(1)):
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                refused.append("stand-in" in str(error))
        print(refused, triton.cdiv(7, 3), triton.next_power_of_2(5), issubclass(CompilationError, Exception))
    """)
    assert answer == "[True, True, True] 3 8 True"


@pytest.mark.slow
def test_torch_compile_works_beside_the_triton_stand_in() -> None:
    answer = run("""
        import torch
        torch.set_num_threads(1)
        compiled = torch.compile(lambda x: (x * 2 + 1).relu().sum(-1))
        x = torch.arange(12.0).reshape(3, 4)
        print(torch.equal(compiled(x), (x * 2 + 1).relu().sum(-1)))
    """)
    assert answer == "True"


@pytest.mark.slow
def test_sglang_servers_import_and_the_shim_is_found_as_a_plugin() -> None:
    answer = run("""
        import os
        os.environ["SGLANG_PLUGINS"] = "controld_cpu_shim"
        import sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
        from sglang.srt.mem_cache.pool_host import mha
        from sglang.srt.plugins import load_plugins
        before = MooncakeKVSender.supports_host_tensor_indices
        load_plugins()
        print(before, MooncakeKVSender.supports_host_tensor_indices, mha.transfer_kv_direct.__module__)
    """)
    assert answer.splitlines()[-1] == "True False controld_cpu_shim"


@pytest.mark.slow
def test_hicache_copies_bring_every_token_back() -> None:
    answer = run("""
        import torch
        import controld_cpu_shim as shim
        page, pages, layers, heads, width = 4, 6, 3, 2, 8
        device = [torch.randn(pages * page, heads, width) for _ in range(2 * layers)]
        host = [torch.zeros(pages, layers, page, heads, width) for _ in range(2)]
        at = torch.arange(pages * page).reshape(pages, page)
        source, target = at[[4, 1, 2]].reshape(-1), at[[0, 5, 3]].reshape(-1)
        shim.copy_all_layers_to_pages(device, host, source, target, page)
        back = [torch.zeros_like(layer) for layer in device]
        for layer in range(layers):
            shim.copy_one_layer_from_pages(host, [back[layer], back[layers + layer]], target, source, layer, page)
        print(all(torch.equal(b[source], d[source]) for b, d in zip(back, device)), bool(back[0][0].any()))
    """)
    assert answer == "True False"
