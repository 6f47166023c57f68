"""Real peers on links of 10 Mbit/s, one of which is cut for longer than every timeout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.namespaces import Wires
from tests.links.peers import join_all, losses, wait_for_rounds
from tests.swarm.processes import Swarm, assert_anchors_agree


@pytest.mark.long
def test_rounds_on_slow_links_and_a_peer_that_was_cut_off_comes_back(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    machines = [net.machine(mbit=10) for _ in range(3)]
    peers = join_all(swarm, tmp_path / "peers", machines, peer_timeout_s=4)
    wait_for_rounds(swarm, peers, by=3)
    assert not any(losses(peer) for peer in peers)

    *others, alone = peers
    net.cut(machines[-1])
    swarm.until(lambda: all(losses(peer) for peer in peers))
    cut_round, cut_steps = alone.rounds()[-1]["round"], len(alone.events("step"))
    # Two of three voters go on; the third trains on and commits nothing.
    wait_for_rounds(swarm, others, by=2, since=cut_round + 1)
    swarm.until(lambda: len(alone.events("step")) > cut_steps + 20)
    assert alone.rounds()[-1]["round"] <= cut_round + 1
    net.heal(machines[-1])
    wait_for_rounds(swarm, peers, by=3, since=cut_round + 2)
    assert len({event["lineage"] for peer in peers for event in peer.rounds()}) == 1
    assert_anchors_agree(*peers)
