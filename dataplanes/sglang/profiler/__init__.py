"""The profiling worker: measures what a KV configuration costs in quality, bytes and seconds on the real model."""
