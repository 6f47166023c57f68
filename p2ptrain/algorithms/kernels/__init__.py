"""The native library of the hot loops, `kernels.c`, where it was built; each has a numpy twin that gives the same bits.

It is a C library without Python in it, called through ctypes, which releases Python's lock meanwhile. `pip install`
builds it where there is a compiler. Callers ask `library()` at each call, and take their numpy path if it is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

import numpy as np
import numpy.typing as npt

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "encode": (_POINTER, _POINTER, _SIZE, _INT, _FLOAT, _POINTER),
    "decode": (_POINTER, _SIZE, _INT, _POINTER),
    "add": (_POINTER, _SIZE, _INT, _FLOAT, _POINTER),
    "squares": (_POINTER, _SIZE, _INT, _POINTER),
    "sgd_step": (_POINTER, _POINTER, _POINTER, _SIZE, _FLOAT, _FLOAT, _INT),
    "compare": (_POINTER, _SIZE, _POINTER, _POINTER),
    "mix": (_POINTER, _SIZE, _POINTER, _POINTER),
    "gather": (_POINTER, _SIZE, _POINTER),
    "scatter": (_POINTER, _SIZE, _POINTER),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library; None if it was not built, or is not this one, or not for this machine."""
    with contextlib.suppress(OSError, AttributeError):
        return load(f"{__path__[0]}/libkernels.so.3")
    return None


def load(path: str) -> ctypes.CDLL:
    """The library in a file. Raises OSError if it is not for this machine, AttributeError if it lacks a function."""
    loaded = ctypes.CDLL(path)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _INT
    return loaded


def address(array: npt.NDArray[np.generic]) -> int:
    """The address of a contiguous array, for a call of the library."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
