"""Rounds of two peers with large models on one machine, and the share of them in which a bare TLS connection is done.

Each peer sends half of its encoded outer gradient and the mean of the other half, so both directions carry one encoded
model.
"""

from __future__ import annotations

import multiprocessing
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from benchmarks.bench_round import measure
from benchmarks.measure import Summary, milliseconds
from benchmarks.row import Row
from benchmarks.shapes import gpt_100m, gpt_350m
from benchmarks.swarm import Setup
from benchmarks.workloads import Pause
from p2ptrain.network.bulk import make_certificate

ROUNDS = 2
STEP_S = 0.05
# Longer than a round takes, and its window of a tenth longer than the snapshot.
SYNC_EVERY = 240
# Parameters, and how many seconds a round may take.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, float | None]] = {
    "100M": (gpt_100m, 101_001_216, None),
    "350M": (gpt_350m, 354_823_168, 5.0),
}
CHUNK_BYTES = 264 * 1024
TLS_BYTES = 500_000_000


def run() -> list[Row]:
    tls_bytes_s = tls_rate()
    rows = []
    for name, (model, parameters, limit_s) in MODELS.items():
        setup = Setup(model, Pause(STEP_S), sync_every=SYNC_EVERY, round_steps=2000, prepare_s=120.0)
        rounds = measure(setup, 2, ROUNDS)
        wall, longest, cpu = (Summary.of(taken) for taken in (rounds.wall_s, rounds.longest_s, rounds.cpu_s))
        sent = parameters * 66 / 64
        share = sent / wall.median / tls_bytes_s
        rows.append(
            Row(
                work=f"a round, {name} parameters, int8, 2 peers: due to landed, slowest peer",
                must_reach="" if limit_s is None else f"≤ {limit_s:g} s",
                measured=f"{wall.median:.2f} s median, {wall.maximum:.2f} s worst of {wall.count}; "
                f"{cpu.median:.2f} s of CPU; {rounds.failed} failed",
                reached=None if limit_s is None else wall.median <= limit_s,
                rival=f"its bytes alone over one TLS connection: {sent / tls_bytes_s:.2f} s each way ({share:.0%})",
                values={"wall_s": wall.median, "cpu_s": cpu.median, "tls_bytes_s": tls_bytes_s},
            )
        )
        rows.append(
            Row(
                work="… training thread held longer than usual in one step, most held peer",
                must_reach="≤ 50 ms",
                measured=f"{milliseconds(longest.median)} median, {milliseconds(longest.maximum)} worst",
                reached=longest.median <= 0.05,
                values={"longest_s": longest.median},
            )
        )
    return rows


def tls_rate() -> float:
    """Bytes per second of one TLS 1.3 connection between two processes, with Python's `ssl` and blocking sockets."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as server:
        pem = Path(directory) / "key.pem"
        pem.write_bytes(make_certificate("benchmark")[1])
        sender = multiprocessing.get_context("spawn").Process(target=_send, args=(server.getsockname(), str(pem)))
        sender.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        with context.wrap_socket(server.accept()[0], server_side=True) as connection:
            buffer, received = bytearray(CHUNK_BYTES), 0
            began_s = time.perf_counter()
            while size := connection.recv_into(buffer):
                received += size
            took_s = time.perf_counter() - began_s
        sender.join()
    return received / took_s


def _send(address: tuple[str, int], pem: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(pem)
    with context.wrap_socket(socket.create_connection(address)) as connection:
        for _ in range(TLS_BYTES // CHUNK_BYTES):
            connection.sendall(bytes(CHUNK_BYTES))
