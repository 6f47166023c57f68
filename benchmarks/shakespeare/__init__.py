"""nanoGPT's shakespeare_char in its CPU setting, alone, by peers and data parallel: makes docs/evidence/results.md."""
