"""`--founder` and `--anchor`: a joining peer takes part in the run that its user wants, or in none."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import RunMismatchError, TransientError
from p2ptrain.protocol.rounds.deciding.history import name_of
from p2ptrain.protocol.state_sync import provenance, transfer
from p2ptrain.protocol.state_sync.provenance import Pins
from tests.protocol.swarm import RUN, checkpoint_of, common, run_virtual, start_all, swarm

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)


@pytest.mark.parametrize("pin", ["founder", "anchor", "both", "another founder", "another anchor"])
def test_a_joiner_joins_only_the_run_that_its_user_named(pin: str) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            record = next(name_of(e) for e in s.peers["a"].node.driver.history.entries if e.commit)
            pins = {
                "founder": Pins(founder="a"), "anchor": Pins(anchor=record), "both": Pins(record, "a"),
                "another founder": Pins(founder="b"), "another anchor": Pins(anchor="0" * 64),
            }[pin]  # fmt: skip
            joiner = s.start("d")
            joiner.node.state_sync.joining._pins = pins
            if pin.startswith("another"):
                while joiner.error is None:
                    await trio.sleep(0.1)
                error = innermost(joiner.error)
                assert isinstance(error, RunMismatchError)
                assert str(error).startswith(pin.replace("another ", "--"))
                joiner.error = None
                assert not joiner.node.ready.is_set()
            else:
                await s.until(lambda: common(s, 4, 4))

    run_virtual(main)


def test_a_pinned_peer_with_a_checkpoint_joins_its_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' history is read only back to an entry that we know, which is later than the anchor."""
    for module in (transfer, provenance):
        monkeypatch.setattr(module, "PAGE_ENTRIES", 2)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 6, 3))
            saved = checkpoint_of(s, "c")
            record = next(name_of(e) for e in saved.history.entries if e.commit)
            s.kill("c")
            await s.until(lambda: len(s.peers["a"].rounds("committed")) >= 9)
            again = s.start("c", restored=saved)
            again.node.state_sync.joining._pins = Pins(record, "a")
            await s.until(again.node.ready.is_set)
            assert again.node.driver.head.lineage == s.peers["a"].node.driver.head.lineage

    run_virtual(main)


@pytest.mark.parametrize("pins", [Pins(founder="b"), Pins(anchor="0" * 64)])
def test_a_checkpoint_of_another_run_is_not_gone_on_with(pins: Pins) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "a")
            await s.until(lambda: bool(s.peers["a"].rounds()))
            saved = checkpoint_of(s, "a")
            s.kill("a")
            again = s.start("a", founder=True, restored=saved)
            again.node.state_sync.joining._pins = pins
            while again.error is None:
                await trio.sleep(0.1)
            assert isinstance(innermost(again.error), RunMismatchError)
            again.error = None
            assert not again.node.ready.is_set()

    run_virtual(main)


def test_a_node_that_is_built_anew_goes_on_with_its_state_also_long_after_its_anchor() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "a")
            await s.until(lambda: bool(s.peers["a"].rounds()))
            saved = dataclasses.replace(checkpoint_of(s, "a"), ours=True)
            s.kill("a")
            again = s.start("a", founder=True, restored=saved)
            again.node.state_sync.joining._pins = Pins(anchor="0" * 64)
            await s.until(again.node.ready.is_set)

    run_virtual(main)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_member_leaves_its_run_for_no_other(pinned: bool) -> None:
    """Its initial peer is in another start of the run, which has more members."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.network.partition("a", "bc")
            a = s.start("a", founder=True, chosen="b")
            start_all(s, "bc")
            await s.until(lambda: bool(a.rounds()) and len(s.peers["b"].rounds("committed")) >= 2)
            driver, sync = a.node.driver, a.node.state_sync
            ours, saved = driver.head.genesis, checkpoint_of(s, "b")
            if pinned:
                sync._pins = Pins(anchor=next(name_of(e) for e in driver.history.entries if e.commit))
            s.network.partition()
            await s.until(lambda: "b" in a.node.links.live)
            await trio.sleep(30)
            assert (driver.head.genesis == ours) == pinned
            if pinned:
                with pytest.raises(RunMismatchError):
                    await sync.can_restore(saved)

    run_virtual(main)


def test_an_anchor_that_our_history_no_longer_reaches_is_kept_by_what_goes_on_from_it() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            a = s.start("a", founder=True)
            await s.until(lambda: len(a.rounds()) >= 5)
            sync, history = a.node.state_sync, a.node.driver.history
            assert history.genesis is not None
            entries = list(history.entries)
            sync._pins = Pins(anchor=next(name_of(e) for e in entries if e.commit))
            del history.entries[:-2]
            sync._check_pins(history.genesis, entries[-1:])
            with pytest.raises(RunMismatchError):
                sync._check_pins(history.genesis, entries[-3:-2])

    run_virtual(main)


@pytest.mark.parametrize("pins", [Pins(founder="b"), Pins(anchor="0" * 64)])
def test_who_names_another_run_starts_none(pins: Pins) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            peer = s.start("a", founder=True)
            peer.node.state_sync.joining._pins = pins
            await trio.sleep(1)
            assert peer.error is not None
            error = innermost(peer.error)
            assert isinstance(error, TransientError)
            assert "no peer of it answers" in str(error)
            peer.error = None

    run_virtual(main)


def test_the_founder_itself_may_start_its_run() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True).node.state_sync.joining._pins = Pins(founder="a")
            await s.until(lambda: s.peers["a"].node.ready.is_set())

    run_virtual(main)


def test_a_restarted_peer_counts_what_it_had_trained_and_forgets_its_checkpoint() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=50)) as s:
            start_all(s, "ab")
            before = s.peers["b"]
            await s.until(lambda: common(s, 2, 2) and not before.exchange.landing_pending)
            await s.until(lambda: 0.5 < before.exchange.of_interval < 0.9)
            saved, trained = checkpoint_of(s, "b"), before.exchange.tokens
            s.kill("b")
            again = s.start("b", restored=saved)
            state, saved = weakref.ref(saved.state), dataclasses.replace(saved, state=again.node.state)
            await s.until(again.node.ready.is_set)
            assert again.exchange.tokens >= trained > 0
            gc.collect()
            assert state() is None

    run_virtual(main)
