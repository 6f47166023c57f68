"""The objects of a peer that all parts of its rounds use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.algorithms.codec import Codec
from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.averaging import averaging_of
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.protocol.rounds.codecs import gradient_codec
from p2ptrain.protocol.rounds.part_store import PartStore
from p2ptrain.protocol.rounds.timeouts import Timeouts
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig

# Sends a control message to a peer or to ourselves; dropped if the peer is not linked.
Tell = Callable[[PeerId, Message], None]


@dataclass(frozen=True, slots=True)
class RoundContext:
    """One peer. `codec` is that of outer gradients; `state` (anchor and moments) is changed by commits only; `errors`
    logs exceptions of our own code that cost no more than an attempt."""

    peer_id: PeerId
    incarnation: str
    run: RunConfig
    links: Links
    exchange: Exchange
    state: AnchorState
    compute: Compute
    averaging: Averaging
    codec: Codec
    parts: PartStore
    timeouts: Timeouts
    errors: ErrorLog


def context_of(
    peer_id: PeerId, incarnation: str, run: RunConfig, links: Links, exchange: Exchange, state: AnchorState,
    compute: Compute, errors: ErrorLog,
) -> RoundContext:  # fmt: skip
    """Make the context of a peer."""
    averaging = averaging_of(run)
    return RoundContext(
        peer_id, incarnation, run, links, exchange, state, compute, averaging, gradient_codec(run),
        PartStore(links, compute, averaging),
        Timeouts(peer_timeout_s=links.peer_timeout_s, round_timeout_s=run.round_timeout_s),
        errors,
    )  # fmt: skip
