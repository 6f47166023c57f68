"""The codecs that leave values out: int8 with pruning, and top-k."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.algorithms.averaging import weighted_mean
from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.algorithms.outer import outer_step
from p2ptrain.errors import ConfigError, WireError

CODECS = {
    "pruned 25": codec("int8", prune_fraction=0.25),
    "pruned 50": codec("int8", prune_fraction=0.5),
    "pruned 98": codec("int8", prune_fraction=0.98),
    "topk 0.1": codec("topk", density=0.001),
    "topk 1.6": codec("topk"),
    "topk 30": codec("topk", density=0.3),
    "topk 100": codec("topk", density=1.0),
}
every_codec = pytest.mark.parametrize("chosen", CODECS.values(), ids=CODECS)


def normal_blocks(num_blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of different magnitudes."""
    generator = np.random.default_rng(seed)
    scale = 10.0 ** generator.uniform(-3, 1, (num_blocks, 1))
    return (generator.standard_normal((num_blocks, 64)) * scale).astype(np.float32)


def plain_pruned(block: list[float], pruned: int) -> list[int]:
    """Reference: the positions that are kept, one at a time."""
    mass = sum(block)
    against = [i for i in range(64) if block[i] * (1 if mass >= 0 else -1) <= 0]
    others = [i for i in range(64) if i not in against]
    order = sorted(against, key=lambda i: abs(block[i])) + sorted(others, key=lambda i: abs(block[i]))
    return sorted(order[pruned:])


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_pruning_agrees_with_the_plain_reference(fraction: float) -> None:
    """The kept values are encoded as int8 does, with a scale of the kept values."""
    blocks = normal_blocks(100)
    blocks[3, 5:20] = 0
    pruned = round(fraction * 64)
    decoded = codec("int8", prune_fraction=fraction).decode(
        codec("int8", prune_fraction=fraction).encode(blocks), len(blocks)
    )
    masked = np.zeros_like(blocks)
    for row, block in enumerate(blocks):
        kept = plain_pruned(block.tolist(), pruned)
        masked[row, kept] = block[kept]
    assert decoded.tobytes() == codec("int8").decode(codec("int8").encode(masked), len(blocks)).tobytes()


@pytest.mark.parametrize(("fraction", "size"), [(0.0, 66), (0.25, 58), (0.5, 42), (0.75, 26), (0.98, 11)])
def test_pruning_makes_the_wire_smaller(fraction: float, size: int) -> None:
    chosen = codec("int8", prune_fraction=fraction)
    assert chosen.name == "int8"
    assert [chosen.size_bytes(n) for n in (0, 1, 1024, 5000)] == [0, size, 1024 * size, 5000 * size]


def test_exactly_the_named_share_is_left_out() -> None:
    for fraction, zeros in ((0.25, 16), (0.5, 32), (0.75, 48)):
        chosen = codec("int8", prune_fraction=fraction)
        # Far enough from zero that nothing rounds to it.
        blocks = np.sign(normal_blocks(50)) * (1 + np.abs(normal_blocks(50, seed=1)) % 1)
        decoded = chosen.decode(chosen.encode(blocks), 50)
        assert np.all(np.count_nonzero(decoded == 0, axis=1) == zeros)


def test_equal_values_are_pruned_from_the_end() -> None:
    chosen = codec("int8", prune_fraction=0.5)
    decoded = chosen.decode(chosen.encode(np.ones((1, 64), np.float32)), 1)
    np.testing.assert_allclose(decoded[0, :32], 1, rtol=1e-2)
    assert not decoded[0, 32:].any()


@pytest.mark.parametrize("fraction", [0.999, 1.0, -0.1, float("nan")])
def test_a_prune_fraction_must_leave_something(fraction: float) -> None:
    with pytest.raises(ConfigError, match="prune_fraction"):
        codec("int8", prune_fraction=fraction)


@pytest.mark.parametrize("name", ["int4", "fp16", "none", "topk"])
def test_only_int8_prunes(name: str) -> None:
    with pytest.raises(ConfigError, match="prune"):
        codec(name, prune_fraction=0.5)


@pytest.mark.parametrize("density", [0.0, -1.0, 1.1, float("nan")])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(ConfigError, match="density"):
        codec("topk", density=density)


def plain_topk(values: np.ndarray, count: int) -> np.ndarray:
    """Reference: SparseLoCo's coding of one group in double precision, by a full sort."""
    kept = np.argsort(-np.abs(values), kind="stable")[:count]
    chosen = values[kept].astype(np.float64)
    bins = np.zeros(count) if count == 1 else np.floor((chosen - chosen.mean()) / (1.5 * chosen.std())).clip(-2, 1)
    decoded = np.zeros(len(values))
    for level in set(bins):
        decoded[kept[bins == level]] = chosen[bins == level].mean()
    return decoded


@pytest.mark.parametrize("num_blocks", [1, 3, 64, 65, 1500])
@pytest.mark.parametrize("density", [0.001, 1 / 64, 0.5])
def test_topk_agrees_with_the_plain_reference(num_blocks: int, density: float) -> None:
    blocks, chosen = normal_blocks(num_blocks), codec("topk", density=density)
    decoded = chosen.decode(chosen.encode(blocks), num_blocks)
    for start in range(0, num_blocks, 64):
        values, found = (array[start : start + 64].reshape(-1) for array in (blocks, decoded))
        expected = plain_topk(values, max(1, round(density * values.size)))
        np.testing.assert_allclose(found, expected, rtol=2.0**-8)


@pytest.mark.parametrize(("density", "num_blocks", "size"), [
    (1 / 64, 1024, 16 * 120), (1 / 64, 65, 120 + 15), (0.02, 64, 8 + 21 * 7), (0.001, 1, 15), (1.0, 2, 232),
    (0.5, 0, 0),
])  # fmt: skip
def test_topk_has_a_fixed_size(density: float, num_blocks: int, size: int) -> None:
    chosen = codec("topk", density=density)
    assert chosen.size_bytes(num_blocks) == size == len(chosen.encode(normal_blocks(num_blocks)))


def test_of_equal_magnitudes_topk_keeps_the_first() -> None:
    chosen = codec("topk", density=0.1)
    values = np.where(np.arange(128) % 2, -3, 3).astype(np.float32).reshape(2, 64)
    decoded = chosen.decode(chosen.encode(values), 2).reshape(-1)
    assert np.flatnonzero(decoded).tolist() == list(range(13))


@every_codec
def test_runs_of_whole_chunks_are_coded_alone(chosen: Codec) -> None:
    blocks = normal_blocks(2500)
    parts = [(0, 1024), (1024, 2048), (2048, 2500)]
    whole = chosen.decode(chosen.encode(blocks), 2500)
    assert sum(chosen.size_bytes(high - low) for low, high in parts) == chosen.size_bytes(2500)
    for low, high in parts:
        assert chosen.decode(chosen.encode(blocks[low:high]), high - low).tobytes() == whole[low:high].tobytes()


@every_codec
def test_coding_is_deterministic_and_leaves_its_input_alone(chosen: Codec) -> None:
    blocks = normal_blocks(30)
    kept = blocks.copy()
    data = chosen.encode(blocks)
    assert chosen.encode(blocks) == data
    assert np.array_equal(blocks, kept)
    first, second = chosen.decode(data, 30), chosen.decode(memoryview(data), 30)
    assert first.tobytes() == second.tobytes()
    assert first.flags.writeable
    assert first.dtype == np.float32
    first[:] = 0
    assert chosen.decode(data, 30).tobytes() == second.tobytes()


@every_codec
def test_what_was_decoded_codes_to_itself(chosen: Codec) -> None:
    """Encoding a mean again loses at most a rounding step."""
    once = chosen.decode(chosen.encode(normal_blocks(50)), 50)
    twice = chosen.decode(chosen.encode(once), 50)
    peak = np.abs(once).max()
    np.testing.assert_allclose(twice, once, atol=peak / 100)


@every_codec
def test_zeros_stay_zeros(chosen: Codec) -> None:
    assert not chosen.decode(chosen.encode(np.zeros((5, 64), np.float32)), 5).any()


@pytest.mark.filterwarnings("error")
@every_codec
def test_values_at_the_end_of_float32_are_coded(chosen: Codec) -> None:
    blocks = np.full((2, 64), np.finfo(np.float32).max, np.float32)
    blocks[1, ::2] *= -1
    assert np.isfinite(chosen.decode(chosen.encode(blocks), 2)).all()


@every_codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1500])
def test_encoding_refuses_what_is_not_finite(chosen: Codec, value: float, row: int) -> None:
    blocks = normal_blocks(1600)
    blocks[row, 63] = value
    with pytest.raises(ValueError, match="not finite"):
        chosen.encode(blocks)


@given(key=st.sampled_from(list(CODECS)), num_blocks=st.integers(0, 3), data=st.data())
@settings(max_examples=300)
def test_hostile_bytes_decode_to_finite_values_or_a_wire_error(key: str, num_blocks: int, data) -> None:
    size = CODECS[key].size_bytes(num_blocks)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = CODECS[key].decode(payload, num_blocks)
    except WireError:
        return
    assert decoded.shape == (num_blocks, 64)
    assert np.isfinite(decoded).all()
    assert len(CODECS[key].encode(decoded)) == size


@every_codec
def test_damaged_bytes_decode_to_finite_values_or_a_wire_error(chosen: Codec) -> None:
    """Nearly valid bytes get further in the decoder than random ones."""
    generator = np.random.default_rng(1)
    data = bytearray(chosen.encode(normal_blocks(3)))
    refused = 0
    for _ in range(300):
        damaged = data.copy()
        damaged[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        try:
            assert np.isfinite(chosen.decode(bytes(damaged), 3)).all()
        except WireError:
            refused += 1
    assert 0 < refused < 300


@every_codec
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_size_is_a_wire_error(chosen: Codec, extra: int) -> None:
    with pytest.raises(WireError, match="bytes for"):
        chosen.decode(bytes(chosen.size_bytes(4) + extra), 4)


def test_a_bitmap_that_keeps_another_number_is_a_wire_error() -> None:
    chosen = codec("int8", prune_fraction=0.5)
    scale, steps = struct.pack("<H", 0x3F80), bytes(32)
    assert not chosen.decode(scale + b"\xff\x00" * 4 + steps, 1).any()
    for bitmap in (bytes(8), b"\xff" * 8, b"\xff\x00" * 3 + b"\xff\x01"):
        with pytest.raises(WireError, match="keep 32"):
            chosen.decode(scale + bitmap + steps, 1)
    # The right total for two blocks, but not the right number in each.
    with pytest.raises(WireError, match="keep 32"):
        chosen.decode(2 * scale + b"\xff" * 8 + bytes(8) + 2 * steps, 2)


def topk_group(levels: tuple[int, int, int, int], *kept: tuple[int, int]) -> bytes:
    """The bytes of a group of up to four kept values, each a position and a level."""
    word = sum((4 * position + level) << 14 * i for i, (position, level) in enumerate(kept))
    return struct.pack("<4H", *levels) + word.to_bytes(7, "little")


LEVELS = (0xC000, 0xBF80, 0x3F80, 0x4000)  # -2, -1, 1, 2


def test_a_group_has_positions_and_levels_of_14_bits() -> None:
    chosen = codec("topk", density=2 / 64)
    decoded = chosen.decode(topk_group(LEVELS, (5, 0), (63, 2)), 1)
    assert {i: decoded[0, i] for i in np.flatnonzero(decoded)} == {5: -2, 63: 1}
    assert chosen.encode(decoded) == topk_group((0, 0xC000, 0x3F80, 0), (5, 1), (63, 2))


@pytest.mark.parametrize(
    "kept", [[(5, 0), (5, 1)], [(6, 0), (5, 0)], [(5, 0), (64, 0)], [(5, 0), (4095, 3)], [(1, 0), (2, 0), (0, 1)]]
)
def test_positions_that_do_not_rise_within_the_group_are_a_wire_error(kept: list[tuple[int, int]]) -> None:
    with pytest.raises(WireError, match="positions"):
        codec("topk", density=2 / 64).decode(topk_group(LEVELS, *kept), 1)


@pytest.mark.parametrize("bits", [0x0001, 0x7F80, 0x8000, 0x807F, 0xFF80, 0xFFFF])
def test_levels_that_no_encoder_makes_are_refused(bits: int) -> None:
    with pytest.raises(WireError, match="level"):
        codec("topk", density=1 / 64).decode(topk_group((*LEVELS[:3], bits), (5, 0)), 1)


@pytest.mark.parametrize("bits", [0x0001, 0x7C00, 0x7F80, 0x8000])
def test_scales_that_no_encoder_makes_are_refused(bits: int) -> None:
    with pytest.raises(WireError, match="scale"):
        codec("int8", prune_fraction=0.5).decode(struct.pack("<H", bits) + b"\xff\x00" * 4 + bytes(32), 1)


@pytest.mark.parametrize("key", ["pruned 25", "pruned 50", "topk 30"])
def test_diloco_converges_when_what_was_left_out_stays_in_the_weights(key: str) -> None:
    """Four workers with different targets. What a worker's bytes leave out stays in its weights, as in a round."""
    targets = [np.random.default_rng(seed).standard_normal((2, 64)).astype(np.float32) for seed in (1, 2, 3, 4)]
    optimum = np.mean(targets, axis=0)
    anchor = np.zeros((2, 64), np.float32)
    locals_ = [anchor.copy() for _ in targets]
    first = np.abs(anchor - optimum).max()
    for _ in range(300):
        sent = []
        for local, target in zip(locals_, targets, strict=True):
            for _ in range(5):
                local -= np.float32(0.02) * (local - target)
            sent.append(CODECS[key].encode(anchor - local))
        before = anchor.copy()
        mean = weighted_mean([(data, 1.0) for data in sent], CODECS[key], 2)
        outer_step("sgd", anchor, [], mean, lr=1.0, momentum=0.0, round_=0)
        for local, data in zip(locals_, sent, strict=True):
            local += anchor - before + CODECS[key].decode(data, 2)
    assert np.abs(anchor - optimum).max() < 0.2 * first


@pytest.mark.parametrize("density", [1.0, 0.3, 1 / 64])
@pytest.mark.parametrize("nonzero", [0, 1, 40, 70])
def test_zeros_stay_zero_where_more_values_are_kept_than_there_are_others(density: float, nonzero: int) -> None:
    blocks = np.zeros((65, 64), np.float32)
    blocks.reshape(-1)[:nonzero] = np.random.default_rng(0).standard_normal(nonzero)
    coding = codec("topk", density=density)
    decoded = coding.decode(memoryview(coding.encode(blocks)), len(blocks))
    assert not decoded[blocks == 0].any()
    assert decoded.any() == (nonzero > 0)
