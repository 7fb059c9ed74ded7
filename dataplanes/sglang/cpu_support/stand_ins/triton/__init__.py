"""Stand-in for Triton where there is no GPU: every name imports, no kernel runs.

SGLang decorates kernels with `triton.jit` in hundreds of modules that a CPU server imports and never calls. torch looks
for Triton too: `triton.backends.backends` must be an empty dict, because torch.compile iterates over it to decide that
no device here runs Triton.
"""

import importlib.abc
import importlib.machinery
import sys
import types

# torch switches on the version to choose between spellings of Triton's internals.
__version__ = "3.5.0"


def _refuse(name):
    raise RuntimeError(f"{name} needs a GPU: this is the CPU stand-in for Triton")


class _Named(type):
    """Metaclass of the names that stand for anything: attributes lead to more of them."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(f"{cls.__qualname__}.{name}")
        setattr(cls, name, value)
        return value


class _StandIn(metaclass=_Named):
    def __init__(self, *args, **kwargs):
        pass


def _stand_in(qualified_name):
    name = qualified_name.rpartition(".")[2]
    # Names that occur in `except` clauses have to be exceptions.
    if name.endswith("Error") or name == "OutOfResources":
        return type(name, (Exception,), {"__qualname__": qualified_name})
    return _Named(name, (_StandIn,), {"__qualname__": qualified_name})


class _ModuleWithAnyName(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class JITFunction(_StandIn):
    """What `@triton.jit` leaves behind: the decorated function, which refuses to launch."""

    def __init__(self, fn, **options):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__doc__ = fn.__doc__

    def __call__(self, *args, **kwargs):
        _refuse(self.__name__)

    def __getitem__(self, grid):
        return self


def jit(fn=None, **options):
    return JITFunction(fn) if fn is not None else JITFunction


def _unchanged_decorator(*args, **kwargs):
    return lambda fn: fn


autotune = heuristics = _unchanged_decorator


def cdiv(x, y):
    return -(-x // y)


def next_power_of_2(n):
    return 1 << max(n - 1, 0).bit_length()


_EXPLICIT = {
    "triton.backends": {"backends": {}},
    "triton.runtime.jit": {"JITFunction": JITFunction, "constexpr_function": lambda fn: fn},
    "triton.runtime": {"JITFunction": JITFunction},
    "triton.experimental.gluon": {"jit": jit},
}


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for every `triton.*` module."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _ModuleWithAnyName(spec.name)

    def exec_module(self, module):
        vars(module).update(_EXPLICIT.get(module.__name__, {}))


sys.meta_path.append(_Submodules())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = _stand_in(f"triton.{name}")
    return value
