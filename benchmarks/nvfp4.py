"""How fast NVFP4 tensors are made and read on a CPU: kernels, their torch reference and memcpy, one thread, one run.

    python benchmarks/nvfp4.py [--quick] [--output build/benchmarks/nvfp4.json]

Speeds are bytes of bf16 per second of the measuring thread's processor time, so that other work on the machine counts
little; the best of several runs. The ratio to memcpy of the same bytes in the same run is what carries over to another
machine. Kernels and reference are compared bit for bit first. Errors are relative root mean squares on Gaussian data.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dataplanes.numerics import nvfp4, stochastic
from dataplanes.numerics.fp8_rows import FP8Rows
from dataplanes.numerics.native import nvfp4_kernels
from dataplanes.numerics.nvfp4 import BlockRule, Tile
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

HEAD_DIM = 128
MIB = {True: 16, False: 64}
REPEATS = {True: 7, False: 25}
REFERENCE_REPEATS = {True: 1, False: 3}


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time of the fastest of several runs; everything measured here runs in the calling thread."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def measure(x: Tensor, rule: BlockRule, *, per_row: bool, quick: bool) -> dict[str, float]:
    """Seconds of memcpy, kernels and reference on the same tensor, side by side."""
    held = NVFP4Tensor.quantise(x, rule, per_row=per_row)
    reference = NVFP4Tensor.quantise(x, rule, per_row=per_row, use_native=False)
    for ours, theirs in ((held.packed, reference.packed), (held.block_scales, reference.block_scales)):
        if not torch.equal(ours, theirs):
            raise SystemExit(f"{rule.value}: kernel and reference differ")
    out = torch.empty_like(x)
    seconds = {
        "memcpy": best_seconds(lambda: out.copy_(x), REPEATS[quick]),
        "quantise": best_seconds(lambda: NVFP4Tensor.quantise(x, rule, per_row=per_row), REPEATS[quick]),
        "dequantise": best_seconds(lambda: held.dequantise(torch.bfloat16), REPEATS[quick]),
        "reference quantise": best_seconds(
            lambda: NVFP4Tensor.quantise(x, rule, per_row=per_row, use_native=False), REFERENCE_REPEATS[quick]
        ),
        "reference dequantise": best_seconds(
            lambda: held.dequantise(torch.bfloat16, use_native=False), REFERENCE_REPEATS[quick]
        ),
    }
    row = {f"{name}_bytes_per_s": x.nbytes / value for name, value in seconds.items()}
    row |= {f"{name}_over_memcpy": seconds["memcpy"] / value for name, value in seconds.items()}
    row["bytes_ratio"] = x.nbytes / held.nbytes
    return row


def relative_errors() -> dict[str, float]:
    """Of each form, on Gaussian data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 512, generator=generator)
    peak = x.abs().amax().view(1)
    drawn = nvfp4.dequantise_by_peak(*stochastic.quantise_by_peak(x, peak, generator), peak)
    forms = {
        "nvfp4 1x16": NVFP4Tensor.quantise(x).dequantise(),
        "nvfp4 1x16 4over6": NVFP4Tensor.quantise(x, BlockRule.FOUR_OVER_SIX).dequantise(),
        "nvfp4 16x16": NVFP4Tensor.quantise(x, tile=Tile.SQUARE).dequantise(),
        "nvfp4 1x16 stochastic": drawn,
        "fp8 row": FP8Rows.quantise(x).dequantise(),
    }
    return {name: float((values - x).norm() / x.norm()) for name, values in forms.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller tensor and fewer repeats: under 50 seconds")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/nvfp4.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "native_kernels": nvfp4_kernels.load_library() is not None,
        "kernel_build_s": time.perf_counter() - start,
        "threads": 1,
        "mib": MIB[arguments.quick],
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MIB[arguments.quick] * 2**20 // 2 // HEAD_DIM, HEAD_DIM, generator=generator).bfloat16()
    print(f"bf16 {list(x.shape)}, native kernels {'on' if result['native_kernels'] else 'off'}")
    print(f"{'':14} {'ratio':>6} {'GB/s':>16} {'/memcpy':>8} {'reference GB/s':>15} {'memcpy GB/s':>12}")
    for rule in BlockRule:
        for per_row in (False, True):
            row = measure(x, rule, per_row=per_row, quick=arguments.quick)
            label = f"{rule.value} {'rows' if per_row else 'tensor'}"
            result[label] = row
            for action in ("quantise", "dequantise"):
                print(
                    f"{label:14} {row['bytes_ratio']:6.3f} {action:>10} {row[f'{action}_bytes_per_s'] / 1e9:5.2f}"
                    f" {row[f'{action}_over_memcpy']:8.3f} {row[f'reference {action}_bytes_per_s'] / 1e9:15.3f}"
                    f" {row['memcpy_bytes_per_s'] / 1e9:12.2f}"
                )
    errors = result["relative_rms_error"] = relative_errors()
    print("; ".join(f"{name} {error:.4f}" for name, error in errors.items()))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {arguments.output}; seconds: {time.perf_counter() - start:.0f}")


if __name__ == "__main__":
    main()
