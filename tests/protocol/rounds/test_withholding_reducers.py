"""A reducer that withholds its part, or makes an unusable one: each leader asks it once, and avoids no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from p2ptrain.algorithms.averaging import MAX_MEAN
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import Encoded
from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.rounds.deciding.events import deadline_s
from p2ptrain.protocol.rounds.deciding.grid import mean_codec
from p2ptrain.protocol.rounds.deciding.guard import LEAST_ROUNDS, SpanNorms
from p2ptrain.protocol.rounds.deciding.timeouts import MARGIN, MIN_ATTEMPT_S
from p2ptrain.protocol.rounds.moving.collection import Collection
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.rounds.moving.part_store import KEEP_ALL_S
from p2ptrain.protocol.rounds.moving.pushed_means import MeanPush
from p2ptrain.protocol.wire.messages import Answer, Attempt, Join, Message, Record, Reduced, Refuse, Request, Withdraw
from tests.protocol.swarm import RUN, Shapes, Swarm, common, run_virtual, start_all, swarm

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0, round_guard="off")
# A part for each member.
FOUR_CHUNKS: Shapes = [("head", (4096, 64))]


def five_rounds_since(s: Swarm, began_s: float) -> bool:
    """Whether the honest members have each committed five rounds since then; they avoid nobody but the liar."""
    for name in "abc":
        avoided = set(s.peers[name].node.driver.context.avoided.backed_off(trio.current_time()))
        assert avoided <= {"x"}, name
    rounds = [[r for r in s.peers[name].rounds("committed") if r["t"] > began_s] for name in "abc"]
    return all(len(of) >= 5 for of in rounds)


@pytest.mark.parametrize("late", [False, True], ids=["gives its part to nobody", "reports it as time is up"])
def test_only_the_reducer_that_withholds_its_part_is_avoided(late: bool) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=FOUR_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            x, reported = s.peers["x"].node.driver, list[str]()
            honest = x._attempts.tell

            async def serve(link: Link, request: Request) -> None:
                await link.send_bulk(Answer(request.request, False, "part"), b"", Traffic.ROUND)

            async def report(to: str, message: Message) -> None:
                if late:
                    await trio.sleep_until(deadline_s(s.peers[to].node.driver.round_state) - 0.02)
                honest(to, message)

            def tell(to: str, message: Message) -> None:
                if isinstance(message, Reduced):
                    reported.append(to)
                    s._nursery.start_soon(report, to, message)
                else:
                    honest(to, message)

            x._attempts.tell = tell  # type: ignore[method-assign]
            x._schedule.is_ours_to_lead = lambda *args: False  # type: ignore[method-assign]
            if not late:
                x.context.parts.serve = serve  # type: ignore[method-assign]
                x.context.pushed.push = lambda mean: None  # type: ignore[method-assign]
            began = trio.current_time()

            await s.until(lambda: five_rounds_since(s, began) and bool(reported), within_s=120)
            assert len(reported) <= (len("abc") if late else 1)
            assert len(reported) == len(set(reported))
            if late:
                # The leader's next attempt has more time, should the reducer only be slow.
                assert s.peers[reported[0]].node.driver.context.timeouts.attempt_s() == MARGIN * MIN_ATTEMPT_S

    run_virtual(main)


@pytest.mark.parametrize(
    ("behind", "most_skipped"),
    [
        (lambda *attempt: [Withdraw(*attempt, "no memory")], 0),
        (lambda *attempt: [Refuse(*attempt, attempt[-1])], 0),
        # Each leader avoids it after one attempt.
        (lambda *attempt: [Reduced(*attempt, part, (), (), True) for part in range(4)], 1),
    ],
    ids=["withdraws", "follows another leader", "reports without a hash"],
)
def test_what_a_leader_reads_together_with_the_last_join_stops_no_rounds(
    behind: Callable[[str, int, Attempt], Sequence[Message]],
    most_skipped: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The leader has no plan yet."""

    async def main() -> None:
        async with swarm(PLAIN, shapes=FOUR_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            x, joined = s.peers["x"].node.driver, 0
            honest = x._attempts.tell

            async def join_last(to: str, join: Join) -> None:
                nonlocal joined
                leader = s.peers[to].node.driver
                await s.until(lambda: (led := leader.round_state.proposer) is None or len(led.joins) == len("abc"))
                joined += 1
                for message in [join, *behind(join.lineage, join.round, join.attempt)]:
                    honest(to, message)

            def tell(to: str, message: Message) -> None:
                if isinstance(message, Join):
                    s._nursery.start_soon(join_last, to, message)
                elif not isinstance(message, Reduced):
                    honest(to, message)

            monkeypatch.setattr(x._attempts, "tell", tell)
            monkeypatch.setattr(x._schedule, "is_ours_to_lead", lambda *args: False)
            began = trio.current_time()

            def gone_on() -> bool:
                rounds = [[r for r in s.peers[name].rounds("committed") if r["t"] > began] for name in "abc"]
                return all(len(of) >= 5 for of in rounds)

            await s.until(gone_on, within_s=120)
            assert joined >= 3
            assert all(sum(r["t"] > began for r in s.peers[name].rounds("skipped")) <= most_skipped for name in "abc")

    run_virtual(main)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("lie", ["does not decode", "beyond what a mean can be", "larger than the last rounds"])
def test_only_the_reducer_of_an_unusable_mean_is_avoided(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without audits, and where members withdraw because of the mean alone."""

    async def main() -> None:
        run = dataclasses.replace(PLAIN, round_guard="exclude", audit_rate=0.0)
        async with swarm(run, shapes=FOUR_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, LEAST_ROUNDS + 1, 4))
            x, made = s.peers["x"].node.driver, 0
            honest, codec = x.context.averaging.merge, mean_codec(run)

            def merge(encoded: Sequence[tuple[Encoded, float]], num_blocks: int) -> bytes:
                nonlocal made
                made += 1
                mean = honest(encoded, num_blocks)
                match lie:
                    case "does not decode":
                        return b"\xff" * len(mean)
                    case "beyond what a mean can be":
                        return codec.encode(np.full((num_blocks, BLOCK), 2 * MAX_MEAN, np.float32))
                return codec.encode(np.float32(1e5) * codec.decode(mean, num_blocks))

            monkeypatch.setattr(x.context.averaging, "merge", merge)
            monkeypatch.setattr(x._schedule, "is_ours_to_lead", lambda *args: False)
            began = trio.current_time()

            await s.until(lambda: five_rounds_since(s, began), within_s=120)
            assert 1 <= made <= len("abc")

    run_virtual(main)


@pytest.mark.parametrize(
    ("names", "given_up"),
    [
        # Each gives up the other's outer gradients too, so that no member is complete at all other reducers.
        ("abcde", {"d": "abce", "e": "abcd"}),
        ("abcdefg", {"e": "abcdfg", "f": "abcdeg", "g": "abcdef"}),
        # Each gives up less than half of the members.
        ("abcdef", {"e": "ab", "f": "cd"}),
    ],
)
def test_reducers_that_together_say_that_nothing_arrives_are_avoided(
    names: str, given_up: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = False
    add = Collection.add

    def refuse(self: Collection, sender: str, *args: Any, **kwargs: Any) -> bool:
        if lying and sender in given_up.get(self._part.reducer, ""):
            self.fail(sender)
        return add(self, sender, *args, **kwargs)

    monkeypatch.setattr(Collection, "add", refuse)

    async def main() -> None:
        nonlocal lying
        async with swarm(dataclasses.replace(PLAIN, audit_rate=0.0), shapes=[("head", (len(names) * 1024, 64))]) as s:
            start_all(s, names)
            await s.until(lambda: common(s, 2, len(names)))
            lying, honest = True, [s.peers[name] for name in names if name not in given_up]
            before = s.peers["a"].node.driver.head.round
            await s.until(lambda: all(peer.node.driver.head.round >= before + 5 for peer in honest), within_s=140)

    run_virtual(main)


def test_who_got_no_part_of_its_reducer_gets_it_of_others_during_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """a notices after 20 s that x gives it nothing; the others have taken their next snapshots after 10 s."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=100), shapes=FOUR_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            a, x, pushed = s.peers["a"], s.peers["x"].node.driver.context.parts, s.peers["x"].node.driver.context.pushed
            push, serve, replaced = pushed._push, x.serve, list[str]()

            async def push_to_others(link: Link, mean: MeanPush) -> None:
                if link.peer_id != "a":
                    await push(link, mean)

            async def serve_others(link: Link, request: Request) -> None:
                if link.peer_id != "a":
                    await serve(link, request)
                else:
                    await link.send_bulk(Answer(request.request, False, "part"), b"", Traffic.ROUND)

            async def refuse(self: Participation, record: Record, norms: SpanNorms) -> None:
                if record.round > round_:
                    raise RoundFailedError("refused")

            round_ = a.node.driver.round_state.round
            pushed._push, x.serve = push_to_others, serve_others  # type: ignore[method-assign]
            monkeypatch.setattr(Participation, "_check_mean", refuse)
            monkeypatch.setattr(a.node, "fall_behind", replaced.append)
            stores = {name: s.peers[name].node.driver.context.parts for name in "bcx"}
            await s.until(lambda: all(s.peers[name].node.driver.head.round == round_ for name in "bcx"))
            landed = trio.current_time()
            await s.until(lambda: all(s.peers[name].node.driver._taker.own is not None for name in "bcx"))
            assert a.node.driver.head.round < round_
            await s.until(lambda: bool(replaced) or a.rounds("committed")[-1]["round"] == round_)
            assert not replaced
            # Once no member has asked for a while, the parts go, however late one is.
            await trio.sleep_until(landed + 2 * KEEP_ALL_S)
            for name, store in stores.items():
                record = s.peers[name].node.driver.head.record
                assert record is not None
                assert set(store._kept) <= {part.digest for part in record.parts if part.holder == name}

    run_virtual(main)
