"""Windows: a function of seed and position, targets one ahead, never across the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.training.data import RandomWindows, fixed_windows

TOKENS = np.arange(200, dtype=np.uint8)


def _windows(seed: int = 0, context: int = 8) -> RandomWindows:
    return RandomWindows(TOKENS, context=context, batch_size=16, seed=seed)


def test_targets_are_one_character_ahead() -> None:
    inputs, targets = _windows().next_batch()
    assert inputs.shape == targets.shape == (16, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    torch.testing.assert_close(inputs + 1, targets)
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])


def test_every_place_is_drawn_about_equally_often() -> None:
    windows = _windows()
    starts = torch.cat([windows.next_batch()[0][:, 0] for _ in range(2000)])
    counts = torch.bincount(starts, minlength=192)
    assert len(counts) == 192  # 200 tokens hold 192 windows of 8 + 1
    expected = 32_000 / 192
    assert ((counts - expected).abs() < 6 * expected**0.5).all()


def test_a_stream_depends_on_its_seed_alone() -> None:
    first, again, other = _windows(1), _windows(1), _windows(2)
    for _ in range(3):
        batch = first.next_batch()[0]
        assert torch.equal(batch, again.next_batch()[0])
        assert not torch.equal(batch, other.next_batch()[0])


def test_a_stream_goes_on_where_it_stopped() -> None:
    first, resumed = _windows(1), _windows(5)
    first.next_batch()
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(first.next_batch()[0], resumed.next_batch()[0])


def test_fixed_windows_span_the_text() -> None:
    inputs, targets = fixed_windows(TOKENS, context=8, count=5)
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 199
    assert inputs.shape == (5, 8)


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="200 tokens to train on are fewer than one window of 201; give more text, or"
    ):
        _windows(context=200)
    with pytest.raises(
        ConfigError,
        match=r"to hold out .*; give more text, or, for prepared data, a larger --held-out; or a shorter --context",
    ):
        fixed_windows(TOKENS, context=200, count=1)
    fixed_windows(TOKENS, context=199, count=1)


def test_windows_stay_within_their_spans() -> None:
    # 10 places for windows of 8 + 1 in [20, 38), 1 in [100, 109), none in [150, 158).
    spans = np.array([[20, 38], [100, 109], [150, 158]])
    windows = RandomWindows(TOKENS, context=8, batch_size=16, seed=0, spans=spans)
    inputs, targets = (torch.cat(parts) for parts in zip(*(windows.next_batch() for _ in range(500)), strict=True))
    torch.testing.assert_close(inputs + 1, targets)
    starts = torch.bincount(inputs[:, 0], minlength=200)
    assert set(starts.nonzero().flatten().tolist()) == {*range(20, 30), 100}
    # Each of the 11 equally often.
    assert ((starts[starts > 0] - 8000 / 11).abs() < 6 * (8000 / 11) ** 0.5).all()


def test_a_span_of_everything_changes_nothing() -> None:
    whole = RandomWindows(TOKENS, context=8, batch_size=16, seed=3, spans=np.array([[0, 200]]))
    assert torch.equal(whole.next_batch()[0], _windows(3).next_batch()[0])


def test_spans_shorter_than_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="each of the 2 pieces of text of this shard is shorter than one window of 9"):
        RandomWindows(TOKENS, context=8, batch_size=1, seed=0, spans=np.array([[0, 8], [50, 55]]))
