"""A group peer on a real gloo group, whose ranks are threads here; rank 0 holds a fake peer."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import p2ptrain
from p2ptrain.algorithms.transfers import FlatAtOnce
from p2ptrain.errors import ConfigError, NotAllowedError, PeerLostError, RunKeyError, UnreachableError
from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.protocol.exchange.types import Changes, RoundReport, StepReport
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.ranks import Ranks, join_ranks
from tests.fakes import FakePeer
from tests.peer.ranks import on_all_ranks

CPU = torch.device("cpu")
SIZE = 3
# The ranks are threads, which share torch's global generator.
SEEDING = threading.Lock()
ROUND = RoundReport(round=4, status="committed", lineage="0-aa", contributors=("QmFake", "QmOther"), cosine=0.25)


def new_model(seed: int) -> nn.Module:
    with SEEDING:
        torch.manual_seed(seed)
        # A tensor that is not contiguous, tied and half-precision ones, tails that do not fill a block, and buffers.
        model = nn.Sequential(nn.Linear(64, 70), nn.BatchNorm1d(70), nn.Linear(70, 3).to(torch.bfloat16))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


class Swarm(FakePeer):
    """A fake peer whose `step` changes the model as the swarm would: `plan` has one change per step."""

    def __init__(self, model: nn.Module, *plan: str) -> None:
        super().__init__(RunConfig(model_layout=ModelParts(model).layout, sync_every=2))
        self.model, self.plan = model, list(plan)
        self.parts = ModelParts(model)
        self.tokens: list[int] = []
        self.changes = Changes()

    def step(self, loss: float | None = None, samples: int = 0) -> StepReport:
        super().step(loss)
        self.tokens.append(samples)
        what = self.plan.pop(0)
        flat = torch.zeros(self.parts.space.num_blocks, 64)
        if what == "round":
            self.changes = Changes(everything=True)
            for parameter in self.model.parameters():
                parameter.data += 1
        elif what == "fragment":
            blocks = np.array([0, 5, self.parts.space.num_blocks - 1])
            self.changes = Changes(blocks=blocks)
            flat[blocks] = 2.0
            for name, values in self.parts.unflatten(flat).items():
                self.model.get_parameter(name).data += values
        return StepReport(sent=1, merged=1, skipped={"epoch": 2}, round=ROUND if what == "round" else None)

    def take_changes(self) -> Changes:
        changes, self.changes = self.changes, Changes()
        return changes


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def all_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_round_lands_in_one_step_of_a_group() -> None:
    """After each slice of it, all weights would have to be copied to the other ranks."""

    def rank(number: int, group: dist.ProcessGroup) -> bool:
        parts = ModelParts(new_model(0), ProcessGroup(group, CPU))
        return isinstance(parts.transfers().flat, FlatAtOnce)

    assert all(on_all_ranks(rank))


def test_joining_gives_all_ranks_the_weights_and_buffers_of_rank_0_and_data_of_their_own() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, str, list[str], list[torch.Tensor]]:
        model = new_model(rank)
        model[1].running_mean += rank + 1
        model[1].num_batches_tracked += rank
        with GroupPeer(model, group, lambda parts: Swarm(model), device=CPU) as group_peer:
            assert group_peer.rank == rank
            assert group_peer.size == SIZE
            assert (group_peer.peer is not None) == (rank == 0)
            assert (group_peer.run_step, group_peer.round, group_peer.finished, group_peer.alive) == (
                0,
                0,
                False,
                ["QmOther"],
            )
            return group_peer.data_seed, group_peer.peer_id, group_peer.maddrs, values_of(model)

    seeds, ids, maddrs, values = zip(*on_all_ranks(work), strict=True)
    assert len(set(seeds)) == SIZE
    assert seeds[0] == RunConfig().data_seed("QmFake")
    assert set(ids) == {"QmFake"}
    assert maddrs[0] == maddrs[1] == list(FakePeer.maddrs)
    assert all_equal(values[0], values[1])
    assert values[0][4].eq(1).all()  # the running mean


@pytest.mark.parametrize("plan", [["fragment"], ["round"], ["nothing"], ["fragment", "round", "nothing", "fragment"]])
def test_what_the_swarm_changes_reaches_every_rank_and_nothing_else_is_touched(plan: list[str]) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[StepReport], int]:
        model = new_model(0)
        with GroupPeer(model, group, lambda parts: Swarm(model, *plan), device=CPU) as group_peer:
            if "round" not in plan:
                model[0].weight.data[2] = rank  # block 2: it is not in a fragment, so it is not copied
            reports = [group_peer.step(samples=1) for _ in plan]
            return values_of(model), reports, group_peer.run_step

    results = on_all_ranks(work)
    for rank, (values, reports, run_step) in enumerate(results):
        assert run_step == len(plan)
        for report, ours in zip(reports, results[0][1], strict=True):
            assert (report.sent, report.merged, report.skipped, report.round) == (1, 1, {"epoch": 2}, ours.round)
        if "round" not in plan:
            assert values[0][2].eq(rank).all()
            values[0][2] = 0
        assert all_equal(values, results[0][0])
    assert [report.round for report in results[1][1]] == [ROUND if what == "round" else None for what in plan]
    before = values_of(new_model(0))
    before[0][2] = results[0][0][0][2]
    assert all_equal(before, results[0][0]) == (plan == ["nothing"])


def test_samples_are_summed_and_losses_averaged() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Swarm | None:
        model = new_model(0)
        peer = Swarm(model, "nothing", "nothing")
        with GroupPeer(model, group, lambda parts: peer, device=CPU) as group_peer:
            group_peer.step(loss=float(rank), samples=10 + rank)
            group_peer.step()
        return peer if rank == 0 else None

    peer = on_all_ranks(work)[0]
    assert peer is not None
    assert (peer.losses, peer.tokens, peer.left) == ([1.0, None], [33, 0], "done")


def test_the_wait_for_other_ranks_counts_as_exchange_in_the_records_too() -> None:
    entered = threading.Event()

    def work(rank: int, group: dist.ProcessGroup) -> float:
        model = new_model(0)
        peer = Swarm(model, "nothing")
        with GroupPeer(model, group, lambda parts: peer, device=CPU) as group_peer:
            if rank == 0:
                check, parts = group_peer._parts.check_in_place, group_peer._parts
                parts.check_in_place = lambda: (check(), entered.set())[0]  # type: ignore[method-assign]
            else:
                entered.wait()
            called_s = time.monotonic()
            group_peer.step()
        return peer.started_s if rank == 0 else called_s

    started_s, *called_s = on_all_ranks(work)
    assert started_s < min(called_s)


@pytest.mark.parametrize(
    ("given", "refused", "others"),
    [
        ({"samples": -1}, "samples = -1", "another rank of this process group"),
        ({"loss": "low"}, "loss = 'low'", "another rank of this process group"),
        ({"samples": 2**32}, "samples = 4294967298: must be", "samples = 4294967298: must be"),
    ],
)
def test_a_step_that_one_rank_refuses_is_refused_on_all(given: dict[str, Any], refused: str, others: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Swarm:
        model = new_model(0)
        peer = Swarm(model, "nothing")
        with GroupPeer(model, group, lambda parts: peer, device=CPU) as group_peer:
            with pytest.raises(ConfigError, match=refused if rank == 1 else others):
                group_peer.step(**{"samples": 1, **(given if rank == 1 else {})})
            group_peer.step(samples=1)
        return peer

    assert on_all_ranks(work)[0].tokens == [SIZE]


@pytest.mark.parametrize("kind", [ConfigError, RunKeyError, UnreachableError, NotAllowedError, TimeoutError])
def test_when_rank_0_cannot_join_all_ranks_say_why(kind: type[Exception]) -> None:
    error = kind("no such peer")

    def refuse(parts: ModelParts) -> p2ptrain.Peer:
        raise error from OSError("unplugged")

    def work(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(kind, match=r"^no such peer$") as refused:
            GroupPeer(new_model(0), group, refuse if rank == 0 else None, device=CPU)
        assert type(refused.value) is kind
        assert (refused.value is error) == (rank == 0)

    on_all_ranks(work)
    assert isinstance(error.__cause__, OSError)


def test_the_command_line_says_on_rank_0_why_it_cannot_join_and_ends_the_others_silently() -> None:
    error = NotAllowedError("on a deny list")

    def refuse(parts: nn.Module | ModelParts) -> p2ptrain.Peer:
        raise error from OSError("closed")

    def work(rank: int, group: dist.ProcessGroup) -> BaseException:
        ranks = Ranks(group)
        with pytest.raises((NotAllowedError, SystemExit)) as ended, ranks.lost_ranks_reported(first_speaks=rank > 0):
            join_ranks(new_model(0), ranks, refuse if rank == 0 else None)
        return ended.value

    first, *others = on_all_ranks(work)
    assert first is error
    assert isinstance(error.__cause__, OSError)
    assert [type(other) for other in others] == [SystemExit, SystemExit]


@pytest.mark.parametrize(
    ("kind", "elsewhere", "text"),
    [
        (ConfigError, ConfigError, "^damaged$"),
        (TimeoutError, TimeoutError, "^damaged$"),
        (LookupError, PeerLostError, "^rank 0 of this process group has raised LookupError: damaged$"),
    ],
)
def test_a_state_that_cannot_be_loaded_is_refused_on_all_ranks_which_train_on(
    kind: type[Exception], elsewhere: type[Exception], text: str
) -> None:
    class Refusing(Swarm):
        def load_state_dict(self, state: dict[str, Any]) -> bool:
            raise kind("damaged")

    def work(rank: int, group: dist.ProcessGroup) -> int:
        model = new_model(0)
        with GroupPeer(model, group, lambda parts: Refusing(model, "fragment"), device=CPU) as group_peer:
            with pytest.raises(kind if rank == 0 else elsewhere, match="damaged" if rank == 0 else text):
                group_peer.load_state_dict({})
            return group_peer.step(samples=1).merged

    assert on_all_ranks(work) == [1] * SIZE


def test_a_rank_with_another_model_is_refused_on_all() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = nn.Linear(2, 2) if rank == 1 else new_model(0)
        with pytest.raises(ConfigError) as refused:
            GroupPeer(model, group, lambda parts: Swarm(model), device=CPU)
        return str(refused.value)

    errors = on_all_ranks(work)
    assert "the model of rank 1 is not that of rank 0" in errors[1]
    assert "another rank of this process group has refused its join()" in errors[0]
    assert errors[2] == errors[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_reported_and_the_run_is_left(lost: int) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str | None:
        model = new_model(0)
        peer = Swarm(model, "fragment", "fragment")
        with (
            pytest.raises((PeerLostError, LookupError)),
            GroupPeer(model, group, lambda parts: peer, device=CPU) as group_peer,
        ):
            group_peer.step()
            if rank == lost:
                raise LookupError("of the user's own")
            with pytest.raises(PeerLostError, match=rf"rank {rank} of 3 has lost .* torchrun --max-restarts"):
                group_peer.step()
            raise LookupError
        return peer.left

    assert on_all_ranks(work)[0] == "LookupError"


def test_a_rank_that_hangs_is_given_up_after_the_timeout_of_the_group() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> GroupPeer:
        model = new_model(0)
        group_peer = GroupPeer(model, group, lambda parts: Swarm(model, "nothing"), device=CPU)
        assert group_peer._ranks._sockets is not None
        group_peer._ranks._sockets._timeout_s = 0.1
        if rank != 1:
            with pytest.raises(PeerLostError, match=r"timeout for it \(Timed out\)"):
                group_peer.step()
        return group_peer  # so that its sockets stay open

    on_all_ranks(work)


def test_the_end_of_the_run_and_states_are_the_same_on_all_ranks() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = new_model(0)
        peer = Swarm(model, "nothing", "nothing")
        peer.run = RunConfig(model_layout=ModelParts(model).layout, total_steps=2)
        with GroupPeer(model, group, lambda parts: peer, device=CPU) as group_peer:
            assert not group_peer.wait_finished(0)
            group_peer.step()
            group_peer.step()
            assert group_peer.wait_finished(60)
            assert group_peer.finished
            assert bool(group_peer.state_dict()) == (rank == 0)
        assert bool(group_peer.state_dict()) == (rank == 0)  # alone, after the block

    on_all_ranks(work)


def test_a_call_that_only_rank_0_makes_is_named() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = new_model(0)
        group_peer = GroupPeer(model, group, lambda parts: Swarm(model, "nothing"), device=CPU)
        if rank == 0:
            group_peer.state_dict()
        else:
            with pytest.raises(ConfigError, match=r"rank 0 has called state_dict\(\), and this rank step\(\)"):
                group_peer.step()

    on_all_ranks(work)


def test_a_model_that_is_moved_after_joining_is_noticed() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = new_model(0)
        group_peer = GroupPeer(model, group, lambda parts: Swarm(model), device=CPU)
        model.double().float()
        with pytest.raises(ConfigError, match="were moved, replaced or removed after it had joined"):
            group_peer.step()

    on_all_ranks(work)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"process_group": 3}, "process_group = 3: must be a group of torch.distributed"),
        ({"optimizer": 3}, "optimizer = 3: must be a torch.optim.Optimizer"),
        ({"initial_peers": "/ip4/1.2.3.4"}, "initial_peers = '/ip4/1.2.3.4': must be a list"),
        ({"host_maddrs": "/ip4/1.2.3.4/tcp/0"}, "host_maddrs = '/ip4/1.2.3.4/tcp/0': must be a list"),
        ({"announce_maddrs": "/ip4/1.2.3.4/tcp/1"}, "announce_maddrs = '/ip4/1.2.3.4/tcp/1': must be a list"),
        ({"sparta": 0.01}, r"sparta = 0.01: must be p2ptrain.Sparta\(fragment_fraction=…\), or left out"),
        ({"sparta": {"codec": "int8"}}, r"sparta = {'codec': 'int8'}: must be p2ptrain.Sparta"),
        ({"diloco": False}, r"diloco = False: must be p2ptrain.DiLoCo\(sync_every=…\), or left out"),
    ],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        p2ptrain.join(nn.Linear(2, 2), **given)


def test_a_model_in_ddp_needs_its_process_group() -> None:
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ConfigError, match="give process_group="):
        p2ptrain.join(wrapped)
