"""The search process: JSON lines in, JSON lines out; see `controld.profiling.worker.protocol`."""

from __future__ import annotations

import sys

from controld.profiling.worker.protocol import serve

if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
