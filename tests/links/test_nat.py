"""Two peers behind routers that masquerade, and one that anybody can dial."""

from __future__ import annotations

from pathlib import Path

from tests.links.namespaces import Wires
from tests.links.peers import join_all, wait_for_rounds
from tests.swarm.processes import Swarm, assert_anchors_agree


def test_two_private_peers_train_together_through_a_public_one(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    peers = join_all(swarm, tmp_path / "peers", [net.machine(), net.behind_nat(), net.behind_nat()])
    public, *private = peers
    wait_for_rounds(swarm, peers, by=3, count=3)
    assert_anchors_agree(*peers)
    for peer in private:
        assert peer.events("peers")[-1]["alive"] == [public.peer_id]
        assert sum(event["merged"] for event in peer.events("fragments")) > 0
        assert "forward a port of your router" in peer.errors
    assert "forward a port" not in public.errors
