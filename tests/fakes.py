"""Stand-ins for a peer and a session: their contract without a network."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import ConfigError, UnreachableError
from p2ptrain.network.lan import Announcement
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.sinks import Sink
from p2ptrain.protocol.links.limits import Struck
from p2ptrain.protocol.state_sync.provenance import Pins
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig

MADDR = "/ip4/192.168.7.7/tcp/4001/p2p/QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/QmFake"


@contextmanager
def full_disk() -> Iterator[None]:
    """In this block no file can grow; writing one fails with "File too large"."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@dataclass(frozen=True)
class FakeReport:
    sent: int = 2
    merged: int = 1
    skipped: Mapping[str, int] = field(default_factory=lambda: {"stale": 1})


class FakePeer:
    """Counts steps, records what it is told, and exchanges nothing."""

    peer_id = "QmFake"
    run_founder = ""
    maddrs = (MADDR, LOOPBACK)
    alive = ("QmOther",)
    alive_maddrs = ("/ip4/192.168.7.8/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",)
    data_seed = 7
    failure: Exception | None = None
    anchor_hash = "00" * 32

    def __init__(self, run: RunConfig, resume_state: Mapping[str, Any] | None = None, *, founded: bool = True) -> None:
        self.run = run
        self.founded = founded
        self.run_step = int(resume_state["step"]) if resume_state else 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.losses: list[float | None] = []
        self.left: str | None = None
        self.settled_at: list[int] = []

    @property
    def finished(self) -> bool:
        return 0 < self.run.total_steps <= self.run_step

    @property
    def round(self) -> int:
        return self.run_step // self.run.sync_every

    def step(self, loss: float | None = None, samples: int = 0) -> FakeReport:
        assert self.left is None
        self.run_step += 1
        self.losses.append(loss)
        return FakeReport()

    def step_checked(self, loss: float | None, samples: int, start_s: float) -> FakeReport:
        self.started_s = start_s
        return self.step(loss, samples)

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        return self.finished

    def finish_landing(self) -> bool:
        self.settled_at.append(self.run_step)
        return True

    def shares_weights_with(self, model: nn.Module) -> bool:
        return True

    def on_leave(self, action: Callable[[], None]) -> None:
        pass

    def leave(self, reason: str, *, landing: bool = True) -> None:
        self.left = self.left or reason

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.run_step, "anchor": torch.ones(4, 64)}

    def record(self, event: str, /, **fields: Any) -> None:
        self.events.append((event, fields))

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave("closed")


@dataclass(frozen=True)
class FakeMember:
    peer_id: str = "QmOther"
    maddrs: tuple[str, ...] = (MADDR,)
    role: str = "trainer"
    status: str = "training"
    step: int = 40
    round: int = 2
    lineage: str = "0-00"
    speed: float = 12.34
    strikes: tuple[Struck, ...] = ()
    relayed: Mapping[str, str] = field(default_factory=dict)


class FakeNetworkSession:
    """A session whose live run is the class attribute `live`; keeps what it was asked in class attributes."""

    live: RunConfig | None = None
    present: tuple[FakeMember, ...] = ()
    opened: NetworkConfig | None = None
    peer: FakePeer | None = None
    entered: Mapping[str, torch.Tensor] | None = None  # the weights that a peer came with
    failure: ConfigError | None = None
    tokenizer: bytes | None = None  # what the live run's peers have
    served_tokenizer = b""

    peer_id = "QmFake"
    maddrs = (MADDR, LOOPBACK)
    unreachable: tuple[str, ...] = ()
    alone = False

    def __init__(self, config: NetworkConfig, *, alone: bool = False) -> None:
        ways_in = {*config.initial_peers, *config.remembered_peers}
        if ways_in and ways_in <= set(self.unreachable) and not alone:
            raise UnreachableError("no initial peer can be reached")
        type(self).alone = alone
        type(self).opened = config
        self.pins = Pins(config.anchor.lower(), config.founder)

    @property
    def network(self) -> FakeNetworkSession:
        return self

    @property
    def knows_others(self) -> bool:
        assert self.opened is not None
        return bool(self.opened.initial_peers or self.opened.remembered_peers) and not self.alone

    def find_run(
        self, run_id: str, *, explicit: Mapping[str, Any] | None = None, ours: RunConfig | None = None
    ) -> RunConfig | None:
        return self.live if self.live and self.live.run_id == run_id else None

    def check_key(self, run_id: str) -> None:
        pass

    def accept_nobody(self) -> None:
        pass

    def announce(self, describe: Callable[[], Announcement]) -> None:
        pass

    def find_tokenizer(self, run: RunConfig) -> bytes | None:
        return self.tokenizer

    def members(self, run_id: str) -> list[FakeMember]:
        return list(self.present)

    def enter(
        self,
        model: nn.Module | ModelParts,
        run: RunConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Path | None = None,
        sinks: Sequence[Sink] = (),
        resume_state: Mapping[str, Any] | None = None,
        tokenizer: bytes = b"",
        worker_threads: int = 0,
        on_status: Callable[[str], None] | None = None,
    ) -> FakePeer:
        type(self).served_tokenizer = tokenizer
        module = model._model if isinstance(model, ModelParts) else model
        type(self).entered = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        type(self).peer = FakePeer(
            dataclasses.replace(run, model_layout="layout"), resume_state, founded=self.find_run(run.run_id) is None
        )
        return type(self).peer

    def __enter__(self) -> FakeNetworkSession:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        pass
