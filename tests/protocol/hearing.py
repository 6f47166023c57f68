"""Receives what an exchange tells its node, for tests of an exchange without one, or of what lies between the two."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import ExchangeEvent, Push, SnapshotTaken

Handlers = dict[type, Callable[..., object]]


class Hearing:
    """Calls a handler for each kind of event that has one."""

    def __init__(self) -> None:
        self.handlers: Handlers = {}

    def receive(self, event: ExchangeEvent) -> None:
        handler = self.handlers.get(type(event))
        if handler is None:
            return
        match event:
            case Push():
                handler(event)
            case SnapshotTaken(_, snapshot):
                handler(snapshot)
            case _:
                handler(*(getattr(event, name) for name in event.__match_args__))


def hear(exchange: Exchange, handlers: Handlers) -> None:
    """Let these handle what the exchange tells, beside those of earlier calls. A push and a snapshot come as they are;
    other events come as their fields.
    """
    if not isinstance(exchange._listener, Hearing):
        exchange.attach(Hearing())
    exchange._listener.handlers.update(handlers)
