"""Leaving a run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.sinks import Sinks
from p2ptrain.protocol.state_sync.provenance import NO_PINS
from p2ptrain.protocol.wire.transport import no_refusal
from p2ptrain.settings.config import RunConfig


@pytest.mark.parametrize("finished", [True, False])
def test_who_has_landed_the_last_round_stays_for_others_before_it_leaves(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, memory = NetworkThread(), MemoryNetwork()
    network: Any = SimpleNamespace(
        peer_id="a", transport=memory.transport("a"), directory=memory.directory("a"), maddrs=[], failure=None,
        access=SimpleNamespace(refusal=no_refusal), on_event=None,
    )  # fmt: skip
    others = set(threading.enumerate())
    try:
        peer = Peer(
            ModelParts(torch.nn.Linear(4, 4)), RunConfig(run_id="test"), None, network, thread, Sinks([]),
            incarnation="a.1", may_found=True, peer_timeout_s=30.0, gossip_budget=1e6, chosen=frozenset(),
            pins=NO_PINS, closed=None, resume_state=None, tokenizer=b"", on_status=lambda status: None,
        )  # fmt: skip
        [worker] = [t for t in set(threading.enumerate()) - others if t.name == "p2ptrain-worker"]
        node, seen, awaited = peer._runner.node, list[str](), [True, True, False]
        leave = node.leave

        def is_anyone_behind(round_: int) -> bool:
            seen.append("awaited")
            return awaited.pop(0)

        def note_leave(reason: str) -> None:
            seen.append("left")
            leave(reason)

        monkeypatch.setattr(node.engine.context.liveness, "is_anyone_behind", is_anyone_behind)
        monkeypatch.setattr(node, "leave", note_leave)
        peer._exchange.finished = finished
        peer.leave()
        assert seen == (["awaited"] * 3 if finished else []) + ["left"]
        worker.join()
    finally:
        assert thread.stop(10.0)
