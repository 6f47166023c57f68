"""A peer that continues from a checkpoint: its rounds are due, and land, where they would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import trio

from tests.protocol.state_sync.test_provenance import checkpoint_of
from tests.protocol.swarm import RUN, TestPeer, run_virtual, swarm

PLAIN = replace(RUN, sync_every=5)
# So long that a round lands within the step after the one at which it is due.
STEP_S = 4.0


async def _train(peer: TestPeer, until: int) -> None:
    """Steps without randomness to this step of the run. Rounds come in between."""
    peer.paused = True
    while not peer.node.ready.is_set():
        await trio.sleep(0.1)
    while peer.exchange.run_step < until:
        for number, tensor in enumerate(peer.tensors):
            tensor.mul_(0.99).add_(1e-3 * (number + peer.exchange.run_step % 7))
        peer.exchange.step(16)
        await trio.sleep(STEP_S)


def _trained(stops: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Weights of a lone peer after 14 steps, if it was restarted at these, and the number of its rounds."""
    weights, rounds = torch.empty(0), 0

    async def main() -> None:
        nonlocal weights, rounds
        async with swarm(PLAIN) as members:
            peer = members.start("a", founder=True, step_s=0.1)
            for stop in stops:
                await _train(peer, stop)
                saved, kept = checkpoint_of(members, "a"), [tensor.clone() for tensor in peer.tensors]
                rounds += len(peer.rounds())
                members.kill("a")
                peer = members.start("a", founder=True, step_s=0.1, restored=saved)
                for tensor, weights in zip(peer.tensors, kept, strict=True):
                    tensor.copy_(weights)
            await _train(peer, 14)
            rounds += len(peer.rounds())
            weights = peer.flat()

    run_virtual(main)
    return weights, rounds


@pytest.mark.parametrize("stops", [[3], [4, 7, 9]])
def test_a_lone_peer_that_is_restarted_trains_as_if_it_were_not(stops: list[int]) -> None:
    weights, rounds = _trained([])
    assert rounds == 2
    again, its_rounds = _trained(stops)
    assert its_rounds == rounds
    assert torch.equal(again, weights)


def test_a_round_that_was_due_is_due_at_once_after_a_restart() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as members:
            peer = members.start("a", founder=True, step_s=0.1)
            await _train(peer, 4)
            saved = checkpoint_of(members, "a")
            members.kill("a")
            for run_step, due in ((4, False), (5, True), (7, True), (15, True)):
                again = members.start("a", founder=True, restored=replace(saved, run_step=run_step))
                await _train(again, 0)
                assert (again.exchange.run_step, again.exchange.due) == (run_step, due)
                members.kill("a")

    run_virtual(main)
