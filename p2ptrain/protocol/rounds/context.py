"""The objects of a peer that all parts of its rounds use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.algorithms.codec import Codec
from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.averaging import averaging_of
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.protocol.rounds.codecs import gradient_codec, mean_codec
from p2ptrain.protocol.rounds.part_store import PartStore
from p2ptrain.protocol.rounds.policy import MAX_CONTRIBUTORS
from p2ptrain.protocol.rounds.timeouts import Timeouts
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig

# Bytes that we reduced in attempts that ended without an outcome are kept up to so many encoded models.
SPARE_MODELS = 2
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
    averaging, codecs = averaging_of(run), (gradient_codec(run), mean_codec(run, MAX_CONTRIBUTORS))
    model_bytes = max(codec.size_bytes(state.num_blocks) for codec in codecs)
    return RoundContext(
        peer_id, incarnation, run, links, exchange, state, compute, averaging, gradient_codec(run),
        PartStore(links, compute, averaging, spare_bytes=SPARE_MODELS * model_bytes),
        Timeouts(peer_timeout_s=links.peer_timeout_s, round_timeout_s=run.round_timeout_s),
        errors,
    )  # fmt: skip
