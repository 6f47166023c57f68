"""Settling a process group: it waits until the group's threads have released every tensor."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
import torch.distributed as dist

from p2ptrain.peer.process_group import ProcessGroup


class Group:
    """A process group of one, whose thread is late: it holds its tensors until `let_go`."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self.let_go = threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[torch.Tensor]) -> Group:
        return self.broadcast(tensors[0], 0)

    def broadcast(self, tensor: torch.Tensor, _root: int) -> Group:
        self.held.append(tensor)
        return self

    def wait(self) -> None:
        """The collective is done at once, but the thread still holds its tensor."""

    def run(self) -> None:
        self.let_go.wait()
        self.held.clear()


def test_settled_is_when_the_group_holds_no_tensor_any_more(monkeypatch: Any) -> None:
    monkeypatch.setattr("p2ptrain.peer.process_group.SETTLE_TIMEOUT_S", 60.0)
    group: Any = Group()
    ranks = ProcessGroup(cast(dist.ProcessGroup, group), torch.device("cpu"))
    weights = torch.ones(3)
    ranks.copy(weights)
    assert ranks.total(1.5) == [1.5]
    assert ranks.tell({"a": 1}) == {"a": 1}
    thread = threading.Thread(target=group.run)
    thread.start()
    threading.Timer(0.2, group.let_go.set).start()
    ranks.settle()
    assert group.held == []
    thread.join()
    assert weights.tolist() == [1, 1, 1]


def test_a_thread_that_never_lets_go_is_not_waited_for_without_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("p2ptrain.peer.process_group.SETTLE_TIMEOUT_S", 0.05)
    group: Any = Group()
    ranks = ProcessGroup(cast(dist.ProcessGroup, group), torch.device("cpu"))
    ranks.copy(torch.ones(3))
    ranks.settle()
    assert len(group.held) == 1
