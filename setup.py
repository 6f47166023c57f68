"""Builds the native loops where there is a compiler. Everything else is in setup.cfg."""

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class build_library(build_ext):
    """Builds a C library, which Python loads but does not import: under a name that no import finds."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], "libkernels.so.3")


setup(
    cmdclass={"build_ext": build_library},
    ext_modules=[
        Extension(
            "p2ptrain.algorithms.kernels.libkernels",
            ["p2ptrain/algorithms/kernels/kernels.c"],
            # No contraction of products and sums: the bits must not depend on the CPU.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ],
)
