"""Stand-in for torchvision: SGLang's model configurations import it; a text model never calls it."""

__version__ = "0.0.0"


def refuse(module, name):
    """Return a callable that says that torchvision is not here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args, **kwargs):
        raise RuntimeError(f"{module}.{name} is not available: this is a stand-in for torchvision")

    return unavailable
