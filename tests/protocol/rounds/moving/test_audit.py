"""Reducers, auditors and contributors that lie: who lied is struck by those that saw it, and nobody else."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.rounds.deciding import consensus
from p2ptrain.protocol.rounds.moving.audit import KEEP_S, Audited, Audits, Draw, Verdict, draw_of
from p2ptrain.protocol.wire.messages import Accuse, Contribution, Contributor, Part, Record, Request
from tests.protocol.swarm import RUN, Swarm, TestPeer, common, run_virtual, start_all, swarm

# Rounds are ten seconds apart: time for an audit.
PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0, audit_rate=1.0, sync_every=100)
NAMES = "abcx"


def record_of(number: int, root: bytes = bytes(32)) -> Record:
    contributors = tuple(Contributor(name, f"{name}.1", 1.0, root) for name in NAMES)
    parts = tuple(Part(1024 * i, 1024 * (i + 1), "00", name) for i, name in enumerate(NAMES))
    return Record("0-g", "0-g", number, "", contributors, parts, "nesterov", 0.7, 0.9, 20, 100, (), 0.0, 0.0, ())


def test_the_record_draws_whether_which_part_and_by_whom() -> None:
    drawn = [draw_of(record_of(number), 0.1) for number in range(2000)]
    audits = [draw for draw in drawn if draw is not None]
    assert 150 < len(audits) < 250
    assert {draw.part for draw in audits} == {0, 1, 2, 3}
    assert {draw.auditor for draw in audits} == set(NAMES)
    assert all(NAMES[draw.part] != draw.auditor for draw in audits)
    assert drawn == [draw_of(record_of(number), 0.1) for number in range(2000)]
    assert all(draw_of(record_of(number), 1.0) for number in range(50))
    assert not any(draw_of(record_of(number), 0.0) for number in range(50))
    assert draw_of(record_of(1, root=b""), 1.0) is None
    alone = msgspec.structs.replace(record_of(1), contributors=record_of(1).contributors[:1])
    assert draw_of(msgspec.structs.replace(alone, parts=alone.parts[:1]), 1.0) is None


def start(s: Swarm) -> None:
    start_all(s, NAMES)


def audits_of(peer: TestPeer) -> Audits:
    return peer.node.driver.committer.audits


def strikes(s: Swarm, by: str = "abc") -> dict[str, set[str]]:
    """Who has struck whom."""
    return {name: {of for of, count in s.peers[name].node.links.strikes.items() if count} for name in by}


def reduce_falsely(peer: TestPeer, factor: float = 1.5) -> list[float]:
    """Let a peer average its part falsely, by a factor that no other check sees; the list has one for each chunk.

    Its own audits, which `reduce`, stay honest: it would drop links by accusing others.
    """
    driver, lies = peer.node.driver, list[float]()
    honest = driver.context.averaging
    codec = driver.context.codec

    class Liar:
        def __getattr__(self, name: str) -> Any:
            return getattr(honest, name)

        def merge(self, encoded: Any, num_blocks: int) -> bytes:
            lies.append(factor)
            return codec.encode(np.float32(factor) * codec.decode(honest.merge(encoded, num_blocks), num_blocks))

    driver.context.averaging = Liar()  # type: ignore[assignment]
    return lies


def test_a_reducer_that_lies_is_struck_by_all_and_avoided_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            record = s.peers["a"].node.driver.head.record
            assert record is not None
            liar = record.parts[0].holder
            others = NAMES.replace(liar, "")
            lies = reduce_falsely(s.peers[liar])
            with monkeypatch.context() as patched:
                # All are READY before the outcome: otherwise they only warn of the reducer.
                patched.setattr(consensus, "is_quorum", lambda present, voters: set(voters) <= set(present))
                await s.until(lambda: all(liar in struck for struck in strikes(s, others).values()), within_s=600)
            assert lies
            assert strikes(s, others) == {name: {liar} for name in others}
            told = trio.current_time()
            await s.until(lambda: all(p.rounds()[-1]["t"] > told + 25 for p in s.peers.values()), within_s=120)
            for name in others:
                head = s.peers[name].node.driver.head
                assert head.record is not None
                assert liar not in {part.holder for part in head.record.parts}

    run_virtual(main)
    assert "it reported a wrong mean of part" in caplog.text


def test_honest_reducers_pass_every_audit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 5, 4), within_s=120)
            assert strikes(s, NAMES) == {name: set() for name in NAMES}

    run_virtual(main)
    fitting = [record for record in caplog.records if record.getMessage().endswith("it fits")]
    assert len(fitting) >= 4
    assert "differs" not in caplog.text


def accuse(peer: TestPeer) -> list[Draw]:
    """Let a peer accuse whomever it audits, and say so five times; the list has its accusations."""
    accusations, node = list[Draw](), peer.node
    audits = audits_of(peer)

    async def audit() -> None:
        audited = audits._audited
        if audited is not None and audited.draw.auditor == peer.peer_id:
            accusations.append(audited.draw)
            await trio.sleep(1)
            for link in node.links.trainers() * 5:
                link.send(Accuse(audited.record.lineage, audited.record.round, audited.draw.part))

    audits.audit = audit  # type: ignore[method-assign]
    return accusations


def test_a_framed_reducer_is_not_struck_and_its_false_accuser_is() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            accusations, checks = accuse(s.peers["x"]), 0
            for name in "abc":
                audits = audits_of(s.peers[name])

                async def verify(*args: Any, honest: Callable[..., Any] = audits._verify) -> Any:
                    nonlocal checks
                    checks += 1
                    return await honest(*args)

                audits._verify = verify  # type: ignore[method-assign]
            await s.until(lambda: accusations and any(strikes(s).values()), within_s=600)
            before = checks
            await trio.sleep(5)
            # All that are not the accused: the accusation was checked once by each, however often it was sent.
            assert before <= checks <= 2 + before
            accused = {NAMES[draw.part] for draw in accusations}
            for name, struck in strikes(s).items():
                assert struck == (set() if name in accused else {"x"})

    run_virtual(main)


def test_the_accused_round_is_checked_though_another_one_lands_meanwhile() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            record = audits_of(s.peers["a"])._last
            assert record is not None
            draw = draw_of(record, 1.0)
            assert draw is not None
            peer = s.peers[next(name for name in NAMES if name not in (draw.auditor, record.parts[draw.part].holder))]
            audits, checked = audits_of(peer), list[int]()
            await s.until(lambda: audits._last == record)

            async def verify(audited: Audited) -> Verdict:
                checked.append(audited.record.round)
                return Verdict.UNKNOWN

            audits._verify = verify  # type: ignore[method-assign]
            peer.node.driver.deliver(draw.auditor, Accuse(record.lineage, record.round, draw.part))
            # Before the task that checks it has begun.
            await audits.keep(msgspec.structs.replace(record, round=record.round + 1), None)
            await trio.sleep(0.1)
            assert checked == [record.round]

    run_virtual(main)


def test_chunks_are_dropped_in_time_though_their_audit_fails() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)

            async def verify(audited: Audited) -> Verdict:
                raise RuntimeError("a bug of ours")

            for peer in s.peers.values():
                audits_of(peer)._verify = verify  # type: ignore[method-assign]
            await s.until(lambda: common(s, 1, 4))
            for peer in s.peers.values():
                peer.paused = True
            await s.until(lambda: all(audits_of(peer)._audited for peer in s.peers.values()))
            await trio.sleep(KEEP_S + 1)
            assert not any(audits_of(peer)._audited for peer in s.peers.values())

    run_virtual(main)


def test_an_accusation_by_a_peer_that_is_not_the_auditor_is_a_strike() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            audits = audits_of(s.peers["a"])
            record = audits._last
            assert record is not None
            draw = draw_of(record, 1.0)
            assert draw is not None
            liar = next(name for name in "bcx" if name != draw.auditor)
            link = s.peers[liar].node.links.get("a")
            assert link is not None
            # Of a round that is not our last: nothing happens.
            link.send(Accuse(record.lineage, record.round + 7, draw.part))
            await trio.sleep(0.5)
            assert not s.peers["a"].node.links.strikes
            link.send(Accuse(record.lineage, record.round, draw.part))
            await trio.sleep(0.5)
            assert s.peers["a"].node.links.strikes == {liar: 1}

    run_virtual(main)


def test_a_contributor_that_gives_auditors_other_bytes_is_struck_and_one_that_gives_none_is_not() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            audits, served = audits_of(s.peers["x"]), 0
            honest = audits.serve

            async def serve_none(link: Link, request: Request) -> None:
                nonlocal served
                served += 1
                await honest(link, msgspec.structs.replace(request, subject="gone"))

            audits.serve = serve_none  # type: ignore[method-assign]
            await s.until(lambda: served > 20, within_s=600)
            assert not any(strikes(s).values())

            async def serve_others(link: Link, request: Request) -> None:
                audited = audits._audited
                if audited is not None and audited.chunks:
                    audited.chunks[0] = audited.chunks[0][:-1] + bytes([audited.chunks[0][-1] ^ 1])
                await honest(link, request)

            audits.serve = serve_others  # type: ignore[method-assign]
            await s.until(lambda: any(strikes(s).values()), within_s=600)
            assert set().union(*strikes(s).values()) == {"x"}

    run_virtual(main)


def test_a_reducer_that_is_restarted_during_its_audit_does_not_withhold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            asked = list[str]()
            for peer in s.peers.values():
                audits = audits_of(peer)

                async def serve(
                    link: Link, request: Request, audits: Audits = audits, honest: Callable[..., Any] = audits.serve
                ) -> None:
                    audited = audits._audited
                    if audited is not None and audited.part.holder == audits._context.peer_id:
                        asked.append(audited.part.holder)
                        request = msgspec.structs.replace(request, subject="gone")
                    await honest(link, request)

                audits.serve = serve  # type: ignore[method-assign]
            await s.until(lambda: bool(asked), within_s=120)
            s.kill(asked[0])
            s.start(asked[0])
            await trio.sleep(20)

    run_virtual(main)
    assert "withholds" not in caplog.text


def test_a_member_whose_chunks_are_not_under_its_root_is_left_out() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start(s)
            await s.until(lambda: common(s, 1, 4))
            honest, lies = Link.send_bulk, 0

            async def send_bulk(link: Link, message: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal lies
                if isinstance(message, Contribution) and link in s.peers["x"].node.links.live.values():
                    lies += bool(message.root)
                    message = msgspec.structs.replace(message, root=bytes(32) if message.root else b"")
                return await honest(link, message, *args, **kwargs)

            began = trio.current_time()
            patch = pytest.MonkeyPatch()
            with patch.context() as patched:
                patched.setattr(Link, "send_bulk", send_bulk)
                await s.until(
                    lambda: all(any(r["t"] > began + 15 for r in s.peers[name].rounds()) for name in "abc"),
                    within_s=120,
                )
            assert lies
            assert set().union(*strikes(s).values()) == {"x"}
            for name in "abc":
                assert s.peers[name].rounds()[-1]["contributors"] == list("abc")

    run_virtual(main)
