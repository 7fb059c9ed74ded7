"""Native CPU kernels of number formats; the reference beside them is `dataplanes.numerics`."""
