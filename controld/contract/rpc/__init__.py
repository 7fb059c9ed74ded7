"""Protobuf and gRPC code generated from `schemas/controld/v1` by `python scripts/generate_rpc.py`. Do not edit."""
