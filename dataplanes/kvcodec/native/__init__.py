"""Native CPU kernels of the KV codec; the reference beside them is `dataplanes.numerics`."""
