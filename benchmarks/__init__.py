"""Benchmarks of p2ptrain beside other programs: `python -m benchmarks --list`.

One `bench_*.py` per benchmark, one `rival_*.py` per other program. Everything runs on this machine over 127.0.0.1. Each
peer is a process with one torch thread. The tables show the target beside the measurement. Timings are never asserted
in tests; `docs/evidence/benchmarks.md` records them with date and machine.
"""
