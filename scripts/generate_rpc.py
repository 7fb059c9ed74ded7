"""Generate the protobuf and gRPC code from `schemas/controld/v1` into `controld/contract/rpc`.

Run as `python scripts/generate_rpc.py [--out DIRECTORY]`. A test runs it into a scratch directory and compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "controld/contract/rpc"


def generate(out: Path) -> None:
    """Write `fleet_pb2.py`, `fleet_pb2.pyi` and `fleet_pb2_grpc.py` below `out`/controld/contract/rpc.

    Raises:
        SystemExit: protoc refused the schema.
    """
    from grpc_tools import protoc

    # The virtual path puts the generated modules into our package whatever the schema's own folder is.
    arguments = [
        "protoc",
        f"-I{PACKAGE}={ROOT / 'schemas/controld/v1'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        f"{PACKAGE}/fleet.proto",
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc refused the schema")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="root to write below (default: the repository)")
    generate(parser.parse_args().out)


if __name__ == "__main__":
    sys.exit(main())
