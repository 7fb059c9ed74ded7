"""Stand-in for `sgl_kernel`, whose CPU build is published on no package registry.

On an x86 CPU without AMX SGLang computes everything with torch and only imports these names. No operator is registered,
so SGLang's own AMX test stays false.
"""


def refuse(module, name):
    """Return a callable that says that the kernel is not here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args, **kwargs):
        raise NotImplementedError(f"{module}.{name} is not available: this is the CPU stand-in for sgl_kernel")

    return unavailable


def __getattr__(name):
    return refuse(__name__, name)
