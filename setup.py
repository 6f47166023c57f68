"""Builds the native loops where there is a compiler. Everything else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "p2ptrain.algorithms.kernels._kernels",
            ["p2ptrain/algorithms/kernels/kernels.c"],
            # No contraction of products and sums: the bits must not depend on the CPU.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)
