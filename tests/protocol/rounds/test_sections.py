"""Rounds of one section of the model at a time, with the code of whole peers on the memory network."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
import trio

from p2ptrain.protocol.exchange.types import Epoch, Landing, Snapshot, SnapshotWanted
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire.messages import Record
from tests.protocol.swarm import RUN, Swarm, Witness, common, run_virtual, start_all, swarm

# Blocks: 40, 2 and 2100. The second section does not start on the chunks of the whole model, nor of its state.
SECTIONS = dataclasses.replace(RUN, round_sections=2, sync_every=10)
CUT = 42
SNAPSHOT = Snapshot(Epoch(), torch.empty(0, 64), 0, 0, 0, False, 0.0)


def averaged(record: Record) -> tuple[int, int]:
    return record.parts[0].start, record.parts[-1].stop


def heads_agree(s: Swarm) -> bool:
    return len({peer.node.driver.head.state_hash for peer in s.peers.values()}) == 1


@pytest.mark.parametrize("averaging", ["parts", "gather"])
def test_each_round_steps_the_anchor_of_its_section_alone(averaging: str) -> None:
    run = dataclasses.replace(SECTIONS, round_codec="none", fragment_fraction=0.0, averaging=averaging)

    async def main() -> None:
        witness = Witness()
        async with swarm(run) as s:
            start_all(s, "abcd", witness)
            await s.until(lambda: common(s, 6, 4))
            assert witness.check_values() >= 20
            for (_, round_), record in witness.records.items():
                assert averaged(record) == ((0, CUT), (CUT, 2142))[round_ % 2]

    run_virtual(main)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "topk"])
def test_the_hashes_of_the_state_are_those_of_a_whole_new_computation(codec: str) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(SECTIONS, round_codec=codec, audit_rate=1.0)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 5, 3) and heads_agree(s))
            state = s.peers["a"].node.state
            hashes = state.hashes
            state.rehash()
            assert state.hashes == hashes

    run_virtual(main)


@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_the_last_round_averages_all_and_gives_all_peers_the_same_weights(codec: str) -> None:
    run = dataclasses.replace(SECTIONS, round_codec=codec, total_steps=95)

    async def main() -> None:
        witness = Witness()
        async with swarm(run) as s:
            start_all(s, "abc", witness)
            await s.until(lambda: all(p.exchange.finished for p in s.peers.values()))
            await trio.sleep(2)
            weights = [peer.flat() for peer in s.peers.values()]
            assert all(torch.equal(w, s.peers["a"].node.state.anchor_tensor()) for w in weights)
            last = max(witness.records.values(), key=lambda record: record.round)
            assert (averaged(last), last.run_step, last.outer_optimizer) == ((0, 2142), 95, "sgd")
            assert {averaged(r) for r in witness.records.values() if r is not last} == {(0, CUT), (CUT, 2142)}

    run_virtual(main)


def test_a_run_that_ends_before_its_head_is_near_ends_with_one_round_more() -> None:
    """Rounds take so long that the peers reach its end while one is under way: the next one is of a section still."""
    run = dataclasses.replace(SECTIONS, total_steps=95)

    async def main() -> None:
        witness = Witness()
        async with swarm(run) as s:
            start_all(s, "abc", witness)
            await s.until(lambda: common(s, 3, 3))
            s.worker.work_s = 1.0
            await s.until(lambda: all(p.exchange.at_length for p in s.peers.values()))
            s.worker.work_s = 0.0
            await s.until(lambda: all(p.exchange.finished for p in s.peers.values()))
            assert heads_agree(s)
            *_, before, last = sorted(witness.records.values(), key=lambda record: record.round)
            assert (averaged(before), before.run_step) in [((0, CUT), 94), ((CUT, 2142), 94)]
            assert (averaged(last), last.run_step) == ((0, 2142), 95)

    run_virtual(main)


def test_a_joiner_gets_the_state_of_all_sections_and_takes_part() -> None:
    async def main() -> None:
        async with swarm(SECTIONS) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            joiner = s.start("d")
            await s.until(lambda: sum(r["group_size"] == 4 for r in joiner.rounds("committed")) >= 3)

    run_virtual(main)


def test_the_error_of_a_coarse_codec_is_kept_for_each_section() -> None:
    """A round keeps the values that it did not send for the next round of the same section."""

    async def main() -> None:
        async with swarm(dataclasses.replace(SECTIONS, round_codec="int2", fragment_fraction=0.0)) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            taker, context = s.peers["a"].node.driver._taker, s.peers["a"].node.driver.context
            kept = dict(enumerate(taker._errors.values()))
            assert [error.shape for error in kept.values()] == [(CUT, 64), (2142 - CUT, 64)]
            for number in (0, 1, 0):
                grid = context.grids.sections[number]
                taker.own = own = OwnContribution(SNAPSHOT, grid, error=taker._error_of(grid))
                assert own.error is not None
                assert np.array_equal(own.error, kept[number])
                own.next_error = kept[number] = np.full_like(own.error, 10.0 * number + grid.num_blocks)
                taker.note_included()
            whole = taker._error_of(context.grids.whole)
            assert whole is not None
            assert np.array_equal(whole, np.concatenate([kept[0], kept[1]]))
            # A round of all sections keeps that of each.
            taker.own = OwnContribution(SNAPSHOT, context.grids.whole, error=whole, next_error=2 * whole)
            taker.note_included()
            assert np.array_equal(np.concatenate(list(taker._errors.values())), 2 * whole)
            # Means of one section are compared with those of the same section.
            assert context.mean_guard._sync_every == 2 * SECTIONS.sync_every
            s.kill("a")

    run_virtual(main)


@pytest.mark.parametrize("missed", [{0}, {0, 1}])
def test_a_member_that_is_left_out_adopts_the_anchor_of_that_section_the_second_time(missed: set[int]) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(SECTIONS, fragment_fraction=0.0)) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 2, 4))
            lagging, landings = s.peers["d"], defaultdict[int, list[str]](list)
            land, want = lagging.exchange.land, lagging.exchange.want_snapshot

            def spy(landing: Landing) -> None:
                landings[landing.epoch.round % 2].append(landing.kind)
                land(landing)

            def want_some(wanted: SnapshotWanted | None) -> None:
                want(None if wanted is not None and wanted.section in missed else wanted)

            await s.until(lambda: not lagging.node.driver.is_busy)
            lagging.exchange.land = spy  # type: ignore[method-assign]
            lagging.exchange.want_snapshot = want_some  # type: ignore[method-assign]  # joins without one
            await s.until(lambda: min(len(landings[0]), len(landings[1])) >= 3)
            for section in (0, 1):
                assert landings[section][:2] == (["keep", "write"] if section in missed else ["add", "add"])

    run_virtual(main)
