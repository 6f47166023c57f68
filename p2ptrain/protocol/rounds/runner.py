"""Runs the consensus of one peer: takes events to it one at a time, and has its effects carried out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.rounds import consensus
from p2ptrain.protocol.rounds.events import (
    Averaged,
    Effect,
    Event,
    Held,
    LeaderFailed,
    MemberFailed,
    Prepared,
    Received,
)
from p2ptrain.protocol.rounds.round_state import Limits, State
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import PeerId


class ConsensusRunner:
    """Holds the state of the round after the head.

    What an effect causes at once, such as a message to ourselves, is queued until all effects of its event are done.

    Args:
        carry_out: does one effect of an event; raises nothing.
        changed: called when there may be something new to do or to wait for.
        errors: logs what our own code raises.
    """

    def __init__(
        self, state: State, carry_out: Callable[[Effect, Event], None], changed: Callable[[], None], errors: ErrorLog
    ) -> None:
        self.state = state
        self._carry_out = carry_out
        self._changed = changed
        self._queue: deque[Event] = deque()
        self._running = False
        self._errors = errors

    def limit(self, limits: Limits) -> None:
        """How long a leader may keep us from now on."""
        self.state = dataclasses.replace(self.state, limits=limits)

    def receive(self, sender: PeerId, message: Message) -> None:
        """Take in a message. Raises WireError where it breaks a rule; the state stays as it was then."""
        if self._running:
            self._queue.append(Received(sender, message))
            return
        self._running = True
        before = self.state
        try:
            self._take(Received(sender, message))
        finally:
            self._run(before)

    def apply(self, event: Event) -> None:
        """Take in an event of our own; nothing is raised."""
        self._queue.append(event)
        if not self._running:
            self._running = True
            self._run(self.state)

    def _run(self, before: State) -> None:
        while self._queue:
            event = self._queue.popleft()
            try:
                self._take(event)
            except Exception as error:
                # Our bug, or a message of our own that breaks a rule. It costs the attempt that it belongs to.
                self._errors.note(f"{type(event).__name__} could not be taken in", error)
                match event:
                    case Prepared(attempt, _) | Held(attempt, _):
                        self._queue.append(MemberFailed(attempt, "unexpected error"))
                    case Averaged(attempt, _):
                        self._queue.append(LeaderFailed(attempt, "unexpected error"))
        self._running = False
        now = self.state
        if (before.member, before.proposer, before.learner) != (now.member, now.proposer, now.learner):
            self._changed()

    def _take(self, event: Event) -> None:
        self.state, effects = consensus.step(self.state, event, trio.current_time())
        for effect in effects:
            self._carry_out(effect, event)
