"""Scenarios of FSDP2 in processes of their own, which `test_fsdp.py` starts.

The arguments are scenarios with their number of ranks, as `refusals/4`. Torch is imported once, and each rank of each
scenario is a fork. One JSON line per scenario says what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # FSDP2 imports it in its first forward pass: here once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import p2ptrain
from p2ptrain.errors import ConfigError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import (
    Arrival,
    Changes,
    Epoch,
    Landing,
    Push,
    PushPlan,
    SnapshotTaken,
    SnapshotWanted,
    StepReport,
)
from p2ptrain.settings.config import RunConfig
from tests.peer.pair import memory_peer
from tests.protocol.hearing import hear

CPU = torch.device("cpu")


class Model(nn.Module):
    """Rows that fit neither two nor four ranks, a tied, a frozen and a half-precision parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 13)
        self.frozen = nn.Linear(13, 5, bias=False).requires_grad_(False)
        self.hidden = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.narrow = nn.Linear(7, 3).to(torch.bfloat16)
        self.back = nn.Linear(3, 13)
        self.output = nn.Linear(13, 30, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.hidden(self.frozen(self.embedding(tokens))))
        return self.output(self.back(self.narrow(hidden.to(torch.bfloat16)).to(torch.float32)))


def sharded_model() -> Model:
    model = Model()
    for module in (model.frozen, model.hidden, model.narrow, model):
        fully_shard(module)
    return model


def own_rows(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    parts = values.chunk(size)
    return parts[rank] if rank < len(parts) else values[:0]


def differing(sharded: list[nn.Parameter], whole: list[nn.Parameter], rank: int, size: int) -> list[int]:
    """The numbers of the parameters whose bits differ from those of the reference, in what this rank holds."""
    bits = {2: torch.int16, 4: torch.int32}
    return [
        number for number, (ours, theirs) in enumerate(zip(sharded, whole, strict=True))
        if not torch.equal(
            ours.data.to_local().view(bits[ours.itemsize]), own_rows(theirs.data, rank, size).view(bits[ours.itemsize])
        )
    ]  # fmt: skip


class Driven:
    """A peer without a network: each step lands, merges and gathers what `script` gives to its exchange."""

    peer_id, maddrs, alive, round, anchor_hash, failure = "QmFake", ["/ip4/127.0.0.1/tcp/1"], [], 0, "00" * 32, None
    founded = True

    def __init__(self, parts: ModelParts, script: Callable[[Driven, int], None]) -> None:
        self.run = RunConfig(model_layout=parts.layout, fragment_fraction=0.5, sync_every=2)
        self.posts: list[Callable[[], object]] = []
        self.exchange = Exchange(parts.view, self.run, clock=lambda: float(self.exchange.steps), post=self.posts.append)
        self.exchange.epoch = Epoch("L", 0)
        hear(self.exchange, {Push: lambda push: self.seen.append(push.values)})
        hear(self.exchange, {SnapshotTaken: lambda snapshot: self.seen.append(snapshot.weights)})
        self.seen: list[torch.Tensor] = []
        self.script = script

    run_step = property(lambda self: self.exchange.run_step)
    finished = property(lambda self: self.exchange.finished)

    def step_checked(self, loss: float | None, samples: int, start_s: float) -> StepReport:
        self.script(self, self.exchange.steps)
        report = self.exchange.step(samples)
        while self.posts:
            self.posts.pop(0)()
        return report

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.exchange.view.gather(self.exchange.space.plan(np.arange(2)))
        raise ConfigError("it is damaged")

    def take_changes(self) -> Changes:
        return self.exchange.take_changes()

    def leave(self, reason: str, *, landing: bool = True) -> None:
        pass


def exchange_script(peer: Driven, step: int) -> None:
    """Fragments of two senders at each step, a push, and a snapshot; a round that lands by "add", then by "write"."""
    space, generator = peer.exchange.space, torch.Generator().manual_seed(step)
    for sender in "ab":
        blocks = torch.randperm(space.num_blocks, generator=generator)[: space.num_blocks // 2].numpy()
        plan = space.plan(blocks)
        values = peer.exchange.view.gather(plan) + 0.01 * torch.randn(len(blocks), 64, generator=generator)
        arrival = Arrival(sender, peer.exchange.epoch, plan, values, 0.0, float(step))
        peer.exchange.inbox.put(arrival)
    peer.exchange.offer_push(PushPlan(0, 0, 1, space.plan(np.arange(space.num_blocks)[1::2])))
    if step in (1, 3):
        peer.exchange.want_snapshot(SnapshotWanted(torch.full((space.num_blocks, 64), torch.nan), 0.0))
    if step in (2, 4):
        flat = torch.randn(space.num_blocks, 64, generator=generator)
        kind = "add" if step == 2 else "write"
        epoch = Epoch("L", step)
        peer.exchange.land(Landing(kind, flat, epoch, 2, step, 0, None, None, False))


def train(parameters: list[nn.Parameter], step: int, rank: int, size: int) -> None:
    """Change each parameter by the same in all layouts, as an optimizer changes it between two exchanges."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        change = 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if hasattr(parameter, "to_local"):
            parameter.data.to_local().add_(own_rows(change, rank, size))
        else:
            parameter.data.add_(change)


def fragments_and_rounds(rank: int, size: int) -> None:
    """After fragments, pushes, snapshots and landings, all bits are those of a peer of one process."""
    reference_model = Model()
    reference_parts = ModelParts(reference_model)
    reference = Driven(reference_parts, exchange_script)
    model = sharded_model()
    trained, reference_trained = (
        [parameter for parameter in m.parameters() if parameter.requires_grad] for m in (model, reference_model)
    )
    tokens = torch.arange(30)
    merged = sent = 0
    peers: list[Driven] = []

    def enter(parts: ModelParts) -> Any:
        peers.append(Driven(parts, exchange_script))
        return peers[0]

    with GroupPeer(model, dist.group.WORLD, enter, device=CPU) as group_peer:
        assert group_peer.run.model_layout == reference_parts.layout
        with pytest.raises(ConfigError, match="it is damaged"):
            group_peer.load_state_dict({})
        for step in range(6):
            train(trained, step, rank, size)
            train(reference_trained, step, rank, size)
            with torch.no_grad():
                model(tokens)  # FSDP2 keeps the whole parameters of the root after it
                reference_model(tokens)
            report = group_peer.step(samples=1)
            expected = reference.step_checked(None, size, 0.0)
            assert (report.merged, report.sent, report.skipped) == (expected.merged, expected.sent, expected.skipped)
            merged, sent = merged + report.merged, sent + report.sent
            assert not differing(trained, reference_trained, rank, size), step
            with torch.no_grad():
                assert torch.equal(model(tokens), reference_model(tokens)), step
    assert (merged, sent) == (8, 6)  # two fragments are of the round before each landing
    if rank == 0:
        assert len(peers[0].seen) == len(reference.seen) == 8
        for ours, theirs in zip(peers[0].seen, reference.seen, strict=True):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def real_peers(rank: int, size: int) -> None:
    """A sharded peer founds a run; a peer of one process joins and trains with it. At its end both are equal."""
    run = RunConfig(run_id="fsdp", fragment_fraction=0.1, sync_every=10, total_steps=30, round_codec="none")
    model = sharded_model()
    other_model = Model()
    nn.init.zeros_(other_model.hidden.weight)
    memory, threads, joined = MemoryNetwork(), list[NetworkThread](), threading.Event()
    found, contributors = dict[str, Any](), dict[str, set[str]]()

    def loop(name: str, model: nn.Module, peer: Peer | GroupPeer) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator, contributors[name] = torch.Generator().manual_seed(peer.data_seed), set()
        while peer.run_step < run.total_steps:
            tokens = torch.randint(30, (16,), generator=generator)
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (landed := peer.step(samples=16).round) is not None:
                contributors[name].update(landed.contributors)
        assert peer.wait_finished(60), name

    def other() -> None:
        with memory_peer(ModelParts(other_model), run, "b", memory, threads[0], may_found=False) as peer:
            joined.set()
            loop("b", other_model, peer)
            found["b"] = peer.anchor_state_dict(), peer.anchor_hash

    def enter(parts: ModelParts) -> Peer:
        threads.append(NetworkThread())
        return memory_peer(parts, run, "a", memory, threads[0], may_found=True)

    with GroupPeer(model, dist.group.WORLD, enter, device=CPU) as group_peer:
        waits = threading.Thread(target=other)
        if rank == 0:
            waits.start()
            joined.wait()
        loop("a", model, group_peer)
        found["a"] = group_peer.anchor_state_dict(), group_peer.anchor_hash
        if rank == 0:
            waits.join()
    if rank == 0:
        assert threads[0].stop(10.0)
        assert found["a"][1] == found["b"][1]
        assert all(torch.equal(values, found["b"][0][name]) for name, values in found["a"][0].items())
        assert contributors["a"] | contributors["b"] == {"a", "b"}
    else:
        assert found["a"][0] == {}


def refusals(rank: int, size: int) -> None:
    """What is not supported is refused by all ranks, with the reason, before a network is opened."""

    def refused(model: nn.Module, group: dist.ProcessGroup | None = dist.group.WORLD) -> str:
        try:
            p2ptrain.join(model, process_group=group)
        except ConfigError as error:
            return str(error)
        raise AssertionError("it was not refused")

    assert "give process_group=" in refused(sharded_model(), None)
    hybrid = nn.Linear(8, 8)
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    assert "is placed as" in refused(hybrid)
    columns = nn.Linear(8, 8, bias=False)
    fully_shard(columns, shard_placement_fn=lambda parameter: Shard(1))
    assert "is placed as" in refused(columns)
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0])
    assert "parameter 1.weight is not sharded, but others are" in refused(partly)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    assert "must be the same" in refused(sharded_model(), halves[rank // 2])
    one_differs = sharded_model() if rank else Model()
    message = refused(one_differs)
    assert "another rank" in message if rank == 0 else "is not that of rank 0" in message, message
    frozen = Model()
    if rank == 2:
        frozen.frozen.weight.data[0] += 1
    message = refused(frozen)
    assert "is not that of rank 0" in message if rank == 2 else "another rank" in message, message


SCENARIOS = {scenario.__name__: scenario for scenario in (fragments_and_rounds, real_peers, refusals)}


def run_rank(name: str, rank: int, store: str) -> None:
    scenario, size = name.split("/")[0], int(name.split("/")[1])
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    SCENARIOS[scenario](rank, size)
    dist.destroy_process_group()


def run_scenario(name: str, store: str) -> list[str]:
    """Fork the ranks; return what they print when they fail."""
    ranks = []
    for rank in range(int(name.split("/")[1])):
        outputs, output = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(name, rank, store)
            except BaseException:
                os.write(output, f"rank {rank}: {traceback.format_exc()}".encode())
            os._exit(0)
        os.close(output)
        ranks.append((pid, outputs))
    failures = []
    for pid, outputs in ranks:
        with os.fdopen(outputs) as stream:
            failures.append(stream.read())
        status = os.waitpid(pid, 0)[1]
        if status:
            failures.append(f"a rank has ended with {status}")
    return [failure for failure in failures if failure]


def main() -> None:
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            failures = run_scenario(name, f"{directory}/store")
        print(json.dumps([name, failures]), flush=True)


if __name__ == "__main__":
    main()
