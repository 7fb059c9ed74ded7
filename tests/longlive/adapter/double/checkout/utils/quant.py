"""Contract double, not LongLive."""

from types import SimpleNamespace


def LongLiveQuantizationConfig(*, scale_rule, backend, type):  # noqa: N802 (the real one's name)
    return SimpleNamespace(scale_rule=scale_rule, backend=backend, type=type)
