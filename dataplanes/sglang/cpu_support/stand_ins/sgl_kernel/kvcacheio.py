"""Stand-in for `sgl_kernel.kvcacheio`; controld_cpu_shim supplies the copies that HiCache calls on a CPU."""

import sgl_kernel


def __getattr__(name):
    return sgl_kernel.refuse(__name__, name)
