"""How far a partner's weights may be from our anchor: what the last partners' distances allow."""

from __future__ import annotations

from p2ptrain.algorithms.pairwise import clip_scale
from p2ptrain.protocol.pairwise.swap import PARTNERS_REMEMBERED, Distances


def test_weights_as_far_as_ours_count_fully_and_far_ones_are_scaled() -> None:
    distances = Distances()
    assert distances.clip("p1", 1.0, moved=1.0) == 1
    assert distances.clip("p2", 1e6, moved=1.0) == clip_scale(1.0, [1.0], 1e6) < 1e-4


def test_one_partner_alone_does_not_raise_the_limit_for_itself() -> None:
    distances = Distances()
    for number in range(4):
        distances.clip(f"p{number}", 1.0, moved=1.0)
    scales = [distances.clip("liar", 1e6, moved=1.0) for _ in range(20)]
    assert max(scales) == min(scales) < 1e-4


def test_only_the_last_partners_are_remembered() -> None:
    distances = Distances()
    for number in range(PARTNERS_REMEMBERED):
        distances.clip(f"far{number}", 100.0, moved=100.0)
    for number in range(PARTNERS_REMEMBERED):
        distances.clip(f"near{number}", 1.0, moved=1.0)
    assert distances.clip("p", 1e6, moved=1.0) == clip_scale(1.0, PARTNERS_REMEMBERED * [1.0], 1e6)
