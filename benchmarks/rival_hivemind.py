"""Rival: hivemind's `DecentralizedAverager`, in fp16 (its 8-bit codecs do not work on current numpy).

Every peer is a process with its own DHT and libp2p daemon. All of them start a round at the same time. Its duration is
the time until the last peer returns, including matchmaking. It is valid only if every value on every peer is the mean.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.measure import cpu_s
from benchmarks.namespaces import Machine, enter
from benchmarks.processes import Workers
from benchmarks.shapes import gpt_25m

if TYPE_CHECKING:
    from hivemind.averaging import DecentralizedAverager

ROUND_TIMEOUT_S = 60.0
# The values of two peers differ by this, so the mean of three of four peers is off by at least 0.017; the error of fp16
# is below 0.001.
_OFFSET = 0.1
_TOLERANCE = 0.002


@dataclass(frozen=True)
class HivemindRounds:
    """Measurements of several rounds.

    Attributes:
        seconds: duration of each round in which all peers got the mean, from the common start to the last return.
        cpu_s: CPU seconds of all processes together, for each such round.
        failed: number of rounds in which a peer did not get the mean.
    """

    seconds: list[float]
    cpu_s: list[float]
    failed: int


def measure(
    *, state_sharing: bool, peers: int = 4, rounds: int = 5, machines: Sequence[Machine] = (),
    round_timeout_s: float = ROUND_TIMEOUT_S,
) -> HivemindRounds:  # fmt: skip
    """Average 25M fp32 parameters over `peers` processes, after one warm-up round.

    Args:
        state_sharing: hivemind's default is True, so that other peers can download a peer's state. Its announcements in
            the DHT delay matchmaking: without it rounds take half as long.
        peers: number of processes, and the target group size.
        rounds: number of measured rounds.
        machines: where each peer runs; empty: all on this machine.
        round_timeout_s: a round that takes longer has failed.

    Raises:
        WorkerError: a process failed or was too slow.
    """
    seconds, cpu, failed = [], [], 0
    with (
        tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory,
        Workers(
            _peer,
            [
                (index, peers, state_sharing, directory, machines[index] if machines else None, round_timeout_s)
                for index in range(peers)
            ],
        ) as swarm,
    ):
        swarm.tell_one(0, [])
        first_address = swarm.hear_from(0, timeout_s=60.0)
        for index in range(1, peers):
            swarm.tell_one(index, first_address)
        swarm.hear(timeout_s=90.0)
        for number in range(rounds + 1):
            swarm.tell("prepare")
            swarm.hear(timeout_s=ROUND_TIMEOUT_S)
            cpu_before_s = cpu_s(swarm.pids)
            swarm.tell("round")
            took_s = swarm.hear(timeout_s=round_timeout_s + ROUND_TIMEOUT_S)
            cpu_round_s = cpu_s(swarm.pids) - cpu_before_s
            swarm.tell("check")
            averaged = all(swarm.hear(timeout_s=ROUND_TIMEOUT_S))
            if number == 0:
                continue
            if averaged:
                seconds.append(max(took_s))
                cpu.append(cpu_round_s)
            else:
                failed += 1
        swarm.tell("stop")
        swarm.hear(timeout_s=30.0)
    return HivemindRounds(seconds, cpu, failed)


def _peer(
    pipe: Connection, index: int, peers: int, state_sharing: bool, directory: str, machine: Machine | None,
    round_timeout_s: float,
) -> None:  # fmt: skip
    if machine is not None:
        enter(machine.pid)
    os.environ["HIVEMIND_LOGLEVEL"] = "CRITICAL"  # hivemind logs its own shutdown as errors
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression
    from hivemind.p2p import P2P

    P2P._UNIX_SOCKET_PREFIX = f"/unix{directory}/"  # hivemind does not remove its sockets
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes cannot be spawned
    initial_peers = pipe.recv()
    address = machine.address if machine is not None else "127.0.0.1"
    dht = hivemind.DHT(
        initial_peers, start=True, startup_timeout=60.0, shutdown_timeout=15.0, host_maddrs=[f"/ip4/{address}/tcp/0"]
    )
    if not initial_peers:
        pipe.send([str(maddr) for maddr in dht.get_visible_maddrs()])
    model = gpt_25m()
    averager = DecentralizedAverager(
        [parameter.detach().clone() for parameter in model.parameters()],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=peers,
        compression=Float16Compression(),
        allow_state_sharing=state_sharing,
        allreduce_timeout=round_timeout_s,
    )
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        if order == "prepare":
            pipe.send(_prepare(averager, model, offset=_OFFSET * (index - (peers - 1) / 2)))
        elif order == "round":
            pipe.send(_average(averager, round_timeout_s))
        else:
            pipe.send(_holds(averager, model))
    averager.shutdown()
    dht.shutdown()
    pipe.send("stopped")


@torch.no_grad()
def _prepare(averager: DecentralizedAverager, mean: nn.Module, offset: float) -> None:
    """Set this peer's values to `mean` + `offset`."""
    with averager.get_tensors() as tensors:
        for tensor, expected in zip(tensors, mean.parameters(), strict=True):
            tensor.copy_(expected + offset)


def _average(averager: DecentralizedAverager, timeout_s: float) -> float:
    """Take part in a round. Returns its seconds on this peer, also if it failed."""
    started = time.perf_counter()
    control = averager.step(timeout=timeout_s, wait=False)
    try:
        control.result(timeout=timeout_s)
    except Exception:  # hivemind raises its own, asyncio's and concurrent.futures' errors: all mean "no round"
        control.cancel()
    return time.perf_counter() - started


@torch.no_grad()
def _holds(averager: DecentralizedAverager, mean: nn.Module) -> bool:
    """Whether this peer's values are the mean."""
    with averager.get_tensors() as tensors:
        return all(
            float((tensor - expected).abs().max()) < _TOLERANCE
            for tensor, expected in zip(tensors, mean.parameters(), strict=True)
        )
