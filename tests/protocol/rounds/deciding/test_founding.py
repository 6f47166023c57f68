"""Who begins a lineage, and who adopts it: every reachable state of two and three peers whose nodes are restarted.

A small model around the rules themselves (`deciding.lineage`, `.history`). Peers stand at one head. Heartbeats may
be old: a peer acts on what it last heard. Nodes restart and go on from their state, rounds are committed where a quorum
stands at one head, and a peer may begin a lineage whenever its turn may have come. From each state that is reached,
faults stop and heartbeats arrive: then no two peers leave their lineages for each other's, and all of them come into
one lineage, with a quorum, after two rounds at most.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pytest

from p2ptrain.protocol.rounds.deciding import history, lineage
from p2ptrain.protocol.rounds.deciding.history import ends_at, place_of
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum, next_voters, seen_of
from p2ptrain.protocol.state_sync import provenance
from p2ptrain.protocol.wire.messages import Attempt, Commit, Contributor, Entry, Founding, Head, Record, View, Vote

# Peers that come to rest do so within so many passes.
MOST_PASSES = 50
# What was added to the common history: a founding by a voter, or a commit by voters.
Op = tuple[str, tuple[Voter, ...]]
Path = tuple[Op, ...]


@functools.cache
def entries_of(path: Path) -> tuple[Entry, ...]:
    if not path:
        return ()
    *_, (kind, peers) = path
    before = entries_of(path[:-1])
    if not before:
        return (Entry(None, Founding("digest", -1, "", *peers[0], b"")),) if kind == "f" else ()
    place = place_of(before[-1])
    if kind == "f":
        return (*before, Entry(None, Founding(place.lineage, place.round, state_of(path[:-1]), *peers[0], b"")))
    named = tuple(Contributor(*peer, 1.0, bytes(32)) for peer in peers)
    views = [View(*peer, seen_of(peers), b"") for peer in peers if peer in place.voters]
    record = Record(
        "g", place.lineage, place.round + 1, state_of(path[:-1]), named, (), "sgd", 1.0, 0.0, 0, 0, (), 0.0, 0.0,
        next_voters(head_of(path[:-1]), named, views),
    )  # fmt: skip
    votes = tuple(Vote(*voter, b"") for voter in place.voters if voter in peers)
    return (*before, Entry(Commit(record, Attempt(1, *peers[0]), votes), None))


def state_of(path: Path) -> str:
    """Foundings keep the state."""
    return repr([op for op in path if op[0] == "c"])


@functools.cache
def head_of(path: Path) -> Head:
    place = place_of(entries_of(path)[-1])
    return Head("g", place.lineage, place.round, state_of(path), "", place.voters, 0, 0, None)


@dataclass(frozen=True, slots=True)
class Peer:
    """One node. `restoring`: it has the state of `path`, and is not in a lineage yet."""

    incarnation: int
    path: Path
    restoring: bool = False

    def voter(self, name: str) -> Voter:
        return name, f"{name}.{self.incarnation}"


# The peers, and what each last heard of each other one; None before the first heartbeat.
Views = tuple[tuple[Peer | None, ...], ...]
State = tuple[tuple[Peer, ...], Views]


@dataclass(frozen=True)
class Model:
    names: str
    restarts: int
    commits: int

    def start(self) -> State:
        first = (("f", ((self.names[0], f"{self.names[0]}.1"),)), ("c", tuple((n, f"{n}.1") for n in self.names)))
        peers = tuple(Peer(1, first) for _ in self.names)
        return peers, tuple(peers for _ in self.names)

    # What a peer sees.

    def present(self, state: State, p: int) -> set[Voter]:
        """Itself, and whom it heard to be in its lineage."""
        peers, views = state
        mine = head_of(peers[p].path).lineage
        return {
            view.voter(self.names[q])
            for q, view in enumerate((*views[p][:p], peers[p], *views[p][p + 1 :]))
            if view is not None and not view.restoring and head_of(view.path).lineage == mine
        }

    def is_gone(self, state: State, p: int, voter: Voter) -> bool:
        q = self.names.index(voter[0])
        view = state[0][p] if q == p else state[1][p][q]
        if view is None:
            return False
        elsewhere = q != p and not view.restoring and head_of(view.path).lineage != head_of(state[0][p].path).lineage
        return view.voter(voter[0]) != voter or elsewhere

    def has_ended(self, state: State, p: int) -> bool:
        voters = head_of(state[0][p].path).voters
        return lineage.has_ended(voters, self.present(state, p), lambda voter: self.is_gone(state, p, voter))

    def prefers(self, state: State, p: int, q: int) -> bool:
        """Whether p leaves its lineage, or its checkpoint, for what q has now."""
        ours, theirs = state[0][p], state[0][q]
        a, b = entries_of(ours.path), entries_of(theirs.path)
        if ours.restoring:
            return ends_at(a, head_of(theirs.path)) or history.is_better(a, b, ())
        present = set() if self.has_ended(state, p) else {name for name, _ in self.present(state, p)}
        voters = {name for name, _ in head_of(ours.path).voters}
        return provenance.is_preferred(
            head_of(ours.path), a, head_of(theirs.path), b, voters & present, is_trusted=False
        )  # fmt: skip

    def heard_elsewhere(self, state: State, p: int) -> list[int]:
        """Whom p heard to have a state that it does not stand at."""
        me = state[0][p]
        return [
            q
            for q, view in enumerate(state[1][p])
            if q != p and view is not None and not view.restoring and (me.restoring or view.path != me.path)
        ]

    def may_begin(self, state: State, p: int, *, in_turn: bool) -> bool:
        """Whether p begins a lineage, if it has waited for those before it (or, `in_turn`, if none is before it)."""
        (me, view), heard = (state[0][p], state[1][p]), self.heard_elsewhere(state, p)
        lower = [q for q, other in enumerate(view) if q < p and other is not None]
        if me.restoring:
            # It has compared its state with those it heard of.
            before = [q for q in lower if view[q].restoring]  # type: ignore[union-attr]
            return not any(self.prefers(state, p, q) for q in heard) and not (in_turn and before)
        before = [q for q in lower if not view[q].restoring and view[q].path == me.path]  # type: ignore[union-attr]
        return self.has_ended(state, p) and lineage.is_our_turn(
            ended_s=0.0 if in_turn else 1e9, lost_s=0.0, patience_s=1e9, lower=len(before),
            awaits=any(self.prefers(state, p, q) for q in heard),
        )  # fmt: skip

    # What may happen next.

    def hear(self, state: State, p: int, q: int) -> State:
        peers, views = state
        row = (*views[p][:q], peers[q], *views[p][q + 1 :])
        return peers, (*views[:p], row, *views[p + 1 :])

    def become(self, state: State, p: int, peer: Peer) -> State:
        peers, views = state
        row = (*views[p][:p], peer, *views[p][p + 1 :])
        return (*peers[:p], peer, *peers[p + 1 :]), (*views[:p], row, *views[p + 1 :])

    def begin(self, state: State, p: int) -> State:
        me = state[0][p]
        return self.become(state, p, Peer(me.incarnation, (*me.path, ("f", (me.voter(self.names[p]),)))))

    def adopt(self, state: State, p: int, q: int) -> State:
        # Its heartbeat comes before its answer.
        return self.become(self.hear(state, p, q), p, Peer(state[0][p].incarnation, state[0][q].path))

    def moves(self, state: State) -> Iterator[State]:
        peers, views = state
        numbers = range(len(peers))
        for p, q in itertools.permutations(numbers, 2):
            if views[p][q] != peers[q]:
                yield self.hear(state, p, q)
        restarts = sum(peer.incarnation - 1 for peer in peers)
        commits = max(sum(kind == "c" for kind, _ in peer.path) - 1 for peer in peers)
        for p, me in enumerate(peers):
            if restarts < self.restarts:
                anew = self.become(state, p, Peer(me.incarnation + 1, me.path, restoring=True))
                blind = tuple(anew[0][p] if q == p else None for q in numbers)
                yield anew[0], (*anew[1][:p], blind, *anew[1][p + 1 :])
            if self.may_begin(state, p, in_turn=False):
                yield self.begin(state, p)
            for q in self.heard_elsewhere(state, p):
                if not peers[q].restoring and self.prefers(state, p, q):
                    yield self.adopt(state, p, q)
            if not me.restoring and commits < self.commits and (committed := self.commit(state, p)) is not None:
                yield committed

    def commit(self, state: State, p: int) -> State | None:
        """A round of those who stand at the head of p; None if they are no quorum."""
        here = [q for q, other in enumerate(state[0]) if not other.restoring and other.path == state[0][p].path]
        voters = tuple(state[0][q].voter(self.names[q]) for q in here)
        if p not in here or not is_quorum(voters, head_of(state[0][p].path).voters):
            return None
        path = state[0][p].path
        # Consensus: one record for a round.
        learned = {other.path[len(path)] for other in state[0] if other.path[: len(path)] == path != other.path}
        ops = [op for op in learned if op[0] == "c"] or [("c", voters)]
        return self.become(state, p, Peer(state[0][p].incarnation, (*path, ops[0])))

    def all_heard(self, state: State) -> State:
        for p, q in itertools.permutations(range(len(self.names)), 2):
            state = self.hear(state, p, q)
        return state

    def settled(self, state: State) -> State:
        """Faults have stopped: heartbeats arrive, peers adopt or begin what they should, and then commit one round."""
        rounds = 0
        for _ in range(MOST_PASSES):
            before = state = self.all_heard(state)
            for p in range(len(self.names)):
                better = [q for q in self.heard_elsewhere(state, p) if self.prefers(state, p, q)]
                if better:
                    state = self.all_heard(self.adopt(state, p, better[0]))
                elif self.may_begin(state, p, in_turn=True):
                    state = self.all_heard(self.begin(state, p))
            if state != before:
                continue
            committed = {p: self.commit(state, p) for p in range(len(self.names))}
            if len({peer.path for peer in state[0]}) == 1 or not any(committed.values()) or rounds == 2:
                return state
            rounds += 1
            # Each of several lineages with a quorum commits.
            for p, first in enumerate(state[0]):
                others = state[0][:p]
                if committed[p] is not None and first.path not in [other.path for other in others]:
                    state = self.become(state, p, committed[p][0][p])  # type: ignore[index]
        raise AssertionError("they change lineages without end")

    def fault(self, state: State) -> str:
        """What is wrong with a state, "" if nothing."""
        fresh = self.all_heard(state)
        for p, q in itertools.combinations(range(len(self.names)), 2):
            apart = not (fresh[0][p].restoring or fresh[0][q].restoring or fresh[0][p].path == fresh[0][q].path)
            if apart and self.prefers(fresh, p, q) and self.prefers(fresh, q, p):
                return "each leaves its lineage for the other's"
        peers, _ = end = self.settled(state)
        if len({peer.path for peer in peers}) > 1 or any(peer.restoring for peer in peers):
            return "they stay apart"
        if self.commit(end, 0) is None:
            return "no quorum, and none begins a lineage"
        return ""


def search(model: Model, limit: int) -> tuple[int, str]:
    """The number of states, and what is wrong with the first that is wrong."""
    seen, todo = {model.start()}, [model.start()]
    judged = set[tuple[Peer, ...]]()
    for state in todo:
        # In `fault` all heartbeats arrive first, so the answer does not depend on what was heard before.
        if state[0] not in judged and (wrong := model.fault(state)):
            return len(seen), wrong
        judged.add(state[0])
        for after in model.moves(state):
            if after not in seen and len(seen) < limit:
                seen.add(after)
                todo.append(after)
    return len(seen), ""


MODELS = [Model("ab", 2, 1), Model("abc", 1, 1)]
# Searched as far as a few minutes go.
MORE = [Model("ab", 3, 2), Model("abc", 2, 1)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", [*MODELS, *(pytest.param(model, marks=pytest.mark.long) for model in MORE)], ids=str)
@pytest.mark.slow
def test_peers_that_hear_each_other_come_into_one_lineage(
    model: Model, record_property: Callable[[str, object], None]
) -> None:
    states, wrong = search(model, 300_000)
    assert not wrong
    record_property("shown", f"founding: {states} states of {model}, from each all come into one lineage")


# --- planted faults --------------------------------------------------------------------------------------------------


is_better = history.is_better


def theirs_if_both_began_one(ours: Sequence[Entry], theirs: Sequence[Entry], present: Collection[str]) -> bool:
    """The common history ends with the first round; no order between two lineages that began there."""
    began = [len(entries) > 2 and entries[2].founding is not None for entries in (ours, theirs)]
    return is_better(ours, theirs, present) or (all(began) and ours[2] != theirs[2])


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ({"prefers": lambda model, state, p, q: False}, "they stay apart"),
        ({"is_better": theirs_if_both_began_one}, "each leaves its lineage for the other's"),
        ({"is_gone": lambda model, state, p, voter: False}, "no quorum, and none begins a lineage"),
    ],
    ids=["no lineage is left", "of two lineages the other one is followed", "voters are waited for, whatever they did"],
)
def test_a_planted_fault_is_found(
    fault: dict[str, Callable[..., bool]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rule in fault.items():
        for owner in (history, provenance) if name == "is_better" else (Model,):
            monkeypatch.setattr(owner, name, rule)
    assert search(MODELS[0], 20_000)[1] == wrong
