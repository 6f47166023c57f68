"""The native loops give the bits of the numpy code, whatever the values, and however the library was compiled."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.averaging import weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.mixing import Mixing
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step
from p2ptrain.errors import WireError

pytestmark = pytest.mark.processes  # the compiler

SOURCE = Path(kernels.__file__).with_name("kernels.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# As pip builds it; for machines of other years, of which each must be able to run here; and without any vectors.
BUILDS = [(), ("-march=x86-64-v3",), ("-O0",), ("-O2", "-fno-tree-vectorize"), ("-O3", "-mfma")]
SCALED = ("int8", "int4")
REFUSED = "a value is not finite, or beyond 1e+12"
LARGEST = float(np.float32(2.9e38))  # of int4; int8 saturates a little later
FLOATS = st.floats(-LARGEST, LARGEST, width=32)
BLOCKS = hnp.arrays(np.float32, st.integers(0, 5).map(lambda n: (n, 64)), elements=FLOATS)


def native(library: ctypes.CDLL | None, work: Callable[[], object]) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: library)
        try:
            return work()
        except (ValueError, WireError) as error:
            return type(error), str(error)


def same(library: ctypes.CDLL, work: Callable[[], object]) -> None:
    assert native(library, work) == native(None, work)


@pytest.fixture(scope="module", params=BUILDS, ids=lambda flags: " ".join(flags) or "as installed")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    if not request.param:
        if (installed := kernels.library()) is None:
            pytest.skip("the native library was not built: no compiler was found at installation")
        yield installed
        return
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    # The flags under test come last, and so win.
    command = [compiler, *FLAGS, "-DONE_CPU", *request.param, "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    yield kernels.load(str(path))


@given(blocks=BLOCKS, share=st.floats(0, 1, width=32))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", SCALED)
def test_finite_values_are_coded_decoded_weighed_and_measured_alike(
    library: ctypes.CDLL, name: str, blocks: np.ndarray, share: float
) -> None:
    coding, n = codec(name), len(blocks)
    data = coding.encode(blocks)
    same(library, lambda: coding.encode(blocks))
    same(library, lambda: coding.decode(data, n).tobytes())
    same(library, lambda: coding.squared_norm(data, n, n))

    def total() -> bytes:
        values = blocks.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            coding.add(data, n, np.float32(share), values)
        return values.tobytes()

    same(library, total)


@given(data=st.binary(min_size=132, max_size=132))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", SCALED)
def test_bytes_of_a_stranger_decode_or_are_refused_alike(library: ctypes.CDLL, name: str, data: bytes) -> None:
    coding = codec(name)
    data = data[: coding.size_bytes(2)]
    same(library, lambda: coding.decode(data, 2).tobytes())
    same(library, lambda: coding.squared_norm(data, 2, 2))
    same(library, lambda: weighted_mean([(data, 3.0), (data, 5.0)], coding, 2).tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SCALED)
def test_values_that_are_not_finite_are_refused_alike(library: ctypes.CDLL, name: str, value: float) -> None:
    blocks = np.ones((3, 64), np.float32)
    blocks[2, 63] = value
    same(library, lambda: codec(name).encode(blocks))
    assert native(library, lambda: codec(name).encode(blocks)) == (ValueError, "a value is not finite")


@given(one=BLOCKS, seed=st.integers(0, 2**32 - 1), bound=st.sampled_from([1e-3, 1.0, 1e12, LARGEST]))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", SCALED)
def test_differences_are_coded_or_refused_alike(
    library: ctypes.CDLL, name: str, one: np.ndarray, seed: int, bound: float
) -> None:
    rng = np.random.default_rng(seed)
    other = one / 2 + np.float32(bound / 2) * rng.uniform(-1.01, 1.01, one.shape).astype(np.float32)
    same(library, lambda: codec(name).encode_difference(one, other, bound))


@pytest.mark.parametrize("name", SCALED)
def test_a_difference_is_coded_up_to_its_bound(library: ctypes.CDLL, name: str) -> None:
    bound, zeros = np.float32(1e12), np.zeros((2, 64), np.float32)
    beyond = np.nextafter(bound, np.float32(np.inf))
    for value, is_coded in [(bound, True), (-bound, True), (beyond, False), (-beyond, False), (np.nan, False)]:
        blocks = np.full((2, 64), value, np.float32)
        coded = native(library, lambda blocks=blocks: codec(name).encode_difference(blocks, zeros, 1e12))
        assert coded == (codec(name).encode(blocks) if is_coded else (ValueError, REFUSED))
        same(library, lambda blocks=blocks: codec(name).encode_difference(zeros, blocks, 1e12))


@pytest.mark.parametrize("name", SCALED)
def test_edges_are_coded_alike(library: ctypes.CDLL, name: str) -> None:
    """Subnormals, zeros of both signs, ties between steps, and peaks at which scales are rounded or saturate."""
    edges = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-126, 0.5, 1.5, 2.5, 63.5, 126.5, 127, 3.4e38], np.float32)
    blocks = np.array(
        [np.resize(np.roll(edges, shift), 64) for shift in range(13)] + [edges[:1].repeat(64)], np.float32
    )
    blocks = np.concatenate([blocks, np.minimum(np.abs(blocks), 127), blocks * np.float32(1e-38)])
    same(library, lambda: codec(name).encode(blocks))


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 200), lr=FLOATS, momentum=st.floats(0, 0.99))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("optimizer", sorted(OUTER_OPTIMIZERS))
def test_the_outer_step_is_the_same(
    library: ctypes.CDLL, optimizer: str, seed: int, size: int, lr: float, momentum: float
) -> None:
    rng = np.random.default_rng(seed)
    first = [(rng.standard_normal(size) * 10.0 ** rng.uniform(-42, 30, size)).astype(np.float32) for _ in range(4)]

    def step() -> bytes:
        anchor, *moments, gradient = (values.copy() for values in first)
        with np.errstate(all="ignore"):
            outer_step(optimizer, anchor, [np.abs(m) for m in moments], gradient, lr=lr, momentum=momentum, round_=3)
        return anchor.tobytes() + b"".join(m.tobytes() for m in moments)

    same(library, step)


@given(
    seed=st.integers(0, 2**32 - 1), weights=st.sampled_from([0.5, 0.25, 1.0, None]), size=st.sampled_from([1, 5, 700])
)
@settings(max_examples=25, deadline=None)
def test_fragments_are_gathered_compared_and_mixed_alike(
    library: ctypes.CDLL, seed: int, weights: float | None, size: int
) -> None:
    """Of plain tensors, which the library reads and writes in place, and beside others, of which it gets copies."""
    rng = np.random.default_rng(seed)
    shapes = [("a", (size, 128)), ("b", (3, 64)), *([("tail", (70,)), ("half", (4, 64))] if seed % 2 else [])]
    first = [torch.from_numpy(some_floats(rng, shape)) for _, shape in shapes]
    space = IndexSpace(shapes)
    plan = space.plan(rng.permutation(space.num_blocks)[: rng.integers(0, space.num_blocks + 1)])
    n = len(plan.blocks)
    received = torch.from_numpy(some_floats(rng, (n, 64)))
    weight = weights if weights is not None else torch.from_numpy(rng.random((n, 1), np.float32))

    def work() -> bytes:
        tensors = [
            tensor.clone() if name != "half" else tensor.half() for (name, _), tensor in zip(shapes, first, strict=True)
        ]
        view = ParameterView(space, tensors)
        gathered = view.gather(plan).numpy().tobytes()
        mixing = Mixing(view, plan, received)
        rms = mixing.mix(weight, math.inf)
        mixed = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        view.scatter(plan, received)
        return repr((mixing.own_rms, rms)).encode() + gathered + mixed + view.gather(plan).numpy().tobytes()

    same(library, work)


def some_floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of all sizes, some subnormal, and in one of three cases with an infinity or a NaN."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-42, 12, shape)).astype(np.float32)
    if values.size and rng.random() < 1 / 3:
        values.reshape(-1)[rng.integers(values.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return values
