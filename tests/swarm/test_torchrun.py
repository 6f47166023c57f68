"""One peer in two processes that torchrun starts."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from p2ptrain.training import checkpoint
from tests.swarm.processes import Process, Swarm, assert_anchors_agree

TORCHRUN = "torchrun --standalone --nproc-per-node 2"


def test_two_ranks_train_as_one_process_would(swarm: Swarm, tmp_path: Path) -> None:
    ranks = swarm.start(f"{TORCHRUN} {Path(__file__).parent / 'two_ranks.py'} {tmp_path / 'checkpoints'}")
    assert ranks.wait() == 0, swarm.report()
    assert len(ranks.output.splitlines()) == 8, swarm.report()


def test_a_peer_of_two_processes_survives_the_loss_of_one_and_ends_as_one(swarm: Swarm) -> None:
    peer = swarm.start(
        f"{TORCHRUN} --max-restarts 1 -m p2ptrain join --steps 0 --sync-every 10 --batch-tokens 512 --eval-every 10 "
        f"--sample-every 10 --checkpoint-minutes 0.01 --lr 0.001"
    )
    out = peer.directory / "p2ptrain-p2ptrain"
    swarm.until(lambda: peer.rounds() and checkpoint.checkpoints(out))
    process_of(peer, rank=1).kill()
    lost_at = len(peer.events("step"))
    swarm.until(lambda: len(peer.events("start")) == 2 and len(peer.events("step")) > lost_at + 10)
    process_of(peer, rank=1).terminate()
    assert peer.wait() == 0, swarm.report()

    assert re.search(r"error: rank 1 \(process \d+\) of the 2 processes of this peer has ended; unless", peer.errors)
    lines = peer.output.splitlines()
    assert sum(line.startswith("started run") for line in lines) == 1, swarm.report()
    assert sum(line.startswith("continuing run") for line in lines) == 1
    (last,) = [line for line in lines if line.startswith("interrupted at step")]
    assert f"interrupted at step {peer.events('step')[-1]['step']}, saved" in last
    assert {event["tokens"] for event in peer.events("step")} == {512}
    assert peer.events("stop")[-1]["reason"] == "interrupted"


@pytest.mark.long
def test_a_peer_that_shards_its_model_trains_with_one_that_does_not(swarm: Swarm) -> None:
    sharded = swarm.start(f"{TORCHRUN} -m p2ptrain join --fsdp on --steps 0 --sync-every 50 --eval-every 100")
    whole = swarm.start(swarm.until(lambda: sharded.join_line))
    swarm.until(lambda: sharded.rounds(by=2) and whole.rounds(by=2))
    process_of(sharded, rank=1).terminate()
    whole.terminate()
    assert [sharded.wait(), whole.wait()] == [0, 0], swarm.report()
    assert_anchors_agree(sharded, whole)
    for peer in (sharded, whole):
        newest = checkpoint.checkpoints(peer.directory / "p2ptrain-p2ptrain")[-1]
        assert all(len(tensor) for tensor in checkpoint.load(newest).state["model"].values())


def process_of(peer: Process, *, rank: int) -> psutil.Process:
    (found,) = (child for child in psutil.Process(peer.pid).children() if child.environ().get("RANK") == str(rank))
    return found
