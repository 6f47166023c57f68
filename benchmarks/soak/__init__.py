"""Real peers under a random storm: `python -m benchmarks.soak`, or `make soak MINUTES=20`."""
