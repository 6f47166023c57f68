"""The records of six rounds of four peers are the same as in a fixture, so that changes to the protocol show.

Two swarms, on the memory network and virtual time. Without gossip every bit is known: weights come from whole numbers
and are changed by single, separately rounded operations, so that hashes are the same on every processor. With gossip
torch mixes fragments, whose last bits differ by processor; of that swarm the fixture holds who sent how many to whom.

Reducers are left out: they depend on measured rates, and so on the size of every message.

Run as a program, this file prints the fixture anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio

from p2ptrain.protocol.exchange.types import RoundReport
from p2ptrain.protocol.wire.messages import Head
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import RUN, TestPeer, run_virtual, swarm

FIXTURE = Path(__file__).with_name("golden_rounds.json")
# Three speeds: intervals, weights and the order of arrivals differ.
STEPS_S = {"a": 0.1, "b": 0.1, "c": 0.15, "d": 0.2}
ROUNDS = 6
QUIET = dataclasses.replace(RUN, fragment_fraction=0.0)
CHANGES = 7


def whole_numbers(shape: torch.Size, seed: int) -> torch.Tensor:
    """Multiples of 2⁻¹⁰ between -1 and 1, from integer arithmetic alone."""
    words = np.arange(shape.numel(), dtype=np.uint64) + np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = ((words >> np.uint64(40)) % np.uint64(2049)).astype(np.float32) - 1024
    return torch.from_numpy(values / 1024).view(shape)


async def train(peer: TestPeer, seed: int) -> None:
    """As TestPeer trains, with the same bits on every processor."""
    while not peer.node.ready.is_set():
        peer.exchange.idle()
        await trio.sleep(0.05)
    changes = [
        [whole_numbers(tensor.shape, 1000 * (seed + 1) + 10 * i + j) / 64 for j, tensor in enumerate(peer.tensors)]
        for i in range(CHANGES)
    ]
    while True:
        await trio.sleep(peer.step_s)
        for tensor, change in zip(peer.tensors, changes[peer.exchange.steps % CHANGES], strict=True):
            tensor.mul_(0.9375).add_(change)
        peer.reports.append(peer.exchange.step(16))


def play(run: RunConfig, threads: int = 1) -> dict[str, Any]:
    """What four peers decided in six rounds, by round, and what each sent meanwhile."""
    heads: dict[int, Head] = {}
    hashes: dict[int, set[tuple[str, str]]] = {}
    told: dict[str, Any] = {}

    def watch(peer: TestPeer) -> None:
        ended = peer.node.round_ended

        def round_ended(report: RoundReport) -> None:
            head = peer.node.driver.head
            heads.setdefault(head.round, head)
            hashes.setdefault(report.round, set()).add((report.anchor_hash, report.state_hash))
            ended(report)

        peer.node.round_ended = round_ended  # type: ignore[method-assign]

    async def main() -> None:
        async with swarm(run) as s:
            s.network.offers_bulk = False  # the fixture is older, and its times are those of streams
            s.worker.threads = threads
            for i, (name, step_s) in enumerate(STEPS_S.items()):
                peer = s.start(name, founder=i == 0, step_s=step_s)
                for j, tensor in enumerate(peer.tensors):
                    tensor.copy_(whole_numbers(tensor.shape, 10 * i + j) / 8)
                peer.train = functools.partial(train, peer, i)  # type: ignore[method-assign]
                watch(peer)
            await s.until(lambda: all(len(p.rounds()) >= ROUNDS for p in s.peers.values()))
            told["fragments"] = {name: _fragments(peer) for name, peer in sorted(s.peers.items())}

    run_virtual(main)
    # Who joined late begins with a later round: those that all have seen.
    told["rounds"] = [_decided(heads[round_], hashes[round_], run) for round_ in sorted(heads)[:ROUNDS]]
    return told


def _fragments(peer: TestPeer) -> dict[str, Any]:
    """What a peer sent and merged until it had landed its sixth round."""
    until_s = peer.rounds()[ROUNDS - 1]["t"]
    events = [e for e in peer.events if e["event"] == "fragments" and e["t"] < until_s]
    to: Counter[str] = Counter()
    for event in events:
        to.update(event["to"])
    totals = {key: sum(event[key] for event in events) for key in ("sent", "merged", "bytes_sent", "bytes_received")}
    return {**totals, "to": dict(sorted(to.items()))}


def _decided(head: Head, hashes: set[tuple[str, str]], run: RunConfig) -> dict[str, Any]:
    record = head.record
    assert record is not None
    assert len(hashes) == 1
    total = sum(c.weight for c in record.contributors)
    decided: dict[str, Any] = {
        "round": record.round,
        "contributors": [[c.peer_id, round(1000 * c.weight / total)] for c in record.contributors],
        "parts": [[part.start, part.stop] for part in record.parts],
        "step": [record.outer_optimizer, record.outer_lr, record.outer_momentum, record.run_step],
        "tokens_total": record.tokens_total,
        "intervals": [list(pair) for pair in record.intervals],
    }
    if run is QUIET:
        decided["means"] = [part.digest[:16] for part in record.parts]
        decided["anchor"], decided["state"] = head.anchor_hash, head.state_hash
        decided["cosine"] = round(record.cosine, 4)
    return decided


def golden() -> dict[str, Any]:
    return {"without gossip": play(QUIET), "with gossip": play(RUN)}


def test_six_rounds_of_four_peers_are_those_of_the_fixture() -> None:
    assert golden() == json.loads(FIXTURE.read_text())


def test_rounds_are_the_same_when_their_work_is_divided_among_threads() -> None:
    assert play(QUIET, threads=4) == json.loads(FIXTURE.read_text())["without gossip"]


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
