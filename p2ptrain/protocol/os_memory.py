"""Returns memory to the operating system on Linux. Elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

import numpy as np
import torch

# For an anchor of at least this size, `release_unused` pays within a round (guess). Simulated peers are smaller.
LARGE_BYTES = 64 * 1024 * 1024


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def release_unused() -> None:
    """Return freed pages of the heap: glibc keeps those of the many small objects of a round.

    These are at least a quarter of the parameters' bytes (measured at 124M parameters). Takes milliseconds, so call it
    in a worker thread. Does nothing with another C library, such as musl.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def release_pages(values: np.ndarray) -> None:
    """Return the whole pages of a contiguous array whose values are no longer needed.

    The array can still be read and written, which takes new pages. On Linux, values in the returned pages become zero;
    elsewhere they stay. Values outside of whole pages always stay. Pinned memory is left alone, as a GPU would continue
    to use the old pages.
    """
    if torch.from_numpy(values).is_pinned():
        return
    libc = _libc()
    start = -(-values.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (values.ctypes.data + values.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and size > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
