"""nanoGPT's shakespeare_char in its CPU setting, trained alone, by peers and data parallel: makes docs/results.md."""
