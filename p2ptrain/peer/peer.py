"""`Peer`: connects a user's training loop to a node on the network thread."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.network.host import Network
from p2ptrain.network.thread import POLL_S, NetworkThread
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.network_side import NetworkSide
from p2ptrain.peer.peer_state import from_dict, saved_run
from p2ptrain.peer.sinks import Sink, Sinks
from p2ptrain.peer.step_values import plain_loss, plain_samples, plain_shard_tokens
from p2ptrain.peer.watch import Watch
from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.event_log.observer import Observer, Own, Sighting
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import Changes, StepReport
from p2ptrain.protocol.membership.status import PeerStatus
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.node.runner import NodeRunner
from p2ptrain.protocol.os_memory import release_unused
from p2ptrain.protocol.restarts import incarnation_of
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.transfer import ModelBuffers

logger = logging.getLogger(__name__)

# Weights that differ from the last round's by more than this share of them were not trained from these (guess).
FAR = 0.5


@dataclass(frozen=True)
class JoinOptions:
    """How a peer joins.

    Attributes:
        may_found: whether it founds the run at once, because there is no peer to ask.
        worker_threads: how many threads do the work of rounds.
        resume_state: its `Peer.state_dict()` from before a restart.
        on_status: called with its status until it has joined.
    """

    may_found: bool
    worker_threads: int
    resume_state: dict[str, Any] | None = None
    on_status: Callable[[str], None] = lambda status: None


class Peer:
    """One member of a run, made by `p2ptrain.join` or `NetworkSession.enter`; a context manager that leaves at the end.

    Call it only from the training thread. Any thread may read `others`, `alive`, `status`, `run_step`, `maddrs` and the
    attributes.

    Attributes:
        run: the run's settings.
        peer_id: this peer's network identity.
        data_seed: a seed for this peer's share of the data, the same after a restart with the same identity.
        founded: whether this peer founded the run: no other peer had a state, and it had no checkpoint.
        run_founder: id of the peer that founded the run.
        dashboard: address of the page that this peer serves, with its token if it has one; "" without a page.
    """

    def __init__(
        self,
        parts: ModelParts,
        run: RunSpec,
        network: Network,
        policy: LocalPolicy,
        *,
        thread: NetworkThread,
        optimizer: torch.optim.Optimizer | None,
        records: Sink,
        joining: JoinOptions,
    ) -> None:
        self._parts = parts
        self.run = parts.with_layout(run.config)
        self.peer_id = network.peer_id
        self.data_seed = self.run.data_seed(self.peer_id)
        self._network = network
        self._thread = thread
        self._incarnation = secrets.token_hex(8)
        self._event_log = EventLog(time.time)
        self._records = Sinks([records, self._event_log])
        self._on_leave: Callable[[], None] = lambda: None
        self._left = self.founded = False
        self.run_founder = self.dashboard = ""
        self._record_s = 0.0
        self._status = ""
        self._errors = ErrorLog(logger)
        self._exchange = Exchange(
            parts.view,
            self.run,
            averaged=parts.averaged(self.run, optimizer),
            transfers=parts.transfers(),
            clock=time.monotonic,
            post=thread.post,
            cpu_clock=time.thread_time,
        )
        self.record(
            "start",
            peer_id=self.peer_id,
            run_id=self.run.run_id,
            run_digest=self.run.digest,
            maddrs=self.maddrs,
            incarnation=self._incarnation,
            parameters=parts.space.numel,
            run=self.run.to_dict(),
        )

        def build(may_found: bool, restored: Restored | None, number: int) -> Node:
            own = incarnation_of(self._incarnation, number)
            trains = number > 0 and self._runner.last_ready.ready.is_set()
            return Node(
                dataclasses.replace(run, config=self.run),
                NetworkAccess(network.transport, network.directory, network.bulk),
                policy,
                NodeStart(own, random.Random(own), may_found, restored),
                exchange=self._exchange,
                # Once training has begun, a forward pass may be using our buffers.
                buffers=ModelBuffers(
                    parts.buffers, parts.load_buffers, (lambda: 0) if trains else parts.most_buffer_bytes
                ),
                telemetry=Telemetry(self._on_event, self._event_log, self._errors),
                compute=self._workers,
            )

        resumed = joining.resume_state
        restored = None if resumed is None else from_dict(resumed, self._exchange.new_state())
        distance = 0.0 if restored is None else parts.distance_to(torch.from_numpy(restored.state.anchor))
        parts.claim()
        self._workers = Workers(joining.worker_threads)
        try:
            self._runner = NodeRunner(
                build, self._exchange, self._workers, may_found=joining.may_found, restored=restored
            )
        except BaseException:
            parts.release()
            self._workers.close()
            raise
        self._network_side = NetworkSide(self._runner, self._exchange, parts, self._workers, network, thread)
        self._network_side.start(self._on_event)
        try:
            self._network_side.await_ready(partial(self._note_status, joining.on_status))
        except BaseException:
            self.leave("could not join")
            raise
        if restored is not None and distance > FAR and self.run_step == restored.run_step:  # and not the swarm's
            logger.warning(
                "the model's weights differ from those of the state to resume from by %.1f times their size: if you "
                "saved them with it, load them into the model before join(), or the next round averages these",
                distance,
            )
        node = self._runner.last_ready
        self.founded, self.run_founder = node.state_sync.joining.founded, node.driver.founder

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.leave("done" if kind is None else kind.__name__)

    def step(self, loss: float | None = None, samples: int = 0) -> StepReport:
        """Exchange with the other peers; call it once after every optimizer step.

        While you train, weights change only in this call and in `finish_landing()`. Joining, `wait_finished`,
        `state_dict`, `load_state_dict` and `leave` can land a round, too. It never raises for network errors: missing
        updates are skipped and counted. A round runs in the background and lands in a later call.

        Args:
            loss: this step's training loss, for the records: any number, also of numpy or a tensor of one value.
            samples: tokens or examples of this step, which weight this peer's share in rounds. A whole number from 0 to
                2**32, also of numpy or a tensor of one value.

        Returns:
            Fragments sent, merged and skipped, the round that landed (or None), and the duration.

        Raises:
            ConfigError: `loss` or `samples` is invalid, or the model's trainable parameters are no longer those that
                it joined with. Nothing was exchanged.
        """
        start_s = time.monotonic()
        number, plain = plain_samples(samples), plain_loss(loss)
        self._parts.check_in_place()
        return self.step_checked(plain, number, start_s)

    def step_checked(self, loss: float | None, samples: int, start_s: float) -> StepReport:
        """`step` after its checks, for a `GroupPeer`. From `start_s`, monotonic, time counts as exchange."""
        report = self._exchange.step(samples)
        self._note_status()
        # The time of writing this record, some 30 µs, is counted in the next one.
        exchange_s = time.monotonic() - start_s + self._record_s
        record_from_s = time.monotonic()
        self.record(
            "step",
            step=self._exchange.run_step,
            loss=loss,
            tokens=samples,
            step_s=round(self._exchange.step_s, 6),
            exchange_s=round(exchange_s, 6),
        )
        end_s = time.monotonic()
        self._record_s = end_s - record_from_s
        return dataclasses.replace(report, exchange_s=end_s - start_s)

    def take_changes(self) -> Changes:
        """The weights changed by the last step, and by landings since the last call."""
        return self._exchange.take_changes()

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """After the last step: wait until the run's last round has landed. Returns False on a time-out or a `failure`.

        Args:
            timeout_s: None for the longest time of an attempt at a round, the run's `round_timeout_s`.

        Raises ConfigError as `step` does, if a round is landing.
        """
        deadline = time.monotonic() + (self.run.round_timeout_s if timeout_s is None else timeout_s)
        while not self._exchange.finished and time.monotonic() < deadline and self.failure is None:
            self._network_side.idle()
            time.sleep(POLL_S)
        return self._exchange.finished

    def finish_landing(self) -> bool:
        """Land the rest of a round that has landed in part, so that all weights are of one epoch.

        The landing of a large model takes several steps on a CPU. Call this before you copy or evaluate the weights.
        The next `step()` reports the round. Returns False if an error, which is logged, has left weights of two epochs;
        the next step tries it again. Raises ConfigError as `step` does, if a round is landing.
        """
        if self._exchange.landing_pending and not self._left:
            self._parts.check_in_place()
        return self._exchange.finish_landing()

    def record(self, event: str, /, **fields: Any) -> None:
        """Append an event to the metrics stream."""
        self._records.write(event, **fields)

    @property
    def alive(self) -> list[str]:
        """Ids of the other live peers of the run."""
        return list(self._runner.node.alive)

    @property
    def alive_maddrs(self) -> list[str]:
        """Addresses of the other live peers, for joining after a restart."""
        return self._runner.node.alive_maddrs

    @property
    def others(self) -> list[PeerStatus]:
        """Status and position of the other live peers. For any thread."""
        return self._runner.node.others

    @property
    def maddrs(self) -> list[str]:
        """All addresses that other peers can dial, loopback last."""
        return self._network.maddrs

    @property
    def round(self) -> int:
        """Number of the next round; also the number of rounds resolved."""
        return self._exchange.epoch.round + 1

    @property
    def run_step(self) -> int:
        """Position in the run, in inner steps; joiners start at the run's. Use it for learning rate schedules."""
        return self._exchange.run_step

    @property
    def finished(self) -> bool:
        """Whether the run's length was reached and its last round has landed."""
        return self._exchange.finished

    @property
    def shard_tokens(self) -> int:
        """Tokens in this peer's shard, for runs that weight outer gradients by it; set it before training.

        Setting it raises ConfigError unless it is a whole number from 0 to 2**53.
        """
        return self._exchange.shard_tokens

    @shard_tokens.setter
    def shard_tokens(self, tokens: int) -> None:
        self._exchange.shard_tokens = plain_shard_tokens(tokens)

    @property
    def anchor_hash(self) -> str:
        """Hash of the anchor; equal on all peers at the same round. Known a moment after the round has landed."""
        return self._runner.last_ready.driver.head.anchor_hash

    @property
    def status(self) -> str:
        """What this peer is doing now, as text; also while the network side is being restarted."""
        return self._runner.status

    @property
    def failure(self) -> Exception | None:
        """Why the network side has ended for good; None while it runs or is restarted. Training can continue alone."""
        return self._network_side.failure

    def watch(self) -> Watch:
        """Watch the run over this peer's links, including this peer itself."""
        own = Own(self._incarnation, self._event_log, self._sight)
        observer = Observer(self.run.run_id, trio.to_thread.run_sync, time.time, own)
        return Watch(self._thread, observer, lambda: self._runner.with_links(observer.watch))

    def _sight(self) -> Sighting:
        node = self._runner.last_ready
        head = node.driver.head
        return Sighting(
            self.peer_id,
            True,
            self.status,
            False,
            self._exchange.run_step,
            head.round,
            head.lineage,
            relayed=node.links.relayed(),
        )

    def shares_weights_with(self, model: torch.nn.Module) -> bool:
        """Whether `model` has one of the weights that have joined, or some that a wrapper hides."""
        return self._parts.shares_weights_with(model)

    def anchor_state_dict(self) -> dict[str, torch.Tensor]:
        """The agreed weights of the last round: fp32 copies on the CPU by parameter name.

        Waits and raises like `state_dict`.
        """
        return self._parts.unflatten(self.state_dict()["anchor"])

    def state_dict(self) -> dict[str, Any]:
        """This peer's part of a checkpoint: its position, and the state that rounds agree on.

        Blocks while a round changes that state, and while it is copied: seconds for a large model. It lands a round
        that the state has and the weights do not, so call it before you copy the weights. The next `step()` reports
        that round.

        Returns:
            `genesis`: str, which start of the run it is. `head`: str, the last round and the voters of the next,
            packed, in hex. `history`: str, the run's genesis and latest rounds, likewise. `run_step`: int, position in
            the run. `tokens`: int, trained on since our outer gradient was last in a mean. `anchor`: (blocks, 64)
            float32, the weights of the last round in the flat layout, followed by the inner moments if rounds average
            them. `moments`: list of tensors of that shape, of the outer optimizer. `run`: str, the run's settings in
            JSON.
            Tensors are copies on the CPU, owned by the caller.

        Raises:
            ConfigError: as `step` does, if a round is landing.
            TimeoutError: a round takes more than 120 s to change the state, or an error interrupted that or keeps the
                round from the weights.
        """
        return self._network_side.state_dict() | {"run": json.dumps(self.run.stated())}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a result of `state_dict()`, if the swarm has nothing newer.

        Blocks until a landing round has landed, and until the state is restored: at most 120 s each.

        Returns:
            True if restored, False if the run is further already and it was ignored.

        Raises:
            ConfigError: it is damaged, of another model or of another run than pinned, or was not restored in time.
            TimeoutError: the network side did not answer within 120 s.
        """
        restored = from_dict(state, self._exchange.new_state())
        if (saved := saved_run(state)) is not None and saved != self.run:
            ours, theirs = self.run.to_dict(), saved.to_dict()
            differing = ", ".join(f"{n} = {ours[n]!r} (was {theirs[n]!r})" for n in ours if ours[n] != theirs[n])
            logger.warning("the state was saved in a run with other settings than this one: %s", differing)
        return self._network_side.restore(restored)

    def on_leave(self, action: Callable[[], None]) -> None:
        """Call `action` after this peer has left; `p2ptrain.join` closes its network with it."""
        self._on_leave = action

    def leave(self, reason: str = "done", *, landing: bool = True) -> None:
        """Tell the other peers, end the network side, close the records. May be called twice.

        Takes below 10 s. After the run's last round it first waits for linked peers that have not landed it: until 10 s
        after their last use of this peer, and at most for the present timeout of an attempt (60 s to the run's
        `round_timeout_s`).

        Args:
            reason: for the records of all peers.
            landing: let a round that is being committed change the weights; False leaves them as they are, unless a
                part of it has landed.
        """
        if self._left:
            return
        self._left = True
        try:
            self._network_side.end(reason, landing=landing)
        finally:
            self._parts.release()
            self.record("stop", reason=reason)
            self._records.close()
            with self._errors.containing("calling the action of on_leave", "this peer has left"):
                self._on_leave()

    def _on_event(self, event: str, /, **fields: Any) -> None:
        self.record(event, **fields)
        if event == "round":
            self._thread.start_soon(self._workers, release_unused)

    def _note_status(self, on_status: Callable[[str], None] = lambda status: None) -> None:
        """Record the status if it has changed, and pass it to `on_status`."""
        if self._status == self.status:
            return
        self._status = self.status
        self.record("status", status=self._status)
        with self._errors.containing("calling on_status", "it is called at the next status"):
            on_status(self._status)
