"""Two peers of one run, in this process and over a memory network."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import JoinOptions, Peer
from p2ptrain.peer.sinks import Sink, Sinks
from p2ptrain.protocol.node.config import LocalPolicy, RunSpec
from p2ptrain.protocol.wire.transport import no_refusal
from p2ptrain.settings.config import RunConfig

RUN = RunConfig(run_id="pair", sync_every=3, fragment_fraction=0.1)
# Its last round gives both peers the same weights.
WITH_END = dataclasses.replace(RUN, total_steps=24, sync_every=8)
DEADLINE_S = 60.0


def memory_peer(
    parts: ModelParts,
    run: RunConfig,
    name: str,
    memory: MemoryNetwork,
    thread: NetworkThread,
    *,
    may_found: bool,
    records: Sink | None = None,
    resume_state: dict[str, Any] | None = None,
) -> Peer:
    """A peer on the memory network."""
    network: Any = SimpleNamespace(
        peer_id=name, transport=memory.transport(name), directory=memory.directory(name), maddrs=[], failure=None,
        access=SimpleNamespace(refusal=no_refusal), recording=lambda write: nullcontext(), bulk=None,
    )  # fmt: skip
    return Peer(
        parts,
        RunSpec(run),
        network,
        LocalPolicy(),
        thread=thread,
        optimizer=None,
        records=records or Sinks([]),
        joining=JoinOptions(may_found, worker_threads=2, resume_state=resume_state),
    )


class Pair:
    """A context manager: the founder has joined when it begins, and `join` adds the other peer."""

    def __init__(self, model: nn.Module, *, run: RunConfig = RUN) -> None:
        self._memory, self._run, self._stack = MemoryNetwork(), run, ExitStack()
        self.thread = NetworkThread()
        self._stack.callback(self.thread.stop, 10.0)
        self.peers: list[Peer] = []
        self.join(model)

    def join(self, model: nn.Module) -> Peer:
        """Add a peer with this model; the first one founds the run."""
        name = "ab"[len(self.peers)]
        try:
            peer = memory_peer(ModelParts(model), self._run, name, self._memory, self.thread, may_found=not self.peers)
        except BaseException:
            if not self.peers:
                self._stack.close()
            raise
        self.peers.append(self._stack.enter_context(peer))
        return peer

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def finish(self, *train: Callable[[], object]) -> None:
        """Step each until the last round of a run that has a length has landed there. `train`: an optimizer step."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(peer.finished for peer in self.peers):
            assert time.monotonic() < deadline, [(peer.status, peer.run_step) for peer in self.peers]
            for peer, step in zip(self.peers, train, strict=True):
                if not peer.finished:
                    step()
                    peer.step(samples=1)

    def train(self, train: Callable[[], object], *, rounds: int = 2) -> list[tuple[str, str]]:
        """Step both until so many rounds of both have landed at both, and return their two anchor hashes of each.

        Args:
            train: takes one optimizer step of each.
        """
        deadline = time.monotonic() + DEADLINE_S
        landed: list[dict[int, str]] = [{} for _ in self.peers]
        while len(common := landed[0].keys() & landed[1].keys()) < rounds:
            assert time.monotonic() < deadline, [(peer.status, peer.round) for peer in self.peers]
            train()
            for peer, hashes in zip(self.peers, landed, strict=True):
                report = peer.step(samples=1).round
                if report is not None and len(report.contributors) == len(self.peers):
                    hashes[report.round] = report.anchor_hash
        return [(landed[0][number], landed[1][number]) for number in sorted(common)]


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether the parameters of two models are the same, bit for bit."""
    return all(map(torch.equal, one.parameters(), other.parameters()))
