"""Limits on what peers may do: places for links, rates of messages, and strikes for broken rules.

Pure: `now` is in seconds on any clock. `frame_reader` limits the bytes of received frames, and `outbox` the frames that
wait to be sent.

Identities cost nothing. If each peer kept the place that it got, one stranger could hold all places. So a newcomer
takes the place of the oldest greeting or link, and keeps it until as many others have come as there are places. Strikes
stop faulty software and careless users; the other limits bound what a stranger can do.

Messages are counted per identity, over all its links, so a new link does not reset the count. Limits are far above what
an honest peer sends. Each allows a burst, because messages that gather while this process or the sender is held up
arrive at once. A burst is as long as the time after which one side gives up.

An honest peer sends at most:

- A Beat a second, one more when a link begins and one when it takes over a state.
- A fragment per push, of which there are at most 20 a second.
- An Ack for each 24 KiB that it received.
- A Request for each answer that it waits for, with at most twelve under way: about as many as it gets answers.
- For an attempt at a round, with a record of at most 90 KiB in some of them: as a leader Call, Roster, Reduce, Propose,
  and Commit or Abort; as a member Due, Join or Refuse, Reduced, Ready or Withdraw, and one Arrived for each member (64)
  and every 5 s. So about 80 messages, and two attempts a second are many.

Answers and larger round chunks are not counted here: our requests bound the answers, and the network's flow control
bounds the chunks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.errors import WireError
from p2ptrain.protocol.links.flow_control import ACK_EVERY_BYTES
from p2ptrain.protocol.links.handshake import OBSERVER
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.messages import Ack, Answer, Beat, Contribution, Fragment, Mean, Message, PairWeights
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

# Streams that have not sent their Hello, in all and of one peer. A hundred peers may start at once.
MAX_GREETING = 128
MAX_GREETING_OF_ONE = 2
# Accepted links. We dial at most 128 peers ourselves; the rest is for peers that dial us, such as joiners, and for
# observers. The small frames of all links take 32 MiB at most.
MAX_LINKS = 256
# Accepted links of observers: dashboards, and joiners that ask for the settings, which takes a second (guess).
MAX_OBSERVERS = 64
BEATS_PER_S = 5.0
FRAGMENTS_PER_S = 25.0
# All other messages. Each counts as one unit, and one more per 4 KiB of its frame. Handling one takes some 50 µs
# (guess), so a sender just below the limit takes 1 % of a core.
UNITS_PER_S = 200.0
UNIT_BYTES = 4096
# A request with an answer of at least this size is not counted: the bytes of the answer limit the rate.
ANSWER_BYTES = 16 * 1024
# Peers without a link whose counts are remembered, with about 1 KiB each; the one gone first is forgotten (guess).
MAX_GONE = 4096
# A peer with this many strikes is refused until the first of them expires. The wire version excludes old software.
MAX_STRIKES = 3
# How long a strike counts (guess): so long that three of them cost a flooder most of its time, and so short that a peer
# that was repaired, or that met a bug of ours, comes back by itself.
STRIKE_S = 600.0
# Peers whose strikes are remembered; the one struck first is forgotten.
MAX_STRUCK = 4096
# Length of a reason in logs and lists.
MAX_REASON = 200


def greeting_to_end(greetings: Sequence[PeerId], newcomer: PeerId) -> int | None:
    """The index of the greeting that ends to make room for a stream of `newcomer`; None if there is room.

    A peer with as many greetings as one may have loses its oldest. If all places are taken, the peers with most
    greetings lose the oldest of theirs.

    Args:
        greetings: the peer of each unfinished greeting, the oldest first.
    """
    held = Counter(greetings)
    if held[newcomer] >= MAX_GREETING_OF_ONE:
        return greetings.index(newcomer)
    if len(greetings) < MAX_GREETING:
        return None
    most = max(held.values())
    return next(index for index, peer_id in enumerate(greetings) if held[peer_id] == most)


def excess_observers(role: str, members: int, observers: int) -> int | None:
    """How many observers, the oldest first, lose their link to make room for a newcomer.

    None if the newcomer is refused, because members have all places.

    Args:
        role: the newcomer's.
        members, observers: how many others have a link.
    """
    excess = members + observers + 1 - MAX_LINKS
    if role == OBSERVER:
        excess = max(excess, observers + 1 - MAX_OBSERVERS)
    return max(0, excess) if excess <= observers else None


class MessageRates:
    """Counts the messages of one peer. `burst_s`: seconds of messages that may arrive at once."""

    def __init__(self, burst_s: float, now: float) -> None:
        self._beats = TokenBucket(BEATS_PER_S, BEATS_PER_S * burst_s, now)
        self._fragments = TokenBucket(FRAGMENTS_PER_S, FRAGMENTS_PER_S * burst_s, now)
        self._others = TokenBucket(UNITS_PER_S, UNITS_PER_S * burst_s, now)

    def check(self, message: Message, size_bytes: int, newly_acked_bytes: int, now: float) -> None:
        """Count a received message. Raises WireError if there are too many.

        Args:
            newly_acked_bytes: bulk bytes that its frame acknowledges first.
        """
        match message:
            case Answer():
                return
            case Contribution() | Mean() | PairWeights() if size_bytes >= UNIT_BYTES:
                return
            case Ack() if newly_acked_bytes >= ACK_EVERY_BYTES:
                return
            case Beat():
                bucket, cost = self._beats, 1.0
            case Fragment():
                bucket, cost = self._fragments, 1.0
            case _:
                bucket, cost = self._others, _units(size_bytes)
        if not bucket.spend(cost, now):
            kind = {Beat: "heartbeats", Fragment: "fragments"}.get(type(message), "control messages")
            raise WireError(f"more than {bucket.rate_per_s:.0f} {kind} a second")

    def check_unasked(self, size_bytes: int, now: float) -> None:
        """Count an Answer that no request waits for: a few come too late. Raises WireError if there are too many."""
        if not self._others.spend(_units(size_bytes), now):
            raise WireError("too many answers that were not requested")

    def note_answered(self, size_bytes: int) -> None:
        """A request of the peer is answered with this many bytes."""
        if size_bytes >= ANSWER_BYTES:
            self._others.give_back(1.0)


class PeerRates:
    """The counts of all peers with a link, and of those whose link ended in the last `burst_s` seconds.

    After that time the buckets of a peer are full again, so it can be forgotten.
    """

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._rates: dict[PeerId, MessageRates] = {}
        self._gone_s: dict[PeerId, float] = {}

    def of(self, peer_id: PeerId, now: float) -> MessageRates:
        """The counts for a new link of a peer."""
        self._forget(now)
        self._gone_s.pop(peer_id, None)
        return self._rates.setdefault(peer_id, MessageRates(self._burst_s, now))

    def note_gone(self, peer_id: PeerId, now: float) -> None:
        """The link of a peer has ended."""
        self._gone_s.pop(peer_id, None)
        self._gone_s[peer_id] = now
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._gone_s:
            peer_id, gone_s = next(iter(self._gone_s.items()))
            if now - gone_s < self._burst_s and len(self._gone_s) <= MAX_GONE:
                return
            del self._gone_s[peer_id], self._rates[peer_id]


def _units(size_bytes: int) -> float:
    return 1.0 + size_bytes // UNIT_BYTES


@dataclass(frozen=True, slots=True)
class Struck:
    """A peer with strikes: how many, the reason of the last one (safe to print), and how many seconds ago that was."""

    peer_id: PeerId
    count: int
    reason: str
    age_s: float


class Strikes:
    """The strikes that this peer has given."""

    def __init__(self) -> None:
        # The times of each peer's last strikes, and the reason of the last one. The last struck peer is last.
        self._given: dict[PeerId, tuple[deque[float], str]] = {}

    def add(self, peer_id: PeerId, reason: str, now: float, *, count: int = 1) -> int:
        """Give a peer a strike, or several at once. Returns how many it has now."""
        times, _ = self._given.pop(peer_id, (deque[float](maxlen=MAX_STRIKES), ""))
        times.extend([now] * count)
        self._given[peer_id] = times, shown(reason, MAX_REASON)
        if len(self._given) > MAX_STRUCK:
            del self._given[next(iter(self._given))]
        return self.count(peer_id, now)

    def count(self, peer_id: PeerId, now: float) -> int:
        """The strikes of a peer that have not expired."""
        times, _ = self._given.get(peer_id, (deque[float](), ""))
        while times and now - times[0] >= STRIKE_S:
            times.popleft()
        if not times:
            self._given.pop(peer_id, None)
        return len(times)

    def counts(self, now: float) -> dict[PeerId, int]:
        """All peers with strikes, the last struck last."""
        counted = ((peer_id, self.count(peer_id, now)) for peer_id in list(self._given))
        return {peer_id: count for peer_id, count in counted if count}

    def latest(self, most: int, now: float) -> list[Struck]:
        """The peers struck last, the newest first."""
        counts = self.counts(now)
        newest = reversed(self._given.items())
        return [Struck(peer_id, counts[peer_id], reason, now - times[-1]) for peer_id, (times, reason) in newest][:most]
