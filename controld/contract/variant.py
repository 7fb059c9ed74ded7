"""Variants of a lossy part: its completions by lossless parameters, each with a name.

A KV configuration has one lossless parameter, its coder, whose value is the name. Any other plane's variant is named by
the canonical JSON of its lossless parameters, as `{"ranks":1,"vae":"async"}`.
"""

from __future__ import annotations

from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.space import StrategySpace

_JSON = "{"


def variant_name(space: StrategySpace, configuration: Configuration) -> str:
    """The name of a configuration's lossless part; empty where it has none."""
    if CODER_PARAMETER in configuration:
        return str(configuration[CODER_PARAMETER])
    names = [parameter.name for parameter in space.parameters if not parameter.lossy]
    lossless = Configuration({name: configuration[name] for name in names if name in configuration})
    return lossless.canonical_json if lossless else ""


def with_variant(lossy: Configuration, variant: str) -> Configuration:
    """A lossy part, completed. Raises: FieldError: the name is no variant's."""
    if not variant.startswith(_JSON):
        return lossy.with_coder(variant)
    return Configuration({**lossy, **Configuration.from_json(variant)})
