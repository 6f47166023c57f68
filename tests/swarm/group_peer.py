"""One process of a process group, started by torchrun: it trains until it has merged fragments and committed a round.

After every step it compares its weights with those of the other ranks, bit by bit. At the end it prints what it has
seen. The arguments are the addresses of a peer of the run.
"""

from __future__ import annotations

import datetime
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import p2ptrain

MERGED, COMMITTED = 5, 1


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    inputs = torch.rand(32, 8, generator=generator)
    return (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    torch.manual_seed(dist.get_rank())  # different weights on each rank until it has joined
    ours = model()
    parallel = DistributedDataParallel(ours)
    merged, committed, contributors = 0, 0, set[str]()
    with p2ptrain.join(
        parallel, run_id="process-group", initial_peers=sys.argv[1:], process_group=dist.group.WORLD,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
    ) as peer:  # fmt: skip
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(peer.data_seed)
        while merged < MERGED or committed < COMMITTED:
            loss = loss_of(parallel, generator)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = peer.step(loss=loss.item(), samples=32)
            merged += report.merged
            if report.round is not None and report.round.status == "committed":
                committed += 1
                contributors.update(report.round.contributors)
            weights = nn.utils.parameters_to_vector(ours.parameters()).detach()
            theirs = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
            dist.all_gather(theirs, weights)
            assert all(torch.equal(weights, other) for other in theirs), (peer.rank, peer.run_step)
    seen = {"rank": peer.rank, "seed": peer.data_seed, "contributors": sorted(contributors), "round": peer.round}
    print(json.dumps(seen) + "\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
