"""Members that bring far too large outer gradients, or lie about those of others: training goes on."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import trio

from p2ptrain.algorithms.codec.floats import NONE
from p2ptrain.errors import WireError
from p2ptrain.protocol.exchange.types import ExchangeEvent, SnapshotTaken
from p2ptrain.protocol.rounds.deciding.averaging import Parts
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.deciding.guard import MeanGuard
from p2ptrain.protocol.rounds.deciding.timeouts import Timeouts
from p2ptrain.protocol.rounds.moving.collection import Collection
from p2ptrain.protocol.rounds.moving.member import Participation, Sender
from p2ptrain.protocol.rounds.moving.reducer import Reducer
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire.messages import Arrived, Attempt, Head, Message, Part, Record, RosterPart
from tests.protocol.swarm import RUN, Shapes, Swarm, TestPeer, common, run_virtual, start_all, swarm
from tests.protocol.wiring import chunk_message

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)
X, Y = ("x", "x.1"), ("y", "y.1")
HEAD = Head("0-g", "0-g", 7, "s", "a", (X, Y), 20, 2**20, None)


def scale_contributions(peer: TestPeer, factor: float) -> list[float]:
    """Let a peer contribute `factor` times its outer gradient from now on; the list counts its snapshots."""
    receive, taken = peer.node.receive, list[float]()

    def scaled(event: ExchangeEvent) -> None:
        if isinstance(event, SnapshotTaken):
            weights, anchor = event.snapshot.weights.numpy(), peer.node.state.anchor
            weights[:] = anchor - np.float32(factor) * (anchor - weights)
            taken.append(trio.current_time())
        receive(event)

    peer.node.receive = scaled  # type: ignore[method-assign]
    return taken


def rounds_since(s: Swarm, began: float, names: str) -> list[list[dict[str, Any]]]:
    return [[r for r in s.peers[name].rounds("committed", "solo") if r["t"] > began] for name in names]


def spoil(s: Swarm, names: str) -> float:
    """The largest weight of these peers: below 1 in training."""
    return max(float(s.peers[name].flat().abs().max()) for name in names)


@pytest.mark.parametrize("averaging", ["parts", "gather"])
@pytest.mark.parametrize("names", ["abx", "abcx"])
def test_a_contribution_of_scale_a_million_is_left_out_and_training_goes_on(
    names: str, averaging: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, averaging=averaging)) as s:
            start_all(s, names)
            await s.until(lambda: common(s, 1, len(names)))
            taken, began, honest = scale_contributions(s.peers["x"], 1e6), trio.current_time(), names[:-1]
            await s.until(lambda: all(len(rounds) >= 4 for rounds in rounds_since(s, began, names)), within_s=60)
            assert taken
            for rounds in rounds_since(s, began + 0.5, honest):
                assert all(r["contributors"] == list(honest) for r in rounds[1:]), rounds
                assert not any(r["reason"] for r in rounds)
            assert spoil(s, names) < 5
            # Leader and member compute the same norm.
            said = re.findall(r"round (\d+): x is left out: the norm of its outer gradient, (\S+), is", caplog.text)
            norms = dict(said)
            assert norms
            for r in rounds_since(s, began + 0.5, "x")[0]:
                why = f"its norm, {norms[str(r['round'])]}, is above the limit, or it came too late"
                assert r["reason"] == f"its outer gradient was left out: {why}"
                assert f"our outer gradient was left out of round {r['round']}: {why}" in caplog.text

    run_virtual(main)


@pytest.mark.parametrize(
    ("owner", "method", "reason"),
    [(Sender, "send", ""), (Reducer, "collect", "its outer gradient was left out: it came too late")],
)
def test_a_member_says_that_it_was_left_out_if_it_has_sent_everything(
    owner: type, method: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x sends nothing, or the reducers drop what it sends."""

    async def send(self: Any) -> None:
        if self._context.peer_id != "x":
            await honest(self)

    def collect(self: Any, sender: str, *args: Any, **options: Any) -> None:
        if sender != "x":
            honest(self, sender, *args, **options)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, round_guard="off")) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 1, 3))
            began = trio.current_time()
            monkeypatch.setattr(owner, method, {"send": send, "collect": collect}[method])
            await s.until(lambda: len(rounds_since(s, began + 0.5, "x")[0]) >= 2, within_s=60)
            for missed in rounds_since(s, began + 0.5, "x")[0]:
                assert (missed["late"], missed["reason"]) == (True, reason)

    honest: Any = getattr(owner, method)
    run_virtual(main)


def test_an_error_in_measuring_what_was_left_out_costs_only_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def squared_norm(*_: object) -> float:
        measured.append(s.peers["x"].exchange.landing_pending)
        raise RuntimeError("a bug of ours")

    async def main() -> None:
        nonlocal s
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 1, 3))
            began = trio.current_time()
            scale_contributions(s.peers["x"], 1e6)
            monkeypatch.setattr(OwnContribution, "squared_norm", squared_norm)
            await s.until(lambda: len(rounds_since(s, began + 0.5, "x")[0]) >= 2, within_s=60)
            assert [r["reason"] for r in rounds_since(s, began + 0.5, "x")[0]] == ["", ""]

    s: Any = None
    measured: list[bool] = []
    run_virtual(main)
    assert measured
    assert all(measured)  # training has the round already
    assert "the reason is not known" in caplog.text
    assert "was interrupted" not in caplog.text


def test_clip_keeps_such_a_member_with_the_weight_that_its_norm_allows() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, round_guard="clip")) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 1, 3))
            scale_contributions(s.peers["x"], 1e6)
            began = trio.current_time()
            await s.until(lambda: all(len(rounds) >= 1 for rounds in rounds_since(s, began, "ab")), within_s=60)
            record = s.peers["a"].node.driver.head.record
            assert record is not None
            weights = {c.peer_id: c.weight for c in record.contributors}
            assert set(weights) == set("abx")
            assert 0 < weights["x"] < 1e-3 * weights["a"]
            assert spoil(s, "ab") < 20

    run_virtual(main)


def test_without_the_guard_it_is_in_the_mean() -> None:
    """So that the other tests can fail."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, round_guard="off")) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 1, 3))
            scale_contributions(s.peers["x"], 1e6)
            await s.until(lambda: spoil(s, "ab") > 1e3, within_s=60)

    run_virtual(main)


def test_of_two_members_the_other_is_scaled_down_in_the_rounds_that_we_lead() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ax")
            await s.until(lambda: common(s, 1, 2))
            a, began = s.peers["a"].node.driver, trio.current_time()
            x = s.peers["x"].node.driver._schedule
            x.is_ours_to_lead = lambda *_: False  # type: ignore[method-assign]
            scale_contributions(s.peers["x"], 1e6)
            await s.until(lambda: all(len(rounds) >= 1 for rounds in rounds_since(s, began, "a")), within_s=120)
            assert a.head.record is not None
            weights = {c.peer_id: c.weight for c in a.head.record.contributors}
            assert set(weights) == set("ax")
            assert 0 < weights["x"] < 1e-3 * weights["a"]
            assert spoil(s, "a") < 20

    run_virtual(main)


# A part for each of five members, so that the liar reduces one.
FIVE_CHUNKS: Shapes = [("head", (5000, 64))]


def lie_as_reducer(peer: TestPeer, lie: Callable[[Arrived], dict[str, Any]]) -> list[Arrived]:
    """Let a peer change its reports as a reducer; returns those that it changes."""
    driver, lies = peer.node.driver, list[Arrived]()
    honest = driver._attempts.tell

    def tell(to: str, message: Message) -> None:
        if isinstance(message, Arrived) and message.complete:
            message = msgspec.structs.replace(message, **lie(message))
            lies.append(message)
        honest(to, message)

    driver._attempts.tell = tell  # type: ignore[method-assign]
    return lies


def test_false_norms_of_a_reducer_leave_out_fewer_than_half_and_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(PLAIN, shapes=FIVE_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 1, 4))
            lies = lie_as_reducer(
                s.peers["x"], lambda m: {"norms": tuple(1e20 if member == "a" else 0.0 for member in m.complete)}
            )
            began = trio.current_time()
            await s.until(lambda: all(len(rounds) >= 4 for rounds in rounds_since(s, began, "bc")), within_s=90)
            assert lies
            for rounds in rounds_since(s, began, "bc"):
                without = [r for r in rounds if len(r["contributors"]) < 4]
                assert without
                assert all(r["contributors"] == ["b", "c", "x"] for r in without)
                for r in without:
                    line = (
                        f"round {r['round']}: a is left out: the norm of its outer gradient, 1e+10, is above the limit"
                    )
                    assert caplog.text.count(line) == 1

    run_virtual(main)


@pytest.mark.parametrize(("largest", "holder"), [(0, "y"), (1, "y"), (2, "x")])
def test_the_reducer_of_the_largest_span_is_avoided_however_many_spans_a_part_has(largest: int, holder: str) -> None:
    record = Record(
        "0-g", "0-g", 8, "s", (), (Part(0, 2048, "", "y"), Part(2048, 3072, "", "x")), "nesterov", 0.7, 0.9, 20, 100,
        (), 0.0, 0.0, (),
    )  # fmt: skip
    norms = [((start, start + 1024), 100.0 if i == largest else 1.0) for i, start in enumerate((0, 1024, 2048))]

    async def main() -> None:
        async with swarm(PLAIN) as s:
            context = s.start("a").node.driver.context
            member = Participation(context, Attempt(0, "y", "y.1"), HEAD, Any, Any, Any)  # type: ignore[arg-type]
            member._sender = Any  # as with a roster
            own = SimpleNamespace(squared_norm=lambda *_: 1.0)
            await member._avoid_largest(record, norms, own)  # type: ignore[arg-type]
            assert context.avoided.backed_off(trio.current_time()) == [holder]

    run_virtual(main)


def test_reducers_that_report_impossible_norms_are_struck_and_no_error_of_ours_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=FIVE_CHUNKS) as s:
            start_all(s, "abcxy")
            await s.until(lambda: common(s, 1, 5))
            lies = [lie_as_reducer(s.peers[name], lambda m: {"norms": (1.7e308,) * len(m.complete)}) for name in "xy"]
            began = trio.current_time()
            await s.until(lambda: all(len(rounds) >= 3 for rounds in rounds_since(s, began, "abc")), within_s=90)
            assert all(lies)
            assert any(s.peers[name].node.links.strikes.keys() & {"x", "y"} for name in "abc")

    run_virtual(main)
    assert "OverflowError" not in caplog.text
    assert "must be between 0 and" in caplog.text


def test_a_reducer_refuses_a_gradient_whose_norm_its_leader_would_refuse() -> None:
    part = RosterPart(0, 2, "r", ())

    def refused(value: float) -> dict[str, WireError]:
        timeouts = Timeouts(peer_timeout_s=30.0, round_timeout_s=60.0)
        collection = Collection(part, ["x"], Grid(0, 2), NONE, timeouts, 0.0, num_stepped=2, audited=False)
        collection.add("x", chunk_message(0, 2), NONE.encode(np.full((2, 64), value, np.float32)), 0.0)
        by_sender = collection.note([collection.measure(chunk) for chunk in collection.take_unmeasured(1)])
        assert by_sender.keys() == collection.failed
        assert by_sender.keys() | collection.norms.keys() == {"x"}
        return by_sender

    assert not refused(1.9e12)
    for value in (2.1e12, -1e38):
        assert "must be at most 5.12e+26" in str(refused(value)["x"])


def test_a_reducer_that_reports_other_commitments_is_not_asked_again() -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=FIVE_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 1, 4))
            lies = lie_as_reducer(s.peers["x"], lambda m: {"roots": (b"?" * 32,) * len(m.complete)})
            began = trio.current_time()

            def recovered() -> bool:
                rounds = rounds_since(s, began, "abc")
                return all(len([r for r in of_peer if len(r["contributors"]) >= 3]) >= 5 for of_peer in rounds)

            await s.until(recovered, within_s=90)
            # Once for each honest leader; the liar also believes itself.
            assert 1 <= len({lie.attempt for lie in lies if lie.attempt.leader != "x"}) <= 3

    run_virtual(main)


# --- the mean ---------------------------------------------------------------------------------------------------------


def spans(norm: float) -> list[tuple[tuple[int, int], float]]:
    """The squared norms of two parts of a mean with this norm."""
    return [((0, 1024), 0.36 * norm**2), ((1024, 2142), 0.64 * norm**2)]


def test_each_section_has_a_history_and_the_whole_is_compared_with_all_of_them() -> None:
    guard = MeanGuard(20)

    def mean(first: int, end: int, norm: float) -> list[tuple[tuple[int, int], float]]:
        return [((first, end), norm**2)]

    for _ in range(3):
        guard.note(mean(0, 1000, 3.0), 0)
    assert guard.refusal(mean(0, 1000, 25.0), HEAD, X, 0)
    # The other section, and so the whole, has no history yet.
    assert not guard.refusal(mean(1000, 1500, 1e9), HEAD, X, 0)
    assert not guard.refusal(mean(0, 1500, 1e9), HEAD, X, 0)
    for _ in range(3):
        guard.note(mean(1000, 1500, 4.0), 0)
    assert guard.limit(1000, 1500, 0) == pytest.approx(32.0)
    for _ in range(3):
        assert guard.limit(0, 1500, 0) == pytest.approx(40.0)
        guard.note(mean(0, 1500, 6.0), 0)
    # Rounds of all sections have a history of their own then, and the sections theirs.
    assert guard.limit(0, 1500, 0) == pytest.approx(48.0)
    assert guard.limit(1000, 1500, 0) == pytest.approx(32.0)


def test_a_mean_above_eight_times_the_median_of_the_last_rounds_is_refused() -> None:
    guard = MeanGuard(20)
    for norm in (1.0, 50.0):
        guard.note(spans(norm), 0)
        assert guard.limit(0, 2142, 0) == np.inf
        assert not guard.refusal(spans(1e9), HEAD, X, 0)
    guard.note(spans(2.0), 0)
    assert guard.limit(0, 2142, 0) == pytest.approx(16.0)
    assert not guard.refusal(spans(15.9), HEAD, X, 0)
    reason = guard.refusal(spans(16.1), HEAD, X, 0)
    assert reason == "the norm of the mean, 16.1, is above the limit of the last rounds, 16"


def test_after_steps_without_a_round_the_limit_is_as_many_times_higher() -> None:
    """Else peers that trained through an outage would refuse each other's mean, longer than it lasted."""
    guard = MeanGuard(20)
    for steps in (20, 40, 60):
        guard.note(spans(1.0), steps)
    assert [guard.limit(0, 2142, steps) for steps in (0, 60, 80, 110, 2060)] == [8.0, 8.0, 8.0, 20.0, 800.0]
    assert not guard.refusal(spans(799.0), HEAD, X, 2060)
    assert guard.refusal(spans(801.0), HEAD, X, 2060)
    assert guard.limit(0, 2142, 2060) == pytest.approx(1600.0)
    guard.note(spans(100.0), 2060)
    # Intervals that stay that long are not multiplied again.
    for steps in (4060, 6060, 8060):
        guard.note(spans(100.0), steps)
    assert guard.limit(0, 2142, 10060) == pytest.approx(800.0)


def test_steps_of_rounds_that_a_peer_sat_out_do_not_tell_how_long_their_intervals_were() -> None:
    """A peer that was frozen catches up with several rounds at one step."""
    guard = MeanGuard(20)
    for steps in (20, 40, 60):
        guard.note(spans(1.0), steps)
    for _ in range(5):
        guard.note(spans(1.0), 60, has_snapshot=False)
    assert guard.limit(0, 2142, 80) == pytest.approx(8.0)
    # They count as usual, so an outage after them raises the limit as any.
    assert guard.limit(0, 2142, 2060) == pytest.approx(800.0)
    guard.count_from(2060)  # its weights were replaced
    assert guard.limit(0, 2142, 2080) == pytest.approx(8.0)


def test_first_rounds_that_a_peer_sat_out_count_as_intervals_of_usual_length() -> None:
    guard = MeanGuard(20, 500)
    for steps in (500, 500, 510):
        guard.note(spans(1.0), steps, has_snapshot=False)
    assert [guard.limit(0, 2142, steps) for steps in (530, 2510)] == [8.0, 800.0]


def test_a_first_interval_is_counted_from_where_the_peer_joined() -> None:
    for guard in (MeanGuard(20, 5000), MeanGuard(20)):
        guard.count_from(5000)
        for steps in (5020, 5040, 5060):
            guard.note(spans(1.0), steps)
        assert guard.limit(0, 2142, 7060) == pytest.approx(800.0)


def test_hurried_rounds_raise_the_limit_of_others_four_times_at_most() -> None:
    guard = MeanGuard(20)
    for steps in range(5):
        guard.note(spans(1.0), steps)
    assert guard.limit(0, 2142, 4) == pytest.approx(8.0)
    assert guard.limit(0, 2142, 24) == pytest.approx(32.0)


def test_rounds_without_any_change_refuse_nothing() -> None:
    guard = MeanGuard(20)
    for _ in range(5):
        guard.note(spans(0.0), 0)
    assert not guard.refusal(spans(1.0), HEAD, X, 0)


def test_a_refusal_doubles_the_limit_once_for_each_voter_and_interval_until_a_round_lands() -> None:
    guard = MeanGuard(20)
    for _ in range(3):
        guard.note(spans(1.0), 0)
    for _ in range(5):
        assert guard.refusal(spans(1e6), HEAD, X, 20)
        assert guard.limit(0, 2142, 0) == pytest.approx(16.0)
    assert guard.refusal(spans(1e6), HEAD, Y, 20)
    assert guard.limit(0, 2142, 0) == pytest.approx(32.0)
    # The round was skipped.
    assert guard.refusal(spans(1e6), HEAD, X, 40)
    assert guard.limit(0, 2142, 0) == pytest.approx(64.0)
    # Another round, by a state that came from elsewhere.
    assert guard.refusal(spans(1e6), msgspec.structs.replace(HEAD, round=8), X, 40)
    assert guard.limit(0, 2142, 0) == pytest.approx(128.0)
    for steps in range(60, 1000, 20):
        assert guard.refusal(spans(1e9), HEAD, X, steps)
    assert guard.limit(0, 2142, 0) == pytest.approx(64 * 8.0)
    guard.note(spans(1.0), 0)
    assert guard.limit(0, 2142, 0) == pytest.approx(8.0)


def test_refusals_of_leaders_that_are_no_voters_leave_the_limit() -> None:
    guard = MeanGuard(20)
    for _ in range(3):
        guard.note(spans(1.0), 0)
    for number in range(20):
        assert guard.refusal(spans(1e6), HEAD, (f"x{number}", "x.1"), 20 * number)
        assert guard.refusal(spans(1e6), HEAD, ("x", f"x.{number + 2}"), 20 * number)
    assert guard.limit(0, 2142, 0) == pytest.approx(8.0)


def multiply_mean(peer: TestPeer, factor: float) -> None:
    """Let a peer serve `factor` times the mean of its part."""
    context = peer.node.driver.context
    honest, codec = context.averaging, context.codec

    class Liar:
        def __getattr__(self, name: str) -> Any:
            return getattr(honest, name)

        def reduce(self, *args: Any) -> Any:
            return Parts.reduce(cast("Parts", self), *args)

        def merge(self, encoded: Any, num_blocks: int) -> bytes:
            return codec.encode(np.float32(factor) * codec.decode(honest.merge(encoded, num_blocks), num_blocks))

    context.averaging = Liar()  # type: ignore[assignment]


def test_a_reducer_that_multiplies_the_mean_costs_some_attempts_and_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, audit_rate=1e-9), shapes=FIVE_CHUNKS) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 4, 4))
            multiply_mean(s.peers["x"], 1e4)
            began = trio.current_time()

            def recovered() -> bool:
                rounds = rounds_since(s, began, "abc")
                return all(len([r for r in of_peer if len(r["contributors"]) >= 3]) >= 5 for of_peer in rounds)

            await s.until(recovered, within_s=120)
            assert spoil(s, "abc") < 5
            head = s.peers["a"].node.driver.head
            assert head.record is not None
            assert "x" not in {part.holder for part in head.record.parts}

    run_virtual(main)
    assert "is refused: the norm of the mean, " in caplog.text


def test_a_swarm_whose_means_have_really_grown_goes_on() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 4, 3))
            for peer in s.peers.values():
                guard = peer.node.driver.context.mean_guard
                for _ in range(8):  # a fiftieth of what they are
                    guard.note(spans(1.0), peer.exchange.steps, has_snapshot=False)
            began = trio.current_time()
            await s.until(lambda: all(len(rounds) >= 6 for rounds in rounds_since(s, began, "abc")), within_s=120)

    run_virtual(main)


def test_a_committed_mean_is_followed_however_large_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """One member alone has a history in which it is too large."""
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 4, 4))
            guard = s.peers["d"].node.driver.context.mean_guard
            for _ in range(8):
                guard.note(spans(1e-12), s.peers["d"].exchange.steps, has_snapshot=False)
            began = trio.current_time()
            await s.until(lambda: all(len(rounds) >= 2 for rounds in rounds_since(s, began, "abcd")), within_s=60)

    run_virtual(main)
    assert "is refused: the norm of the mean, " in caplog.text
