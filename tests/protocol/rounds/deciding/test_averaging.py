"""Averaging strategies: decoded means, and rounds of real nodes with each strategy."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from blake3 import blake3

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.errors import WireError
from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.rounds.deciding import averaging as strategies
from p2ptrain.protocol.rounds.deciding.averaging import (
    MERGES,
    STRATEGIES,
    Averaging,
    Conclusion,
    Gather,
    Parts,
    Plan,
    averaging_of,
    check_decodes,
    merge_of,
)
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec
from p2ptrain.protocol.rounds.deciding.record import check_roster
from p2ptrain.protocol.rounds.deciding.timeouts import Timeouts
from p2ptrain.protocol.rounds.moving.collection import Collection
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.messages import Attempt, Contributor, Join, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.settings.config import AVERAGINGS, ROUND_MEANS, RunConfig
from tests.protocol.rounds.deciding.test_policy import join_of
from tests.protocol.swarm import RUN, Witness, after, common, run_virtual, start_all, swarm, when
from tests.protocol.wiring import chunk_message

BLOCKS = 2500
WEIGHTS = {"a": 3.0, "b": 1.0, "c": 2.0}
CONTRIBUTORS = tuple(Contributor(name, f"{name}.1", weight, bytes(32)) for name, weight in WEIGHTS.items())
ATTEMPT = Attempt(1, "a", "a.1")
TIMEOUTS = Timeouts(peer_timeout_s=30.0, round_timeout_s=60.0)
RUNS = {name: RunConfig(averaging=name) for name in STRATEGIES}


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((BLOCKS, 64), np.float32) for name in WEIGHTS}


def plan_of(run: RunConfig, reducers: str = "abc") -> tuple[RosterPart, ...]:
    joins = {name: join_of(name, tuple(WEIGHTS), rate=1e6) for name in WEIGHTS}
    return tuple(averaging_of(run).plan(joins, set(WEIGHTS) - set(reducers), Grid(0, BLOCKS)))


def check_plan(averaging: Averaging, parts: tuple[RosterPart, ...]) -> None:
    """As a member checks a roster."""
    roster = Roster("0-g", 1, ATTEMPT, ("a", "b", "c"), parts, ())
    check_roster(roster)
    averaging.check_plan(roster, Grid(0, BLOCKS))


def whole_round(
    run: RunConfig, reducers: str = "abc", factor: float = 1.0
) -> tuple[Averaging, Record, dict[str, bytes]]:
    """Everything that a strategy does in one attempt, without a network: the record, and the blobs it names."""
    averaging, codec = averaging_of(run), gradient_codec(run)
    plan = plan_of(run, reducers)
    check_plan(averaging, plan)
    vectors, blobs = gradients(), dict[str, bytes]()
    reports: dict[int, Reduced] = {}
    for i, part in enumerate(plan):
        senders = [c for c in CONTRIBUTORS if c.peer_id in (part.senders or WEIGHTS)]
        collection = Collection(
            part, [c.peer_id for c in senders], Grid(0, BLOCKS), codec, TIMEOUTS, 0.0, num_stepped=BLOCKS, audited=False
        )
        bounds = Grid(0, BLOCKS).bounds(part.start, part.stop)
        for c in senders:
            for low, high in bounds:
                chunk = codec.encode(factor * vectors[c.peer_id][low:high])
                collection.add(c.peer_id, chunk_message(low, high), chunk, 0.0, checked=True)
        gram = collection.gram(senders)
        named = {blake3(b).hexdigest(): bytes(b) for b in averaging.reduce(bounds, collection.chunks, senders)}
        blobs.update(named)
        reports[i] = Reduced("0-g", 1, ATTEMPT, i, tuple(named), gram(), False)
    assert averaging.conclude(plan, CONTRIBUTORS, {}) is None
    conclusion = averaging.conclude(plan, CONTRIBUTORS, reports)
    assert conclusion is not None
    if all(conclusion.grams):  # empty if no peer has all outer gradients
        whole = np.sum(conclusion.grams, axis=0).reshape(3, 3)
        exact = factor**2 * np.array([[float((x * y).sum()) for y in vectors.values()] for x in vectors.values()])
        # Of normal values, three levels have 0.814 of the squares, and topk's of their larger half 0.866.
        rtol = 0.2 if run.round_codec in ("int2", "topk") else 0.1
        np.testing.assert_allclose(whole, exact, rtol=rtol, atol=0.02 * exact.max())
    record = Record(
        "0-g", "0-g", 1, "", CONTRIBUTORS, conclusion.parts, "nesterov", 0.7, 0.9, 20, 100, (), 0.0, 0.0, (),
    )  # fmt: skip
    averaging.check_record(record, Grid(0, BLOCKS))
    for part in record.parts:
        assert averaging.size_bytes(record, part) == len(blobs[part.digest])
    return averaging, record, blobs


def decoded(run: RunConfig, reducers: str = "abc") -> np.ndarray:
    averaging, record, blobs = whole_round(run, reducers)
    spans = averaging.spans(record)
    assert [low for low, _ in spans] == [0, *(high for _, high in spans[:-1])]
    assert spans[-1][1] == BLOCKS
    bounds = [chunk for span in spans for chunk in Grid(0, BLOCKS).bounds(*span)]
    means = [(averaging.mean(record, blobs.__getitem__, *chunk), chunk) for chunk in bounds]
    return np.concatenate([codec.decode(data, stop - start) for (codec, data), (start, stop) in means])


@pytest.mark.parametrize("mean", ROUND_MEANS)
def test_gather_is_the_mean_of_what_was_sent_and_nothing_is_lost(mean: str) -> None:
    run = dataclasses.replace(RUNS["gather"], round_mean=mean)
    codec, merge, vectors = gradient_codec(run), merge_of(run), gradients()
    reference = [
        merge([(codec.encode(values[low:high]), WEIGHTS[name]) for name, values in vectors.items()], codec, high - low)
        for low, high in Grid(0, BLOCKS).bounds(0, BLOCKS)
    ]
    assert decoded(run).tobytes() == np.concatenate(reference).tobytes()
    assert decoded(run, "b").tobytes() == np.concatenate(reference).tobytes()  # whoever received it


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "fp16", "none", "topk"])
@pytest.mark.parametrize("name", RUNS)
def test_every_strategy_gives_about_the_mean_with_every_codec(name: str, codec: str) -> None:
    run = dataclasses.replace(RUNS[name], round_codec=codec, round_density=0.5)
    total = sum(WEIGHTS.values())
    mean = sum(np.float32(WEIGHTS[peer] / total) * values for peer, values in gradients().items())
    error = np.abs(decoded(run) - mean).max()
    most = {"none": 1e-6, "fp16": 2e-3, "int8": 0.06, "int4": 0.9, "int2": 3.0, "topk": 2.0}
    assert error < most[codec]


@pytest.mark.parametrize("mean", ROUND_MEANS)
def test_parts_have_the_same_bits_on_every_reducer(mean: str) -> None:
    run = dataclasses.replace(RUNS["parts"], round_mean=mean)
    assert decoded(run, "abc").tobytes() == decoded(run, "c").tobytes()


@pytest.mark.parametrize("name", RUNS)
def test_plans_and_records_of_others_are_checked(name: str) -> None:
    averaging, record, _ = whole_round(RUNS[name])
    plan = plan_of(RUNS[name])
    wrong: list[tuple[RosterPart, ...]] = [
        (), plan[:1] if name == "parts" else (plan[0], plan[0]),
        (msgspec.structs.replace(plan[0], reducer="x"), *plan[1:]),
        (msgspec.structs.replace(plan[0], start=1), *plan[1:]),
        (*plan[:-1], msgspec.structs.replace(plan[-1], stop=BLOCKS + 9)),
        (msgspec.structs.replace(plan[0], senders=("b",)), *plan[1:]),
    ]  # fmt: skip
    for parts in wrong:
        with pytest.raises(WireError):
            check_plan(averaging, parts)
    for changed in (record.parts[1:], (msgspec.structs.replace(record.parts[0], stop=7), *record.parts[1:])):
        with pytest.raises(WireError):
            averaging.check_record(msgspec.structs.replace(record, parts=changed), Grid(0, BLOCKS))


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("name", RUNS)
def test_a_mean_that_could_overflow_the_anchor_is_refused_before_ready(name: str, codec: str) -> None:
    run = dataclasses.replace(RUNS[name], round_codec=codec)
    largest = max(np.abs(values).max() for values in gradients().values())
    averaging, record, blobs = whole_round(run, factor=0.99 * MAX_GRADIENT / largest)
    for chunk in Grid(0, BLOCKS).bounds(0, BLOCKS):
        check_decodes(averaging, record, blobs.__getitem__, BLOCKS, chunk)
    averaging, record, blobs = whole_round(run, factor=10 * MAX_GRADIENT)
    with pytest.raises(WireError, match="a value is beyond"):
        check_decodes(averaging, record, blobs.__getitem__, BLOCKS, Grid(0, BLOCKS).bounds(0, BLOCKS)[0])


def test_what_an_attempt_can_lose_is_up_to_the_strategy() -> None:
    parts, gather = (plan_of(RUNS[name]) for name in ("parts", "gather"))
    assert averaging_of(RUNS["parts"]).is_complete(parts, {0, 1, 2})
    assert not averaging_of(RUNS["parts"]).is_complete(parts, {0, 2})
    assert averaging_of(RUNS["gather"]).is_complete(gather, {2})
    assert not averaging_of(RUNS["gather"]).is_complete(gather, ())


def test_a_strategy_is_a_line_of_configuration() -> None:
    assert (*STRATEGIES, "pairwise") == AVERAGINGS
    # The one round of a run with pairwise steps.
    assert isinstance(averaging_of(RunConfig(averaging="pairwise", outer_optimizer="sgdm")), Parts)
    assert tuple(MERGES) == ROUND_MEANS
    assert RunConfig().averaging == "parts"


def test_the_example_in_contributing_is_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[4] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page[page.index("a class `Single`") :].partition("\n## ")[0]
    blocks = re.findall(r"^    ```python\n(.*?)^    ```$", section, re.DOTALL | re.MULTILINE)
    strategy, line, tests = map(textwrap.dedent, blocks)
    made: dict[str, Any] = {**vars(strategies), "__name__": "single"}
    exec(strategy, made)
    # The settings take no other name.
    monkeypatch.setitem(STRATEGIES, "gather", made["Single"])
    added = line.partition(" = ")[2].replace("Single", "Parts")
    assert list(eval(added)) == [*STRATEGIES, "single"], "CONTRIBUTING.md, Add an averaging strategy, step 2"
    namespace = dict(globals())
    exec(tests.replace('"single"', '"gather"'), namespace)
    for name in re.findall(r"def (test_\w+)", tests):
        namespace[name]()
    test_plans_and_records_of_others_are_checked("gather")
    for codec in ("int8", "topk"):
        test_every_strategy_gives_about_the_mean_with_every_codec("gather", codec)


# --- rounds of real nodes -------------------------------------------------------------------------------------------

GATHER = dataclasses.replace(RUN, averaging="gather", fragment_fraction=0.0)


@pytest.mark.parametrize("codec", ["int8", "topk", "none"])
def test_gather_commits_equal_hashes_on_all_peers(codec: str) -> None:
    async def main() -> None:
        witness = Witness()
        async with swarm(dataclasses.replace(GATHER, round_codec=codec, round_density=0.02)) as s:
            start_all(s, "abc", witness)
            await s.until(lambda: common(s, 4, 3))
            assert not any(p.rounds("skipped") for p in s.peers.values())
            if codec == "none":
                assert witness.check_values() >= 6

    run_virtual(main)


def test_a_late_joiner_of_a_run_that_gathers_takes_part() -> None:
    async def main() -> None:
        async with swarm(GATHER) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            late = s.start("c")
            await s.until(lambda: sum(r["group_size"] == 3 for r in late.rounds("committed")) >= 2)

    run_virtual(main)


@pytest.mark.parametrize("kind", [messages.Contribution, messages.Arrived, messages.Reduced, messages.Propose])
def test_a_run_that_gathers_loses_a_member_and_no_round(kind: type[messages.Message]) -> None:
    """No reducer is needed: the remaining peers continue the attempt if they are a quorum."""

    async def main() -> None:
        async with swarm(dataclasses.replace(GATHER, round_codec="none")) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            victims: list[str] = []

            def kill(source: str, target: str) -> PacketFault:
                victims.append(source)
                s.kill(source)
                return PacketFault.DROP

            await s.until(when(s, kind, 2, kill), within_s=60)
            s.network.fault = lambda *_: PacketFault.NONE
            died = trio.current_time()
            await s.until(lambda: after(s, died, 2), within_s=40)

    run_virtual(main)


class Pairs(Gather):
    """Groups of two: each sends to its partner alone, so that no reducer has all outer gradients."""

    def plan(self, joins: Mapping[str, Join], avoided: Iterable[str], grid: Grid) -> Plan:
        names = list(joins)
        pairs = [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]
        return [RosterPart(grid.first, grid.end, name, pair) for pair in pairs for name in pair]

    def check_plan(self, roster: Roster, grid: Grid) -> None:
        assert all(part.reducer in part.senders for part in roster.parts)

    def conclude(
        self, plan: Plan, contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        hashes: dict[str, str] = {}
        for i, report in reports.items():
            sent = (c.peer_id for c in contributors if c.peer_id in plan[i].senders)
            hashes.update(zip(sent, report.digests, strict=True))
        if len(hashes) < len(contributors):
            return None
        return Conclusion(tuple(Part(0, plan[0].stop, hashes[c.peer_id], c.peer_id) for c in contributors), ((),))


def test_a_strategy_may_say_who_sends_to_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "gather", Pairs)

    async def main() -> None:
        witness, received = Witness(), set[tuple[str, str]]()

        def note(source: str, target: str, packet: bytes) -> PacketFault:
            if packet[1] == messages.KIND_OF[messages.Contribution]:
                received.add((source, target))
            return PacketFault.NONE

        async with swarm(dataclasses.replace(GATHER, round_codec="none")) as s:
            start_all(s, "abcd", witness)
            await s.until(lambda: common(s, 1, 4))
            began, s.network.fault = trio.current_time(), note
            await s.until(lambda: sum(r["t"] > began for r in s.peers["d"].rounds("committed")) >= 3)
            assert received == {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")}
            assert witness.check_values() > 0
            # The pair of a lost member goes on.
            s.kill("d")
            died = trio.current_time()
            await s.until(lambda: sum(r["group_size"] == 3 for r in s.peers["a"].rounds() if r["t"] > died) >= 2)

    run_virtual(main)


def test_a_member_that_sends_different_bytes_to_others_does_not_split_the_round() -> None:
    """With gather the hash of what was sent is in the record: who got other bytes fetches those that it names."""

    async def main() -> None:
        async with swarm(dataclasses.replace(GATHER, round_codec="none")) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            link = s.peers["a"].node.links.get("b")
            assert link is not None
            send = link.send_bulk

            async def send_otherwise(self, message, payload, traffic, *, compress=False):  # type: ignore[no-untyped-def]
                if isinstance(message, messages.Contribution):
                    payload = bytes(len(payload))
                await send(message, payload, traffic, compress=compress)

            link.send_bulk = types.MethodType(send_otherwise, link)  # type: ignore[method-assign]
            told = trio.current_time()
            # The swarm checks that all commit the same state.
            await s.until(lambda: sum(r["t"] > told for r in s.peers["c"].rounds()) >= 3)
            assert len({p.node.driver.head.lineage for p in s.peers.values()}) == 1

    run_virtual(main)
