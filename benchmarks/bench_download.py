"""A joiner's download of the run's state: on a link of 100 Mbit/s, with an interruption, and far from its donors."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import p2ptrain
from benchmarks.measure import Summary
from benchmarks.namespaces import Machine, Wires, enter, why_not, wires
from benchmarks.processes import WorkerError, Workers
from benchmarks.row import Row
from benchmarks.shapes import gpt2_124m, gpt_25m
from benchmarks.wan import wide_area
from benchmarks.workloads import Pause
from p2ptrain.peer.group_peer import GroupPeer

LINK_MBIT = 100.0
# As `wan.c` takes it: 100 ms from one machine to another and back.
FAR = f"mbit={LINK_MBIT:.0f},ms=25"
MUST_REACH = 0.85
# Longer than the 10 s after which a link without messages is closed.
CUT_S = 15.0
# Anchor and momentum, float32.
STATE_BYTES_PER_PARAMETER = 8
TIMEOUT_S = 400.0
# A donor trains as if a GPU did the work, with so many steps between rounds that none is due during a download.
STEP_S = 0.03
SYNC_EVERY = 2000


@dataclass(frozen=True)
class _Download:
    """One download.

    Attributes:
        seconds: from its start to its end.
        received_bytes: by the joiner's link; 0 if not counted.
        state_bytes: of anchor and momentum.
        slowed: how much longer the donors' median step was during it than before; of the donor that lost most.
    """

    seconds: float
    received_bytes: int
    state_bytes: int
    slowed: float

    @property
    def share(self) -> float:
        """Share of the link's capacity that was used for state."""
        return self.state_bytes * 8 / self.seconds / (LINK_MBIT * 1e6)


def run() -> list[Row]:
    if reason := why_not():
        raise WorkerError(reason)
    return [*_near(), *far_apart()]


def _near() -> list[Row]:
    rows = []
    for name, model in (("25M", gpt_25m), ("124M", gpt2_124m)):
        whole = _measure_near(model, cut=False)
        rows.append(
            Row(
                work=f"state of {name} parameters, {whole.state_bytes / 1e6:.0f} MB, {LINK_MBIT:.0f} Mbit/s, one donor",
                must_reach=f"≥ {MUST_REACH:.0%} of the link's rate",
                measured=f"{whole.share:.1%}, {whole.seconds:.1f} s, {whole.received_bytes / 1e6:.0f} MB on the wire",
                reached=whole.share >= MUST_REACH,
                values={"share": whole.share, "seconds": whole.seconds},
            )
        )
    resumed = _measure_near(gpt_25m, cut=True)
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


def far_apart() -> list[Row]:
    """Downloads from one and from three donors that train meanwhile, a tenth of a second away."""
    rows = []
    for donors in (1, 3):
        with wide_area(*(FAR,) * (donors + 1)) as machines, _peers(gpt_25m, machines, trains=True) as workers:
            far = _measured(workers, donors)
        rows.append(
            Row(
                work=f"… of 25M parameters, 100 ms, {donors} donor{'s' * (donors > 1)} that train",
                must_reach=f"≥ {MUST_REACH:.0%} of the link's rate, donors slowed ≤ 3 %",
                measured=f"{far.share:.1%}, {far.seconds:.1f} s; donors' median step {far.slowed:+.1%}",
                reached=far.share >= MUST_REACH and far.slowed <= 0.03,
                values={"share": far.share, "seconds": far.seconds, "slowed": far.slowed},
            )
        )
    return rows


def _measure_near(model: Callable[[], nn.Module], *, cut: bool) -> _Download:
    with wires() as net:
        machines = [net.machine(mbit=LINK_MBIT) for _ in range(2)]
        with _peers(model, machines, trains=False) as workers:
            return _measured(workers, 1, machines[-1], net if cut else None)


def _peers(model: Callable[[], nn.Module], machines: Sequence[Machine], *, trains: bool) -> Workers:
    """Donors, and a joiner on the last machine."""
    joiner = len(machines) - 1
    return Workers(_peer, [(model, m.pid, m.address, i == joiner, trains) for i, m in enumerate(machines)])


def _measured(workers: Workers, donors: int, joiner: Machine | None = None, cut: Wires | None = None) -> _Download:
    """Let the donors take a round, then the joiner download the state; `cut`: interrupt the joiner's link half-way."""
    workers.tell_one(0, ())
    addresses = workers.hear_from(0, TIMEOUT_S)
    for index in range(1, donors):
        workers.tell_one(index, addresses)
        workers.hear_from(index, TIMEOUT_S)
    for index in range(donors):
        workers.tell_one(index, "take a round")
    for index in range(donors):
        workers.hear_from(index, TIMEOUT_S)
    workers.tell_one(donors, addresses)
    state_bytes = STATE_BYTES_PER_PARAMETER * workers.hear_from(donors, TIMEOUT_S)
    began_s = workers.hear_from(donors, TIMEOUT_S)
    before = joiner.received_bytes() if joiner is not None else 0
    if cut is not None and joiner is not None:
        _cut_half_way(cut, joiner, before + state_bytes // 2)
    ended_s = workers.hear_from(donors, TIMEOUT_S)
    received_bytes = joiner.received_bytes() - before if joiner is not None else 0
    for index in range(donors):
        workers.tell_one(index, (began_s, ended_s))
    slowed = max(workers.hear_from(index, TIMEOUT_S) for index in range(donors))
    return _Download(ended_s - began_s, received_bytes, state_bytes, slowed)


def _cut_half_way(net: Wires, joiner: Machine, at_bytes: int) -> None:
    while joiner.received_bytes() < at_bytes:
        time.sleep(0.05)
    net.cut(joiner)
    time.sleep(CUT_S)
    net.heal(joiner)


def _peer(
    pipe: Connection, build: Callable[[], nn.Module], namespace_pid: int, address: str, joins: bool, trains: bool
) -> None:
    """Run a donor, or the joiner, which reports when its download began and ended."""
    enter(namespace_pid)
    model = build()
    initial_peers = pipe.recv()
    told = False

    def on_status(status: str) -> None:
        nonlocal told
        if joins and status.startswith("downloading") and not told:
            told = True
            pipe.send(time.monotonic())

    if joins:
        pipe.send(sum(parameter.numel() for parameter in model.parameters()))
    with (
        tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory,
        p2ptrain.join(
            model,
            run_id="benchmark",
            initial_peers=initial_peers,
            sparta=p2ptrain.Sparta(fragment_fraction=0.0),
            diloco=p2ptrain.DiLoCo(sync_every=SYNC_EVERY),
            host_maddrs=[f"/ip4/{address}/tcp/0"],
            metrics=Path(directory) / "metrics.jsonl",
            on_status=on_status,
        ) as peer,
    ):
        if joins:
            pipe.send(time.monotonic())
            # Wait until the benchmark closes its end.
            pipe.poll(None)
        else:
            _donate(pipe, model, peer, trains=trains)


def _donate(pipe: Connection, model: nn.Module, peer: p2ptrain.Peer | GroupPeer, *, trains: bool) -> None:
    """Take a round; then train until the benchmark says when the download was, and answer how much it slowed steps."""
    pipe.send(tuple(peer.maddrs))
    pipe.recv()
    _take_a_round(model, peer)
    work = Pause(STEP_S)(model)
    pipe.send("ready")
    ends = [time.monotonic()]
    while not pipe.poll(0 if trains else None):
        work()
        peer.step()
        ends.append(time.monotonic())
    began_s, ended_s = pipe.recv()
    steps = [(end, end - start) for start, end in itertools.pairwise(ends)]
    before = [seconds for end, seconds in steps if end < began_s]
    during = [seconds for end, seconds in steps if began_s <= end < ended_s]
    pipe.send(Summary.of(during).median / Summary.of(before).median - 1 if trains else 0.0)


@torch.no_grad()
def _take_a_round(model: nn.Module, peer: p2ptrain.Peer | GroupPeer) -> None:
    """Complete one round, so that the momentum is not all zeros, which would be sent as nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.001)
    while peer.step().round is None:
        # Once it is due, as slowly as in training: steps during a round count for the next one, which would be due
        # during the download.
        time.sleep(0.001 if peer.run_step < SYNC_EVERY else STEP_S)
