"""A voter whose Joins report a READY record of its own making, with parts that it gives to all: rounds go on."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from p2ptrain.errors import RoundFailedError
from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.rounds.deciding.events import Held
from p2ptrain.protocol.rounds.deciding.grid import Grid, mean_codec
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.wire.messages import KIND_OF, Attempt, Contributor, Join, Message, Part, Proposal, Ready, Record
from tests.protocol.swarm import RUN, Swarm, common, run_virtual, start_all, swarm

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)


def record_of_x(s: Swarm, named: str, blobs: dict[str, bytes]) -> Record:
    """A well-formed record of the round after the head of x, with one part, a mean of zeros, which x holds."""
    driver = s.peers["x"].node.driver
    head, num_blocks = driver.head, driver.context.state.num_blocks
    contributors = tuple(Contributor(name, s.peers[name].node.incarnation, 1.0, bytes(32)) for name in named)
    codec, zeros = mean_codec(PLAIN), np.zeros((num_blocks, 64), np.float32)
    blob = b"".join(codec.encode(zeros[start:stop]) for start, stop in Grid(0, num_blocks).bounds(0, num_blocks))
    digest = part_digest(blob, contributors, (0, num_blocks))
    blobs[digest] = blob
    assert head.record is not None
    return msgspec.structs.replace(
        head.record, round=head.round + 1, parent_hash=head.state_hash, contributors=contributors,
        parts=(Part(0, num_blocks, digest, "x"),), intervals=tuple((name, PLAIN.sync_every) for name in named),
        voters=head.voters,
    )  # fmt: skip


@pytest.mark.parametrize("named", ["x", "abx"])
def test_no_leader_proposes_a_reported_record_that_it_would_refuse_from_others(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names x alone; or all, with outer gradients that they have not sent. x and a leader are a quorum."""
    made: list[Record] = []
    blobs: dict[str, bytes] = {}
    hold = Participation._hold

    async def _hold(self: Participation, record: Record) -> None:
        if self._context.peer_id == "x" and record in made:
            self._held = True
            self._apply(Held(self.attempt, record.sha256))
        else:
            await hold(self, record)

    monkeypatch.setattr(Participation, "_hold", _hold)

    def lie(s: Swarm, x: Node) -> None:
        parts, attempts = x.driver.context.parts, x.driver._attempts
        keep, honest = parts._drop_all_but, attempts.tell

        def tell(to: str, message: Message) -> None:
            if isinstance(message, Join) and to != "x":
                made.append(record_of_x(s, named, blobs))
                parts._parts.update(blobs)
                reported = Proposal(made[-1], ())
                message = msgspec.structs.replace(message, ready_attempt=Attempt(0, "x", "z"), ready=reported)
            honest(to, message)

        attempts.tell = tell  # type: ignore[method-assign]
        parts._drop_all_but = lambda names: keep([*names, *blobs])  # type: ignore[method-assign]
        x.driver._schedule.is_ours_to_lead = lambda *args: False  # type: ignore[method-assign]

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 2, 3))
            lie(s, s.peers["x"].node)
            began = trio.current_time()

            def rounds_of(name: str) -> list[dict[str, Any]]:
                assert s.peers[name].node.driver.head.record not in made
                return [r for r in s.peers[name].rounds("committed") if r["t"] > began]

            await s.until(lambda: all(len(rounds_of(name)) >= 8 for name in "ab"), within_s=120)
            assert made

    run_virtual(main)


def test_who_was_ready_with_a_record_is_so_again_whomever_it_sees_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been decided. If those who are READY with it refused it later, no round could ever follow."""
    checked: Counter[str] = Counter()

    def check_company(record: Record, present: Collection[Voter]) -> None:
        checked[record.sha256] += 1
        if lost and record.sha256 in lost:
            raise RoundFailedError("most of those that we see now are not in it")

    lost: set[str] = set()
    monkeypatch.setattr("p2ptrain.protocol.rounds.moving.member.check_company", check_company)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))

            def lose_ready(source: str, target: str, packet: bytes) -> PacketFault:
                if packet[1] == KIND_OF[Ready] and len(ready) < 2:
                    proposal = s.peers[source].node.driver.round_state.acceptor.proposal
                    assert proposal is not None
                    ready.add(source)
                    lost.add(proposal.record.sha256)
                    return PacketFault.DROP
                return PacketFault.NONE

            ready: set[str] = set()
            s.network.fault = lose_ready
            await s.until(lambda: bool(lost), within_s=60)
            before = {name: peer.node.driver.head.round for name, peer in s.peers.items()}
            await s.until(
                lambda: all(peer.node.driver.head.round > before[name] for name, peer in s.peers.items()), within_s=600
            )
            assert checked.keys() & lost

    run_virtual(main)


@pytest.mark.parametrize("join", [False, True], ids=["ignore calls", "join with a made-up state"])
def test_strangers_that_are_linked_and_never_contribute_have_no_round_refused(
    join: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than the others, and no leader can name them."""

    def lie(tell: Callable[[str, Message], None], to: str, message: Message) -> None:
        if isinstance(message, Join):
            message = msgspec.structs.replace(message, state_hash="0" * 64)
        tell(to, message)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            for name in "uvwxyz":
                driver = s.start(name).node.driver
                if join:
                    monkeypatch.setattr(driver._attempts, "tell", functools.partial(lie, driver._attempts.tell))
                else:
                    monkeypatch.setattr(driver._attempts, "_on_call", lambda *args: None)
                monkeypatch.setattr(driver._schedule, "due", lambda *args: None)
                monkeypatch.setattr(driver._schedule, "is_ours_to_lead", lambda *args: False)
            members = [s.peers[name] for name in "abc"]
            await s.until(lambda: all(len(peer.node.driver.context.liveness.present()) == 9 for peer in members))
            before = len(members[0].rounds("committed"))
            await s.until(lambda: len(members[0].rounds("committed")) >= before + 5, within_s=120)

    run_virtual(main)
