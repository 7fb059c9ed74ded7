"""A profiling worker for the CPU reference engine: what its settings lose, take and hold."""
