"""A joiner's download of the run's state on a link of 100 Mbit/s, and the same with an interruption of the link."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import p2ptrain
from benchmarks.namespaces import Machine, Wires, enter, why_not, wires
from benchmarks.processes import WorkerError, Workers
from benchmarks.results import Row
from benchmarks.shapes import gpt2_124m, gpt_25m

LINK_MBIT = 100.0
MUST_REACH = 0.85
# Longer than the 10 s after which a link without messages is closed.
CUT_S = 15.0
# Anchor and momentum, float32.
STATE_BYTES_PER_PARAMETER = 8
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class _Download:
    """Seconds from the start of a download to its end, bytes received by the joiner's link, and bytes of the state."""

    seconds: float
    received_bytes: int
    state_bytes: int

    @property
    def share(self) -> float:
        """Share of the link's capacity that was used for state."""
        return self.state_bytes * 8 / self.seconds / (LINK_MBIT * 1e6)


def run() -> list[Row]:
    if reason := why_not():
        raise WorkerError(reason)
    rows = []
    for name, model in (("25M", gpt_25m), ("124M", gpt2_124m)):
        whole = _measure(model, cut=False)
        rows.append(
            Row(
                work=f"state of {name} parameters, {whole.state_bytes / 1e6:.0f} MB, {LINK_MBIT:.0f} Mbit/s, one donor",
                must_reach=f"≥ {MUST_REACH:.0%} of the link's rate",
                measured=f"{whole.share:.1%}, {whole.seconds:.1f} s, {whole.received_bytes / 1e6:.0f} MB on the wire",
                reached=whole.share >= MUST_REACH,
                values={"share": whole.share, "seconds": whole.seconds},
            )
        )
    resumed = _measure(gpt_25m, cut=True)
    excess = resumed.received_bytes / resumed.state_bytes - 1
    rows.append(
        Row(
            work=f"… of 25M parameters, its link cut half-way for {CUT_S:.0f} s",
            must_reach="resumable: ≤ 15 % more bytes than the state",
            measured=f"{excess:.1%} more, {resumed.seconds:.1f} s from start to end",
            reached=excess <= 0.15,
            values={"excess": excess, "seconds": resumed.seconds},
        )
    )
    return rows


def _measure(model: Callable[[], nn.Module], *, cut: bool) -> _Download:
    with wires() as net:
        donor, joiner = net.machine(mbit=LINK_MBIT), net.machine(mbit=LINK_MBIT)
        with Workers(_peer, [(model, donor.pid, donor.address), (model, joiner.pid, joiner.address)]) as workers:
            workers.tell_one(0, ())
            workers.tell_one(1, workers.hear_from(0, TIMEOUT_S))
            state_bytes = STATE_BYTES_PER_PARAMETER * workers.hear_from(1, TIMEOUT_S)
            began_s = workers.hear_from(1, TIMEOUT_S)
            before = joiner.received_bytes()
            if cut:
                _cut_half_way(net, joiner, before + state_bytes // 2)
            ended_s = workers.hear_from(1, TIMEOUT_S)
            return _Download(ended_s - began_s, joiner.received_bytes() - before, state_bytes)


def _cut_half_way(net: Wires, joiner: Machine, at_bytes: int) -> None:
    while joiner.received_bytes() < at_bytes:
        time.sleep(0.05)
    net.cut(joiner)
    time.sleep(CUT_S)
    net.heal(joiner)


def _peer(pipe: Connection, build: Callable[[], nn.Module], namespace_pid: int, address: str) -> None:
    """Run the donor (no initial peers) or the joiner, which reports when its download began and ended."""
    enter(namespace_pid)
    model = build()
    initial_peers = pipe.recv()
    told = False

    def on_status(status: str) -> None:
        nonlocal told
        if status.startswith("downloading") and not told:
            told = True
            pipe.send(time.monotonic())

    if initial_peers:
        pipe.send(sum(parameter.numel() for parameter in model.parameters()))
    with (
        tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory,
        p2ptrain.join(
            model,
            run_id="benchmark",
            initial_peers=initial_peers,
            sparta=p2ptrain.Sparta(fragment_fraction=0.0),
            diloco=p2ptrain.DiLoCo(sync_every=10),
            host_maddrs=[f"/ip4/{address}/tcp/0"],
            metrics=Path(directory) / "metrics.jsonl",
            on_status=on_status,
        ) as peer,
    ):
        pipe.send(time.monotonic() if initial_peers else _take_a_round(model, peer))
        # Wait until the benchmark closes its end.
        pipe.poll(None)


@torch.no_grad()
def _take_a_round(model: nn.Module, peer: p2ptrain.Peer) -> tuple[str, ...]:
    """Complete one round, so that the momentum is not all zeros, which would be sent as nothing. Returns addresses."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.001)
    while peer.step().round is None:
        time.sleep(0.05)
    return tuple(peer.maddrs)
