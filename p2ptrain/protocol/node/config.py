"""The constructor arguments of `Node`, grouped by where they come from: the run, the network, the user's settings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.provenance import NO_PINS, Pins
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.transport import BulkTransport, Directory, PeerId, Refusal, Transport, no_refusal
from p2ptrain.settings.config import RunConfig


@dataclass(frozen=True)
class RunSpec:
    """The run.

    Attributes:
        config: its settings.
        tokenizer: the content of its tokenizer file, for joiners; empty if it has none.
        closed: the run and its key; None if the run is open.
    """

    config: RunConfig
    tokenizer: bytes = b""
    closed: ClosedRun | None = None


@dataclass(frozen=True)
class NetworkAccess:
    """This machine's access to the network.

    Attributes:
        transport: opens and accepts streams.
        directory: finds the peers of a run.
        bulk: opens and accepts bulk connections; None if bulk bytes take the streams.
    """

    transport: Transport
    directory: Directory
    bulk: BulkTransport | None = None


@dataclass(frozen=True)
class LocalPolicy:
    """Local settings: trusted and refused peers, time-outs, CPU limits.

    Attributes:
        chosen: ids of the user's initial peers.
        remembered: ids of the peers last seen alive before a restart. They are dialled, but not trusted.
        pins: the founder or a record of the run, if the user gave one. No other run is joined.
        refusal: which peers the user refuses, and why.
        peer_timeout_s: longest silence before a peer is considered lost.
        gossip_budget: cores that gossip may keep busy; infinite for a push at every step.
    """

    chosen: Collection[PeerId] = ()
    remembered: Collection[PeerId] = ()
    pins: Pins = NO_PINS
    refusal: Refusal = no_refusal
    peer_timeout_s: float = PEER_TIMEOUT_S
    gossip_budget: float = math.inf


@dataclass(frozen=True)
class NodeStart:
    """How one node of a peer starts.

    Attributes:
        incarnation: distinguishes it from every other node of the run.
        rng: source of all its random choices.
        may_found: whether to found the run at once, because there is no peer to ask.
        restored: state from a checkpoint or an earlier node, used if the swarm has nothing newer.
    """

    incarnation: str
    rng: random.Random
    may_found: bool
    restored: Restored | None = None


@dataclass(frozen=True)
class Telemetry:
    """Where a node writes events and errors.

    Attributes:
        write: takes an event for the metrics stream: a name, and fields by keyword.
        event_log: the events that observers may request.
        errors: logs exceptions that cost no more than a link or an answer.
    """

    write: Callable[..., None]
    event_log: EventLog
    errors: ErrorLog
