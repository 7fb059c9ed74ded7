"""Variants of a lossy part: its completions by lossless parameters, each with a name.

A KV configuration has one lossless parameter, its coder, whose value is the name. Any other plane's variant is named by
the canonical JSON of its lossless parameters, as `{"ranks":1,"vae":"async"}`; `{}` where all are at their defaults.
"""

from __future__ import annotations

from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace

_JSON = "{"


def variant_name(space: StrategySpace, configuration: Configuration) -> str:
    """The name of a configuration's lossless part; empty where the space, or a KV configuration, has none."""
    if CODER_PARAMETER in configuration:
        return str(configuration[CODER_PARAMETER])
    names = [parameter.name for parameter in space.parameters if not parameter.lossy]
    if not names or CODER_PARAMETER in names:
        return ""
    return Configuration({name: configuration[name] for name in names if name in configuration}).canonical_json


def with_variant(lossy: Configuration, variant: str) -> Configuration:
    """A lossy part, completed. Raises: FieldError: the name is no variant's, or changes the lossy part."""
    lossless = Configuration.from_json(variant) if variant.startswith(_JSON) else {CODER_PARAMETER: variant}
    for name in lossless:
        if name in lossy:
            raise FieldError(f"variant.{name}", "is of the lossy part")
    return Configuration({**lossy, **lossless})
