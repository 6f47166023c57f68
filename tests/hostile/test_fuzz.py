"""Findings of `make fuzz`, and 5,000 fresh frames: nothing but a WireError comes of them."""

from __future__ import annotations

import pytest

from p2ptrain.error_log import innermost
from p2ptrain.protocol.gossip import Gossip
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.wire.messages import Fragment
from tests.hostile import fuzz


@pytest.mark.parametrize("as_member", [False, True], ids=["stranger", "member"])
def test_findings_stay_mended(as_member: bool) -> None:
    assert fuzz.replay(seed=int(as_member)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, id="stranger"),
        pytest.param(1, id="member", marks=pytest.mark.long),
        pytest.param(4, id="pairwise stranger", marks=pytest.mark.long),
        pytest.param(7, id="pairwise member"),
    ],
)
def test_random_frames_end_no_peer(seed: int) -> None:
    counted = fuzz.fuzz(seed, 2500)
    # 9 % of a member's in a pairwise run (measured): weights of another step, or of no partner, are ignored.
    assert 0.05 < counted.refused / counted.read < 0.9


def test_a_bug_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Gossip.on_fragment

    async def on_fragment(gossip: Gossip, link: Link, message: Fragment, payload: bytes) -> None:
        if link.peer_id == "x":
            raise IndexError("planted")
        await honest(gossip, link, message, payload)

    kept: list[bytes] = []
    monkeypatch.setattr(Gossip, "on_fragment", on_fragment)
    monkeypatch.setattr(fuzz, "keep", lambda batch, known: kept.extend(batch))
    with pytest.raises(BaseExceptionGroup) as raised:
        fuzz.fuzz(0, 5000)
    assert "planted" in str(innermost(raised.value))
    assert kept
