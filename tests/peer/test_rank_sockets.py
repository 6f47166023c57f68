"""Sockets between ranks, which are threads here: who is let in, and what happens when a rank does not take part."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from p2ptrain.errors import PeerLostError
from p2ptrain.peer import process_group, rank_sockets
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.rank_sockets import RankSockets, open_sockets
from tests.peer.ranks import on_all_ranks

CPU = torch.device("cpu")
SIZE = 3


class Told:
    """What `open_sockets` asks of a group, for ranks that are threads. `port`: instead of that of rank 0."""

    def __init__(self, port: int | None = None) -> None:
        self.barrier = threading.Barrier(SIZE)
        self.port, self.data, self.flags = port, b"", [True] * SIZE

    def tell(self, data: bytes) -> bytes:
        if data:
            self.data = data if self.port is None else self.port.to_bytes(2, "big") + data[2:]
        self.barrier.wait()
        return self.data

    def all_true(self, rank: int, flag: bool) -> bool:
        self.flags[rank] = flag
        self.barrier.wait()
        agreed = all(self.flags)
        self.barrier.wait()
        return agreed


def opened(told: Told, timeout_s: float = 60) -> list[RankSockets | None]:
    def run(rank: int) -> RankSockets | None:
        return open_sockets(rank, SIZE, timeout_s, told.tell, lambda flag: told.all_true(rank, flag))

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def test_rank_0_hears_the_others_in_order_and_all_hear_rank_0() -> None:
    first, *others = opened(Told())
    assert first is not None
    for rank, other in reversed([*enumerate(others, start=1)]):
        assert other is not None
        other.send(bytes([rank]))
    assert first.collect(b"own") == [b"own", b"\1", b"\2"]
    first.send(b"report")
    assert [other.receive() for other in others if other] == [b"report"] * 2


def test_a_rank_that_says_nothing_is_given_up_and_one_that_has_closed_is_noticed() -> None:
    first, silent, closed = opened(Told())
    assert first is not None
    first._timeout_s = 0.05
    assert silent is not None
    assert closed is not None
    with pytest.raises(BlockingIOError):
        first.collect(b"")
    silent.send(b"")
    closed.close()
    with pytest.raises((EOFError, ConnectionError)):
        first.collect(b"")


def test_a_rank_that_says_nothing_is_given_up_although_signals_come() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    first, *_ = opened(Told())
    assert first is not None
    first._timeout_s = 0.5
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(BlockingIOError):
            first.collect(b"")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_one_that_has_closed_is_noticed_although_its_workers_have_copies_of_the_socket() -> None:
    first, closed, _ = opened(Told(), timeout_s=60)
    assert first is not None
    assert closed is not None
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    try:
        closed.close()
        with pytest.raises((EOFError, ConnectionError)):
            first.collect(b"")
    finally:
        worker.kill()
        worker.join()


def test_a_program_that_does_not_know_the_token_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def intrude(port: int, token: bytes, rank: int, limit_s: float) -> socket.socket | None:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(bytes(len(token)) + rank.to_bytes(8, "little"))
        return connect(port, token, rank, limit_s)

    connect = rank_sockets._connect
    monkeypatch.setattr(rank_sockets, "_connect", intrude)
    first, *others = opened(Told())
    assert first is not None
    for other in others:
        assert other is not None
        other.send(b"!")
    assert first.collect(b"") == [b"", b"!", b"!"]


def test_ranks_of_several_machines_have_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "OPEN_TIMEOUT_S", 0.1)
    with socket.socket() as unused, socket.socket() as another_program:
        unused.bind(("127.0.0.1", 0))  # refuses, as nobody listens
        another_program.bind(("127.0.0.1", 0))
        another_program.listen()
        for port in (unused.getsockname()[1], another_program.getsockname()[1]):
            assert opened(Told(port)) == [None] * SIZE


@pytest.mark.parametrize("has_sockets", [True, False])
def test_a_group_says_the_same_with_sockets_and_without(has_sockets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_sockets:
        monkeypatch.setattr(process_group, "open_sockets", lambda *_: None)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        ranks = ProcessGroup(group, CPU)
        assert (ranks._sockets is not None) == has_sockets
        assert ranks.total(rank, 0.5) == [3.0, 1.5]
        assert ranks.total_on_0(rank, 0.5) == ([] if rank else [3.0, 1.5])
        assert ranks.tell({"of": rank, "long": "x" * 100_000}) == {"of": 0, "long": "x" * 100_000}
        assert ranks.tell_bytes(b"" if rank == 0 else b"ignored") == b""
        large = bytes(2 * rank_sockets.MOST_BYTES)
        assert ranks.tell_bytes(b"ignored" if rank else large) == large
        for shape in [(), (0, 3), (5, 7), (300, 400)]:
            tensor = torch.full(shape, float(rank + 1), dtype=torch.bfloat16)
            ranks.copy(tensor)
            assert tensor.eq(1).all()

    on_all_ranks(work)


def test_tensors_are_copied_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TOGETHER_BYTES", 400)
    copied: list[list[int]] = []

    def values(seed: int) -> list[torch.Tensor]:
        random = np.random.default_rng(seed)
        tensors = [torch.from_numpy(random.random(size)) for size in (3, 0, 4, 100, 5)]
        return [*tensors, torch.from_numpy(random.random((6, 2))).t(), torch.ones(()) * seed, tensors[0].bfloat16()]

    class Noting(ProcessGroup):
        def copy(self, tensor: torch.Tensor) -> None:
            copied[self.rank].append(tensor.nbytes)
            super().copy(tensor)

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensors = values(rank)
        ranks = Noting(group, CPU)
        copied[rank].clear()  # what connected them
        ranks.copy_together(tensors)
        return tensors

    copied += [[] for _ in range(SIZE)]
    for tensors in on_all_ranks(work):
        assert all(map(torch.equal, tensors, values(0)))
    assert copied == [[56, 800, 40 + 96 + 4 + 6]] * SIZE


def test_a_rank_that_closes_is_lost_for_the_others() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        ranks = ProcessGroup(group, CPU)
        if rank == 1:
            ranks.close()
            return
        with pytest.raises(PeerLostError, match="has lost another process of its group"):
            ranks.total(1.0)
        ranks.close()  # so that rank 2 hears of it

    on_all_ranks(work)
