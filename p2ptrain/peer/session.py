"""A network session: the network thread with this peer's identity, before and while it takes part in a run."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import trio

from p2ptrain.errors import TransientError
from p2ptrain.network import lan
from p2ptrain.network.addresses import by_peer_id, ways_in
from p2ptrain.network.host import Network, open_network
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import JoinOptions, Peer
from p2ptrain.peer.sinks import MetricsFile, Sink, Sinks
from p2ptrain.peer.watch import Watch
from p2ptrain.peer.worker import default_threads
from p2ptrain.protocol.event_log.observer import Observer
from p2ptrain.protocol.membership.lookup import MAX_LOOK_S, ask_settings, ask_tokenizer, check_key
from p2ptrain.protocol.membership.status import MemberInfo, list_members
from p2ptrain.protocol.node.config import LocalPolicy, RunSpec
from p2ptrain.protocol.state_sync.provenance import Pins
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.settings.config import RunConfig, agrees
from p2ptrain.settings.machine import usable_cores
from p2ptrain.settings.peer_config import NetworkConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Opening fails within 25 s by its own timeouts; this one is only a safeguard.
OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
# Guess: a lookup normally takes well below a second, a slow DHT takes longer, and a person is waiting.
FIND_RUN_S = 5.0
# Listing the members takes two lookups and a heartbeat of each; this is only a safeguard.
MEMBERS_TIMEOUT_S = 30.0
# For up to 8 MB over a slow line; this is only a safeguard.
MAX_TOKENIZER_S = 600.0


class NetworkSession:
    """Owns the network thread and everything on it. A context manager; `close` may be called twice.

    Attributes:
        network: the open network.
        knows_others: whether it was joined through other peers.
        pins: the founder and the record that the user requires of the run.
    """

    def __init__(self, config: NetworkConfig, *, alone: bool = False) -> None:
        """Open the network; blocks for up to OPEN_TIMEOUT_S. `alone`: as for `open_network`.

        Raises ConfigError if the network cannot be opened, or no initial peer answers.
        """
        self._chosen = frozenset(by_peer_id(config.initial_peers))
        self.pins = Pins(config.anchor.lower(), config.founder)
        self._config = config
        self.knows_others = bool(ways_in(config)) and not alone
        self._thread = NetworkThread()
        self._closing = trio.Event()
        self._closed = threading.Event()
        self._opened: Future[Network] = Future()
        try:
            self._thread.start_soon(self._hold_network, config, alone)
            self.network = self._opened.result(OPEN_TIMEOUT_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TransientError(
                    f"the network did not open within {OPEN_TIMEOUT_S:.0f} s; the machine may be overloaded: try again"
                ) from None
            raise

    def __enter__(self) -> NetworkSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def find_run(
        self, run_id: str, *, explicit: Mapping[str, Any] | None = None, ours: RunConfig | None = None
    ) -> RunConfig | None:
        """Return the settings of a live run, or None if no peer of it is found within FIND_RUN_S.

        That time is extended while announced peers have not been tried.

        Args:
            explicit: the settings that the user gave. If peers give different ones, those that agree are preferred.
            ours: the settings that we know from before; only an initial peer may contradict them.

        Raises ConfigError if the settings of an initial peer do not fit this version of p2ptrain, and OtherRunError,
        RunKeyError or NotAllowedError if no member was found, and an initial peer refuses us.
        """
        find = partial(
            ask_settings,
            self.network.transport,
            self.network.directory,
            run_id,
            timeout_s=FIND_RUN_S,
            rng=random.Random(),
            chosen=self._chosen,
            closed=self._closed_run(run_id),
            refusal=self.network.access.refusal,
            ours=ours,
            fits=lambda run: agrees(explicit or {}, run),
        )
        return self._ask(find, MAX_LOOK_S + 30)

    def find_tokenizer(self, run: RunConfig) -> bytes | None:
        """Get the run's tokenizer file from its members; None if no member has it. Blocks while donors send."""
        find = partial(
            ask_tokenizer,
            self.network.transport,
            self.network.directory,
            run.run_id,
            run.tokenizer,
            rng=random.Random(),
            chosen=self._chosen,
            closed=self._closed_run(run.run_id),
            refusal=self.network.access.refusal,
        )
        return self._ask(find, MAX_TOKENIZER_S)

    def members(self, run_id: str) -> list[MemberInfo]:
        """List the members of a run. Blocks for up to MEMBERS_TIMEOUT_S.

        Raises OtherRunError, RunKeyError or NotAllowedError if there is none, and an initial peer refuses us.
        """
        transport, directory = self.network.transport, self.network.directory
        look = partial(list_members, transport, directory, run_id, chosen=self._chosen, closed=self._closed_run(run_id))
        return self._ask(look, MEMBERS_TIMEOUT_S)

    def check_key(self, run_id: str) -> None:
        """Raise RunKeyError or NotAllowedError if an initial peer refuses us. Blocks for a few seconds at most."""
        closed = self._closed_run(run_id)
        check = partial(check_key, self.network.transport, run_id, chosen=self._chosen, closed=closed)
        self._ask(check, 30)

    def _ask(self, ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        try:
            return self._thread.run(ask, timeout_s=timeout_s)
        except TimeoutError:
            raise TransientError(
                f"asking other peers took more than {timeout_s:.0f} s, as this machine is busy; try again"
            ) from None

    def accept_nobody(self) -> None:
        """Close all streams from other peers, for a bootstrap node, which is a member of no run."""

        async def close_all() -> None:
            while True:
                await (await self.network.transport.accept()).aclose()

        self._thread.start_soon(close_all)

    def watch(self, run_id: str) -> Watch:
        """Watch a run as an observer, without being a member."""
        observer = Observer(run_id, trio.to_thread.run_sync, time.time)
        network, closed = self.network, self._closed_run(run_id)
        return Watch(
            self._thread, observer, lambda: observer.watch_as_observer(network.transport, network.directory, closed)
        )

    def enter(
        self,
        model: torch.nn.Module | ModelParts,
        run: RunConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Path | None = None,
        sinks: Sequence[Sink] = (),
        resume_state: dict[str, Any] | None = None,
        tokenizer: bytes = b"",
        worker_threads: int = 0,
        on_status: Callable[[str], None] | None = None,
    ) -> Peer:
        """Join or start a run with a model. Blocks until the model has the run's state (as long as the download).

        Args:
            model, optimizer, metrics, worker_threads, on_status: as for `p2ptrain.join`; a process group passes its
                `ModelParts`.
            run: the run's settings; if `model_layout` is empty, it is filled in from the model.
            sinks: receive the events of this peer too; closed when it leaves.
            resume_state: the `Peer.state_dict()` of before a restart, or None.
            tokenizer: the content of the run's tokenizer file, which joiners may ask for.

        Raises:
            ConfigError: the model cannot be trained in a run, or the run's state cannot be downloaded.
            RunMismatchError: the run trains another model.
        """
        files = [MetricsFile(metrics)] if metrics is not None else []
        records = Sinks([*files, *sinks])
        try:
            parts = model if isinstance(model, ModelParts) else ModelParts(model)
            config = self._config
            peer = Peer(
                parts,
                RunSpec(run, tokenizer, self._closed_run(run.run_id)),
                self.network,
                LocalPolicy(
                    chosen=self._chosen,
                    remembered=frozenset(by_peer_id(config.remembered_peers)),
                    pins=self.pins,
                    refusal=self.network.access.refusal,
                    peer_timeout_s=config.peer_timeout_s,
                    gossip_budget=config.gossip_budget * usable_cores(),
                ),
                thread=self._thread,
                optimizer=optimizer,
                records=records,
                joining=JoinOptions(
                    may_found=not self.knows_others,
                    worker_threads=worker_threads or default_threads(),
                    resume_state=resume_state,
                    on_status=on_status or (lambda status: None),
                ),
            )
            try:
                self.announce(lambda: _announcement_of(peer, parts.space.numel))
            except BaseException:
                peer.leave("could not join")
                raise
            return peer
        except BaseException:
            records.close()
            raise

    def announce(self, describe: Callable[[], lan.Announcement]) -> None:
        """Announce a run on the local network until the network closes, if the user's settings allow it.

        `describe` is called on the network thread. A closed run is announced without its description.
        """
        config = self._config
        if lan.announces(config, in_container=lan.in_container()):
            describe = (lambda: lan.CLOSED) if lan.is_closed(config) else describe
            self._thread.start_soon(lan.announce, describe, config.host_maddrs)

    def _closed_run(self, run_id: str) -> ClosedRun | None:
        key = self._config.key
        return None if key is None else ClosedRun(key, run_id, secrets.token_bytes)

    def close(self) -> None:
        """Close the network: ends its thread, processes and sockets. Blocks for up to twice CLOSE_TIMEOUT_S."""
        self._thread.post(self._closing.set)
        if self._opened.done():
            self._closed.wait(CLOSE_TIMEOUT_S)
        if not self._thread.stop(CLOSE_TIMEOUT_S):
            logger.warning("the network thread did not end within %.0f s", CLOSE_TIMEOUT_S)

    async def _hold_network(self, config: NetworkConfig, alone: bool) -> None:
        try:
            async with open_network(config, alone=alone) as network:
                self._opened.set_result(network)
                await self._closing.wait()
        except BaseException as error:
            if self._opened.done() or not isinstance(error, Exception):
                raise
            self._opened.set_exception(error)
        finally:
            self._closed.set()
            self._opened.cancel()  # unless it is done


def _announcement_of(peer: Peer, parameters: int) -> lan.Announcement:
    return lan.Announcement(
        run_id=peer.run.run_id,
        model=peer.run.model,
        parameters=parameters,
        peers=1 + len(peer.alive),
        step=peer.run_step,
        founder=peer.run_founder,
        peer_id=peer.peer_id,
        addresses=lan.local_maddrs(peer.maddrs),
    )
