"""The objects of a peer that all parts of its rounds use."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.rounds.averaging import averaging_of
from p2ptrain.protocol.rounds.codecs import gradient_codec, mean_codec
from p2ptrain.protocol.rounds.liveness import Liveness, RoundHost
from p2ptrain.protocol.rounds.part_store import PartStore
from p2ptrain.protocol.rounds.policy import MAX_CONTRIBUTORS
from p2ptrain.protocol.rounds.timeouts import Timeouts
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import PeerId

# Bytes that we reduced in attempts that ended without an outcome are kept up to so many encoded models.
SPARE_MODELS = 2
# Sends a control message to a peer or to ourselves; dropped if the peer is not linked.
Tell = Callable[[PeerId, Message], None]
# Starts a task in the nursery of the driver: `start_soon(function, *args)`.
StartSoon = Callable[..., None]


class RoundContext:
    """One peer.

    Attributes:
        state: anchor and moments; changed by commits only.
        codec: of outer gradients.
        errors: logs exceptions of our own code that cost no more than an attempt.
    """

    def __init__(self, host: RoundHost, exchange: Exchange, errors: ErrorLog) -> None:
        self.host = host
        self.peer_id, self.incarnation = host.peer_id, host.incarnation
        self.run = run = host.run
        self.links = links = host.links
        self.state = host.state
        self.compute = host.compute
        self.exchange = exchange
        self.errors = errors
        self.liveness = Liveness(host)
        self.averaging = averaging_of(run)
        self.codec = gradient_codec(run)
        codecs = (self.codec, mean_codec(run, MAX_CONTRIBUTORS))
        model_bytes = max(codec.size_bytes(self.state.num_blocks) for codec in codecs)
        self.parts = PartStore(links, host.compute, self.averaging, spare_bytes=SPARE_MODELS * model_bytes)
        self.timeouts = Timeouts(peer_timeout_s=links.peer_timeout_s, round_timeout_s=run.round_timeout_s)
