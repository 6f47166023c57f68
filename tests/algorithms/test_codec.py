import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2ptrain.algorithms.codec import codec
from p2ptrain.errors import ConfigError, WireError

NAMES = ("int8", "int4", "int2", "fp16", "none")
BYTES_PER_BLOCK = {"int8": 66, "int4": 34, "int2": 18, "fp16": 128, "none": 256}
LARGEST = {
    "int8": 3.3e38, "int4": 2.9e38, "int2": 3.38e38, "fp16": 65504.0, "none": float(np.finfo(np.float32).max)
}  # fmt: skip


def normal_blocks(num_blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of very different magnitudes."""
    generator = np.random.default_rng(seed)
    scale = 10.0 ** generator.uniform(-6, 4, (num_blocks, 1))
    return (generator.standard_normal((num_blocks, 64)) * scale).astype(np.float32)


def any_blocks(limit: float = LARGEST["none"]) -> st.SearchStrategy[np.ndarray]:
    limit = float(np.float32(limit))
    values = st.floats(-limit, limit, width=32)
    return hnp.arrays(np.float32, st.integers(0, 5).map(lambda n: (n, 64)), elements=values)


def plain_steps(block: list[float], most: int) -> tuple[int, list[int]]:
    """Reference: scale bits and steps of one block, one value at a time."""
    peak = max(abs(value) for value in block)
    if peak == 0:
        return 0, [0] * 64
    quotient = np.float32(peak) / np.float32(most)
    (bits,) = struct.unpack("<I", struct.pack("<f", quotient))
    bits = max(0x80, bits // 65536 + (bits % 65536 > 0))
    (scale,) = struct.unpack("<f", struct.pack("<I", bits * 65536))
    return bits, [round(float(np.float32(value) * (np.float32(1) / np.float32(scale)))) for value in block]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_fixed_per_block(name: str) -> None:
    assert codec(name).name == name
    for num_blocks in (0, 1, 5, 2000):
        assert codec(name).size_bytes(num_blocks) == num_blocks * BYTES_PER_BLOCK[name]
        assert len(codec(name).encode(normal_blocks(num_blocks))) == num_blocks * BYTES_PER_BLOCK[name]


def test_an_unknown_codec_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="int5"):
        codec("int5")


def reference_blocks() -> np.ndarray:
    blocks = normal_blocks(40)
    blocks[7] = 0
    blocks[8] *= np.float32(1e-38)
    return blocks


def assert_decodes_to(decoded: np.ndarray, expected: list[tuple[int, list[int]]]) -> None:
    for row, (bits, steps) in zip(decoded, expected, strict=True):
        (scale,) = struct.unpack("<f", struct.pack("<I", bits * 65536))
        assert row.tolist() == [float(np.float32(step * scale)) for step in steps]


def test_int8_agrees_with_the_plain_reference() -> None:
    blocks = reference_blocks()
    data = codec("int8").encode(blocks)
    expected = [plain_steps(block.tolist(), 127) for block in blocks]
    assert np.frombuffer(data, "<u2", 40).tolist() == [bits for bits, _ in expected]
    assert np.frombuffer(data, np.int8, offset=80).reshape(40, 64).tolist() == [steps for _, steps in expected]
    assert_decodes_to(codec("int8").decode(data, 40), expected)


def test_int4_agrees_with_the_plain_reference() -> None:
    blocks = reference_blocks()
    data = codec("int4").encode(blocks)
    expected = [plain_steps(block.tolist(), 7) for block in blocks]
    assert np.frombuffer(data, "<u2", 40).tolist() == [bits for bits, _ in expected]
    packed = [[steps[i] % 16 + steps[i + 32] % 16 * 16 for i in range(32)] for _, steps in expected]
    assert np.frombuffer(data, np.uint8, offset=80).reshape(40, 32).tolist() == packed
    assert_decodes_to(codec("int4").decode(data, 40), expected)


def test_int2_agrees_with_the_plain_reference() -> None:
    blocks = reference_blocks()
    expected = []
    for block in blocks.astype(np.float64):
        large = np.abs(block) > 0.75 * np.abs(block).mean()
        scale = np.float32(max(np.abs(block[large]).mean(), 2.0**-126)) if large.any() else np.float32(0)
        nearest = (scale.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
        expected.append(np.sign(block) * large * nearest)
    data = codec("int2").encode(blocks)
    decoded = codec("int2").decode(data, 40)
    assert np.array_equal(decoded, np.array(expected, np.float32))
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=80).reshape(2, 40, 8), axis=2, bitorder="little")
    assert np.array_equal(bits[0], decoded > 0)
    assert np.array_equal(bits[1], decoded < 0)


def test_int2_errs_little_more_than_the_best_three_levels() -> None:
    """Those of Lloyd and Max for normal values have 0.190 of the squares; a scale of each block's own is better."""
    blocks = np.random.default_rng(0).standard_normal((2000, 64), np.float32)
    error = codec("int2").decode(codec("int2").encode(blocks), 2000) - blocks
    assert np.square(error).sum() < 0.188 * np.square(blocks).sum()


def test_a_value_that_is_both_signs_is_refused() -> None:
    scale, bitmap = struct.pack("<H", 0x3F80), bytes([0, 4, 0, 0, 0, 0, 0, 0])
    assert codec("int2").decode(scale + bitmap + bytes(8), 1).tolist() == [[0.0] * 10 + [1.0] + [0.0] * 53]
    for read in (codec("int2").decode, codec("int2").check):
        with pytest.raises(WireError, match="both positive and negative"):
            read(scale + bitmap + bitmap, 1)


def test_fp16_agrees_with_torch() -> None:
    blocks = normal_blocks(40)
    blocks[3] *= np.float32(1e-8)
    expected = torch.from_numpy(blocks).clamp(-65504, 65504).half()
    assert codec("fp16").encode(blocks) == expected.numpy().tobytes()
    assert np.array_equal(codec("fp16").decode(expected.numpy().tobytes(), 40), expected.float().numpy())


def test_fp16_saturates() -> None:
    blocks = np.full((1, 64), 1e30, np.float32) * np.where(np.arange(64) % 2, 1, -1).astype(np.float32)
    decoded = codec("fp16").decode(codec("fp16").encode(blocks), 1)
    assert decoded.tolist() == (np.sign(blocks) * 65504).tolist()


@given(any_blocks())
def test_none_is_lossless(blocks: np.ndarray) -> None:
    decoded = codec("none").decode(codec("none").encode(blocks), len(blocks))
    assert decoded.tobytes() == blocks.tobytes()


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
@given(blocks=any_blocks(LARGEST["int4"]))
def test_what_is_scaled_errs_by_at_most_half_a_step(name: str, most: int, blocks: np.ndarray) -> None:
    decoded = codec(name).decode(codec(name).encode(blocks), len(blocks)).astype(np.float64)
    peak = np.abs(blocks).max(axis=1, keepdims=True, initial=0).astype(np.float64)
    step = np.maximum(peak / most * (1 + 2.0**-7), 2.0**-126)
    assert np.all(np.abs(decoded - blocks) <= step * (0.5 + 1e-5))


@given(any_blocks(LARGEST["fp16"]))
def test_fp16_errs_by_at_most_half_a_unit(blocks: np.ndarray) -> None:
    decoded = codec("fp16").decode(codec("fp16").encode(blocks), len(blocks)).astype(np.float64)
    assert np.all(np.abs(decoded - blocks) <= np.maximum(np.abs(blocks).astype(np.float64) * 2.0**-11, 2.0**-25))
    assert codec("fp16").encode(decoded.astype(np.float32)) == codec("fp16").encode(blocks)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_coded_independently(name: str) -> None:
    """A slice of the blocks encodes to a slice of the bytes, also across the codec's chunk boundary."""
    blocks = normal_blocks(2050)
    whole = codec(name).decode(codec(name).encode(blocks), 2050)
    for start, stop in ((0, 1), (3, 7), (1000, 1100), (1024, 2050)):
        part = codec(name).decode(codec(name).encode(blocks[start:stop]), stop - start)
        assert part.tobytes() == whole[start:stop].tobytes()


def test_int8_slices_are_slices_of_scales_and_values() -> None:
    blocks = normal_blocks(10)
    data = codec("int8").encode(blocks)
    assert codec("int8").encode(blocks[2:5]) == data[4:10] + data[20 + 2 * 64 : 20 + 5 * 64]


@pytest.mark.parametrize("name", NAMES)
def test_coding_is_deterministic_and_leaves_its_input_alone(name: str) -> None:
    blocks = normal_blocks(30)
    kept = blocks.copy()
    data = codec(name).encode(blocks)
    assert codec(name).encode(blocks) == data
    assert np.array_equal(blocks, kept)
    first, second = codec(name).decode(data, 30), codec(name).decode(memoryview(data), 30)
    assert first.tobytes() == second.tobytes()
    assert first.flags.writeable
    assert first.dtype == np.float32
    assert first.shape == (30, 64)
    first[:] = 0
    assert codec(name).decode(data, 30).tobytes() == second.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1500])
def test_encoding_refuses_what_is_not_finite(name: str, value: float, row: int) -> None:
    blocks = normal_blocks(1600)
    blocks[row, 63] = value
    with pytest.raises(ValueError, match="not finite"):
        codec(name).encode(blocks)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 1.2e-36, 3.3e38])
def test_int8_stays_finite_and_close_at_the_ends_of_float32(magnitude: float) -> None:
    blocks = np.linspace(-1, 1, 64, dtype=np.float32)[None] * np.float32(magnitude)
    data = codec("int8").encode(blocks)
    (bits,) = struct.unpack("<H", data[:2])
    assert 0x0080 <= bits < 0x7C00
    assert np.all(np.abs(codec("int8").decode(data, 1) - blocks) <= max(magnitude / 250, 2.0**-126))


@pytest.mark.parametrize(
    ("name", "largest"), [("int8", 127 * (2.0**121 - 2.0**113)), ("int4", 7 * (2.0**125 - 2.0**117))]
)
def test_what_is_scaled_saturates(name: str, largest: float) -> None:
    blocks = np.full((1, 64), 3.4e38, np.float32) * np.where(np.arange(64) % 2, 1, -1).astype(np.float32)
    decoded = codec(name).decode(codec(name).encode(blocks), 1)
    assert decoded.tolist() == (np.sign(blocks) * np.float32(largest)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_is_the_same_where_subnormals_are_flushed(name: str) -> None:
    blocks = normal_blocks(20) * np.float32(1e-35) + np.float32(1e-44)
    data = codec(name).encode(blocks)
    expected = codec(name).decode(data, 20).tobytes()
    assert torch.set_flush_denormal(True)
    try:
        flushed = codec(name).decode(data, 20).tobytes()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == expected


@given(name=st.sampled_from(NAMES), num_blocks=st.integers(0, 4), data=st.data())
@settings(max_examples=300)
def test_hostile_bytes_decode_to_finite_values_or_a_wire_error(name: str, num_blocks: int, data) -> None:
    size = num_blocks * BYTES_PER_BLOCK[name]
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = codec(name).decode(payload, num_blocks)
    except WireError:
        return
    assert decoded.shape == (num_blocks, 64)
    assert np.isfinite(decoded).all()
    assert len(codec(name).encode(decoded)) == size


@given(name=st.sampled_from(NAMES), num_blocks=st.integers(0, 4), payload=st.binary(max_size=300))
@settings(max_examples=200)
def test_a_wrong_size_is_a_wire_error(name: str, num_blocks: int, payload: bytes) -> None:
    if len(payload) == num_blocks * BYTES_PER_BLOCK[name]:
        payload += b"\0"
    with pytest.raises(WireError, match="bytes for"):
        codec(name).decode(payload, num_blocks)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("bits", [0x0001, 0x007F, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF])
def test_scales_that_no_encoder_makes_are_refused(name: str, bits: int) -> None:
    with pytest.raises(WireError, match="scale"):
        codec(name).decode(struct.pack("<HH", 0x3F80, bits) + bytes(2 * BYTES_PER_BLOCK[name] - 4), 2)


@pytest.mark.parametrize(
    ("name", "bits", "steps", "lowest"),
    [
        ("int8", 0x7BFF, b"\x80" * 64, -128 * (2.0**121 - 2.0**113)),
        ("int4", 0x7DFF, b"\x88" * 32, -8 * (2.0**125 - 2.0**117)),
    ],
)
def test_the_largest_scale_and_lowest_step_decode(name: str, bits: int, steps: bytes, lowest: float) -> None:
    assert codec(name).decode(struct.pack("<H", bits) + steps, 1).tolist() == [[lowest] * 64]
    with pytest.raises(WireError, match="scale"):
        codec(name).decode(struct.pack("<H", bits + 1) + steps, 1)


@pytest.mark.parametrize(("name", "pattern"), [("fp16", "<e"), ("none", "<f")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_a_wire_error(name: str, pattern: str, value: float) -> None:
    payload = bytearray(3 * BYTES_PER_BLOCK[name])
    struct.pack_into(pattern, payload, 2 * BYTES_PER_BLOCK[name], value)
    with pytest.raises(WireError, match="finite"):
        codec(name).decode(bytes(payload), 3)


@pytest.mark.parametrize("name", [*NAMES, "topk", "pruned"])
def test_squared_norms_are_those_of_the_decoded_blocks(name: str) -> None:
    coded = codec("int8", prune_fraction=0.5) if name == "pruned" else codec(name)
    blocks = normal_blocks(40)
    blocks[7] = 0
    data = coded.encode(blocks)
    decoded = coded.decode(data, 40).astype(np.float64)
    for counted in (0, 1, 30, 40):
        assert coded.squared_norm(data, 40, counted) == pytest.approx(np.square(decoded[:counted]).sum(), rel=1e-5)
    with pytest.raises(WireError):
        coded.squared_norm(data[:-1], 40, 40)


@pytest.mark.parametrize("name", NAMES)
def test_squared_norms_are_finite_at_the_ends_of_float32(name: str) -> None:
    data = codec(name).encode(np.full((1024, 64), LARGEST[name], np.float32))
    assert codec(name).squared_norm(data, 1024, 1024) == pytest.approx(65536 * LARGEST[name] ** 2, rel=0.02)
