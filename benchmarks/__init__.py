"""Measurements side by side with rivals: `python -m benchmarks --list`.

One `bench_*.py` per benchmark, one `rival_*.py` per rival. Everything runs on this machine over 127.0.0.1, each peer
in a process of its own with one torch thread, and each table says what must be reached beside what was measured.
Timings are never asserted; `docs/BENCHMARKS.md` records them with date and machine.
"""
