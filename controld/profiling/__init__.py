"""Studies: which configurations are measured, by which profiling workers, and what becomes of the results."""
