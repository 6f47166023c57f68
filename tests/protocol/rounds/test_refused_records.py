"""A record that some voters are READY with and others refuse for a while: rounds go on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.deciding.guard import SpanNorms
from p2ptrain.protocol.rounds.landing.commit import OLDER_AVERAGED, OTHER_NAMED
from p2ptrain.protocol.rounds.moving.leader import AveragingLeader
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.wire.messages import Message, Proposal, Record, Reduce, Reduced
from tests.protocol.swarm import RUN, Swarm, common, run_virtual, start_all, swarm

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)


def ready_with(s: Swarm, name: str) -> Record | None:
    proposal = s.peers[name].node.driver.round_state.acceptor.proposal
    return proposal.record if proposal is not None else None


# Records name contributions by Merkle roots, by nothing, and by hashes.
STRATEGIES = [("parts", 0.1), ("parts", 0.0), ("gather", 0.1)]


def refusing_means(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Whoever is in this set refuses every record."""
    refusing: set[str] = set()
    check_mean = Participation._check_mean

    async def _check_mean(self: Participation, record: Record, norms: SpanNorms) -> None:
        if self._context.peer_id in refusing:
            raise RoundFailedError("refused")
        await check_mean(self, record, norms)

    monkeypatch.setattr(Participation, "_check_mean", _check_mean)
    return refusing


def have_skipped(s: Swarm, names: str) -> Callable[[], bool]:
    """Whether each of these peers has skipped another round."""
    before = {name: len(s.peers[name].rounds("skipped")) for name in names}
    return lambda: all(len(s.peers[name].rounds("skipped")) > before[name] for name in names)


@pytest.mark.parametrize(("averaging", "audit_rate"), STRATEGIES)
def test_who_has_skipped_a_round_still_accepts_a_record_with_what_it_gave_before(
    averaging: str, audit_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c and d are READY with a record that a and b refuse until they have skipped the round; e has fallen silent.

    a and b have encoded their next outer gradients when the record is decided.
    """
    refusing = refusing_means(monkeypatch)
    run = dataclasses.replace(PLAIN, averaging=averaging, audit_rate=audit_rate, max_missed_rounds=0)

    async def main() -> None:
        async with swarm(run) as s:
            start_all(s, "abcde")
            await s.until(lambda: common(s, 2, 5))
            silent = s.peers["e"].node.driver
            silent._attempts._on_call = lambda *_: None  # type: ignore[method-assign]
            silent._schedule.due = lambda *_: None  # type: ignore[method-assign]
            silent._schedule.is_ours_to_lead = lambda *_: False  # type: ignore[method-assign]
            refusing.update("ab")
            await s.until(lambda: ready_with(s, "c") is not None and ready_with(s, "c") == ready_with(s, "d"))
            record = ready_with(s, "c")
            assert record is not None
            assert {"a", "b"} < {c.peer_id for c in record.contributors}
            await s.until(have_skipped(s, "ab"))
            takers = [s.peers[name].node.driver._taker for name in "ab"]
            await s.until(lambda: all(taker.own is not None for taker in takers))
            for taker in takers:
                await taker.encode(taker._context.grid.bounds(0, taker._context.state.num_blocks))
            refusing.clear()
            await s.until(lambda: all(s.peers[name].node.driver.head.round > record.round for name in "abcd"))
            for name in "abcd":
                (outcome,) = (r for r in s.peers[name].rounds("committed") if r["round"] == record.round)
                assert outcome["record_sha256"] == record.sha256
                assert outcome["tokens_discarded"] == 0
                if name in "ab":
                    assert (outcome["late"], outcome["reason"]) == (True, OLDER_AVERAGED)

    run_virtual(main)


@pytest.mark.parametrize(("averaging", "audit_rate"), STRATEGIES)
def test_after_a_skipped_round_what_members_give_next_lands(
    averaging: str, audit_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = refusing_means(monkeypatch)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, averaging=averaging, audit_rate=audit_rate)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 2, 3))
            refusing.update("abc")
            await s.until(have_skipped(s, "abc"))
            refusing.clear()
            skipped = s.peers["a"].node.driver.round_state.round
            await s.until(lambda: all(p.node.driver.head.round > skipped for p in s.peers.values()))
            for peer in s.peers.values():
                (outcome,) = (r for r in peer.rounds("committed") if r["round"] == skipped)
                assert (outcome["late"], outcome["reason"]) == (False, "")

    run_virtual(main)


def test_with_gather_a_record_with_other_bytes_of_a_member_is_refused_and_does_not_land_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every leader gives the bytes of b for those of a; c is enough for a quorum."""
    caplog.set_level(logging.DEBUG)
    lead = AveragingLeader.run

    async def run(self: AveragingLeader, joins: Any) -> Proposal:
        proposal = await lead(self, joins)
        record = proposal.record
        others = {part.holder: part.digest for part in record.parts}
        parts = (msgspec.structs.replace(p, digest=others["b"]) if p.holder == "a" else p for p in record.parts)
        return msgspec.structs.replace(proposal, record=msgspec.structs.replace(record, parts=tuple(parts)))

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, averaging="gather")) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 2, 3))
            monkeypatch.setattr(AveragingLeader, "run", run)
            false = s.peers["a"].node.driver.round_state.round
            await s.until(lambda: all(p.node.driver.head.round > false for p in s.peers.values()))
            for name, peer in s.peers.items():
                (outcome,) = (r for r in peer.rounds("committed") if r["round"] == false)
                assert (outcome["late"], outcome["reason"]) == ((True, OTHER_NAMED) if name == "a" else (False, ""))

    run_virtual(main)
    assert "the record names another outer gradient of ours than we sent" in caplog.text
    assert any(OTHER_NAMED in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_with_gather_a_reducer_that_reports_made_up_hashes_stops_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers before any other reducer has hashed what it received."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, averaging="gather", round_guard="off")) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 2, 4))
            s.worker.work_s = 0.03
            d, lies = s.peers["d"].node.driver, 0
            receive, tell = d._attempts.receive, d._attempts.tell

            def lie(sender: str, message: Message, payload: bytes = b"") -> None:
                nonlocal lies
                reducer = d._attempts._member and d._attempts._member._reducer
                if isinstance(message, Reduce) and sender != "d" and reducer is not None:
                    lies += 1
                    attempt, digests = (message.lineage, message.round, message.attempt), ("0" * 64,) * 4
                    tell(sender, Reduced(*attempt, reducer._number, digests[: len(message.contributors)], (), False))
                else:
                    receive(sender, message, payload)

            monkeypatch.setattr(d._attempts, "receive", lie)
            monkeypatch.setattr(d._schedule, "is_ours_to_lead", lambda *args: False)
            began = trio.current_time()

            def gone_on() -> bool:
                for name in "abc":
                    assert not s.peers[name].node.driver.context.avoided.backed_off(trio.current_time())
                rounds = [[r for r in s.peers[name].rounds("committed") if r["t"] > began] for name in "abc"]
                return all(len(of) >= 5 for of in rounds)

            await s.until(gone_on, within_s=60)
            assert lies >= 3

    run_virtual(main)
