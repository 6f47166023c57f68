"""A process group of two processes under torchrun, and a peer in this process."""

from __future__ import annotations

import json

import pytest
import torch

import p2ptrain
from tests.swarm import group_peer
from tests.swarm.processes import Swarm


@pytest.mark.long
def test_a_group_peer_is_one_peer_whose_ranks_hold_the_same_weights(swarm: Swarm) -> None:
    torch.set_num_threads(1)
    model = group_peer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    alive: set[str] = set()
    with p2ptrain.join(
        model, run_id="process-group", host_maddrs=["/ip4/127.0.0.1/tcp/0"], diloco=p2ptrain.DiLoCo(sync_every=100),
        sparta=p2ptrain.Sparta(fragment_fraction=0.1),
    ) as peer:  # fmt: skip
        generator = torch.Generator().manual_seed(peer.data_seed)
        torchrun = swarm.start(f"torchrun --nproc-per-node 2 {group_peer.__file__} {' '.join(peer.maddrs)}")
        while torchrun.running:
            group_peer.loss_of(model, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
            peer.step(samples=32)
            alive.update(peer.alive)
        assert torchrun.wait() == 0, swarm.report()
        ranks = [json.loads(line) for line in torchrun.output.splitlines()]
        assert {rank["rank"] for rank in ranks} == {0, 1}
        assert len({rank["seed"] for rank in ranks} | {peer.data_seed}) == 3
        assert ranks[0]["round"] == ranks[1]["round"]
        assert len(alive) == 1  # other peers see one peer
        assert ranks[0]["contributors"] == ranks[1]["contributors"] == sorted([peer.peer_id, *alive])
