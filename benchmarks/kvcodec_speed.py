"""How fast and how small: KV codecs in one thread beside memcpy, in one run.

    python benchmarks/kvcodec_speed.py [--quick] [--kv planes.pt] [--output build/benchmarks/kvcodec_speed.json]

Speeds are bytes of raw KV per second of the measuring thread's processor time, so that other work on the machine counts
little; the best of several runs. The ratio to memcpy of the same bytes in the same run is what carries over to
another machine. `--kv` names a file with a tensor `[planes, tokens, heads, head_dim]`, first half keys, or a dictionary
of such; without it the KV is Gaussian, which compresses worse than a model's.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zstandard
from torch import Tensor

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec import KVCodec, KVDtype, KVLayout, decode_frame

CONFIGURATIONS: dict[str, dict[str, Value]] = {
    "identity": {"quantise": "none", "code": "none"},
    "lossless entropy": {"quantise": "none", "code": "entropy"},
    "lossless zstd": {"quantise": "none", "code": "zstd"},
    "K16 V12 g64 bitpack": {"key_levels": 16, "value_levels": 12, "code": "bitpack"},
    "K16 V12 g64 entropy": {"key_levels": 16, "value_levels": 12, "code": "entropy"},
    "K12 V6 g64 bitpack": {"key_levels": 12, "value_levels": 6, "code": "bitpack"},
    "K12 V6 g64 entropy": {"key_levels": 12, "value_levels": 6, "code": "entropy"},
    "K12 V6 g64 zstd": {"key_levels": 12, "value_levels": 6, "code": "zstd"},
    "had K12 V6 g64 bitpack": {"transform": "hadamard", "key_levels": 12, "value_levels": 6, "code": "bitpack"},
    "had K12 V6 g64 entropy": {"transform": "hadamard", "key_levels": 12, "value_levels": 6, "code": "entropy"},
    "... one sink token": {
        "transform": "hadamard",
        "sink_tokens": 1,
        "key_levels": 12,
        "value_levels": 6,
        "code": "entropy",
    },
    "fp8 e4m3": {"quantise": "fp8_e4m3", "code": "none"},
    "fp8 e4m3 entropy": {"quantise": "fp8_e4m3", "code": "entropy"},
    "nvfp4 bitpack": {"quantise": "nvfp4", "code": "bitpack"},
    "had nvfp4 entropy": {"transform": "hadamard", "quantise": "nvfp4", "code": "entropy"},
}
GROUPS: dict[str, Value] = {
    "key_axis": "channel",
    "key_group": 64,
    "value_axis": "token",
    "value_group": 64,
}
REPEATS = {True: 7, False: 25}


def configuration_of(changes: dict[str, Value]) -> Configuration:
    """Fill in what a row leaves out."""
    if "quantise" in changes:
        return Configuration({"transform": "none", **changes})
    return Configuration({"transform": "none", "quantise": "levels", **GROUPS, **changes})


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time of the fastest of several runs; everything measured here runs in the calling thread."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def measure(planes: Tensor, changes: dict[str, Value], repeats: int, *, use_native: bool) -> dict[str, float]:
    """Encode and decode speed beside memcpy, ratio and largest error of one configuration."""
    layout = KVLayout.keys_then_values(
        layers=planes.shape[0] // 2,
        heads=planes.shape[2],
        head_dim=planes.shape[3],
        dtype=KVDtype.of(planes.dtype),
        page_tokens=64,
    )
    codec = KVCodec(configuration_of(changes), layout, use_native=use_native)
    buffer = torch.zeros(codec.max_frame_bytes(planes.shape[1]), dtype=torch.uint8)
    out = torch.empty_like(planes)
    wire_bytes = codec.encode_into(planes, buffer, first_token=0)
    memcpy_s = best_seconds(lambda: out.copy_(planes), repeats)
    encode_s = best_seconds(lambda: codec.encode_into(planes, buffer, first_token=0), repeats)
    decode_s = best_seconds(lambda: decode_frame(buffer, out, use_native=use_native), repeats)
    return {
        "compression_ratio": planes.nbytes / wire_bytes,
        "encode_bytes_per_s": planes.nbytes / encode_s,
        "decode_bytes_per_s": planes.nbytes / decode_s,
        "encode_over_memcpy": memcpy_s / encode_s,
        "decode_over_memcpy": memcpy_s / decode_s,
        "rms_error": float((out.float() - planes.float()).square().mean().sqrt()),
    }


def load_planes(path: Path | None, tokens: int) -> dict[str, Tensor]:
    """KV by name: from a file, or Gaussian in SmolLM2-135M's shape."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return {"gaussian": torch.randn(60, tokens, 3, 64, generator=generator).bfloat16()}
    loaded = torch.load(path, weights_only=True)
    named = loaded if isinstance(loaded, dict) else {path.stem: loaded}
    return {name: planes[:, :tokens].contiguous() for name, planes in named.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under 50 seconds")
    parser.add_argument("--kv", type=Path, help="file with real KV")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--reference", action="store_true", help="measure the torch reference instead of the kernels")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/kvcodec_speed.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = REPEATS[arguments.quick]
    start = time.perf_counter()
    is_native = KVCodec.compile() and not arguments.reference
    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zstandard": zstandard.__version__,
        "native_kernels": is_native,
        "kernel_build_s": time.perf_counter() - start,
        "threads": 1,
        "tokens": arguments.tokens,
    }
    for name, planes in load_planes(arguments.kv, arguments.tokens).items():
        print(f"\n{name} {list(planes.shape)}, native kernels {'on' if is_native else 'off'}")
        print(
            f"{'configuration':22} {'ratio':>6} {'enc GB/s':>9} {'/memcpy':>8}"
            f" {'dec GB/s':>9} {'/memcpy':>8} {'rms':>7}"
        )
        rows = {}
        for label, changes in CONFIGURATIONS.items():
            row = rows[label] = measure(planes, changes, repeats, use_native=is_native)
            print(
                f"{label:22} {row['compression_ratio']:6.2f} {row['encode_bytes_per_s'] / 1e9:9.2f}"
                f" {row['encode_over_memcpy']:8.3f} {row['decode_bytes_per_s'] / 1e9:9.2f}"
                f" {row['decode_over_memcpy']:8.3f} {row['rms_error']:7.4f}"
            )
        result[name] = rows
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {arguments.output}; seconds: {time.perf_counter() - start:.0f}")


if __name__ == "__main__":
    main()
