"""The block of values that fragments, codecs and hashes count in.

It has a file of its own, so that sizes can be computed without torch, whose import takes seconds.
"""

from __future__ import annotations

# 64 float32 values are four cache lines. Blocks of 1024 and more cost 0.005 nats in simulation; smaller ones cost time.
BLOCK = 64
