"""Soak test: real peers under random faults. `python -m benchmarks.soak`, or `make soak MINUTES=20`."""
