"""Bytes on the peers' TCP connections, counted by the kernel, beside the computed sizes of fragments and rounds."""

from __future__ import annotations

import time

from benchmarks.measure import TrafficMeter
from benchmarks.processes import WorkerError
from benchmarks.row import Row
from benchmarks.shapes import gpt_25m
from benchmarks.swarm import Phase, Setup, Swarm
from benchmarks.workloads import Pause

FRACTION = 0.005
# One byte per value, and two bytes of scale per 64 values.
INT8_BYTES = 1 + 2 / 64
FP32_BYTES = 4
TOLERANCE = 0.08


def run() -> list[Row]:
    return [_fragments(), *_round(peers=4)]


def _fragments() -> Row:
    numel = gpt_25m().numel
    with Swarm(Setup(gpt_25m, Pause(0.1), FRACTION), peers=2) as swarm:
        swarm.warm_up()
        meter = TrafficMeter(swarm.pids)
        peers = swarm.run(Phase(steps=200))
        time.sleep(1.0)  # for the fragments still in flight
        sent = meter.since_start().sent
    pushes = sum(step.report.sent for steps in peers for step in steps if step.report)
    computed = FRACTION * numel * INT8_BYTES
    return _row(
        f"a fragment, 25M, p = {100 * FRACTION:g} %, int8 (mean of {pushes}; heartbeats and DHT included)",
        "p·N·(1 + 2/64)",
        sent / pushes,
        computed,
    )


def _round(peers: int) -> list[Row]:
    numel = gpt_25m().numel
    with Swarm(Setup(gpt_25m, Pause(0.02), sync_every=100), peers) as swarm:
        for _ in range(5):
            swarm.drift()
            meter = TrafficMeter(swarm.pids)
            if swarm.round() is not None:
                break
        else:
            raise WorkerError("no round was committed by all peers")
        time.sleep(1.0)
        sent = meter.since_start().sent / peers
    # Each peer averages one part: it sends its values of the other parts, and the mean of its part to the other peers.
    values = 2 * numel * (peers - 1) / peers
    row = _row(f"a round, 25M, int8, {peers} peers: sent by one", "2N·(k-1)/k·(1 + 2/64)", sent, values * INT8_BYTES)
    share = sent / (values * FP32_BYTES)
    return [
        row,
        Row(
            work="… beside the same in fp32",
            must_reach="≤ 27 %",
            measured=f"{100 * share:.1f} %",
            reached=share <= 0.27,
            values={"share_of_fp32": share},
        ),
    ]


def _row(work: str, formula: str, measured: float, computed: float) -> Row:
    return Row(
        work=work,
        must_reach=f"within {100 * TOLERANCE:g} % of {formula} = {computed:,.0f} bytes",
        measured=f"{measured:,.0f} bytes, {100 * (measured / computed - 1):+.1f} %",
        reached=abs(measured / computed - 1) <= TOLERANCE,
        values={"bytes": measured, "computed_bytes": computed},
    )
