"""`--founder` and `--anchor`: a joining peer takes part in the run that its user wants, or in none."""

from __future__ import annotations

import dataclasses

import pytest
import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import RunMismatchError, TransientError
from p2ptrain.protocol.rounds.history import History, name_of
from p2ptrain.protocol.state_sync import transfer
from p2ptrain.protocol.state_sync.joining import Restored
from p2ptrain.protocol.state_sync.provenance import Pins
from tests.protocol.swarm import RUN, Swarm, run_virtual, swarm
from tests.protocol.test_rounds import common, start_all

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)


def checkpoint_of(s: Swarm, name: str) -> Restored:
    """What a peer would save now."""
    node, exchange = s.peers[name].node, s.peers[name].exchange
    state = exchange.new_state()
    state.copy_from(node.state)
    return Restored(
        state, node.engine.head, exchange.run_step, History(node.engine.history.genesis, node.engine.history.entries)
    )


@pytest.mark.parametrize("pin", ["founder", "anchor", "both", "another founder", "another anchor"])
def test_a_joiner_joins_only_the_run_that_its_user_named(pin: str) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            record = next(name_of(e) for e in s.peers["a"].node.engine.history.entries if e.commit)
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
                assert str(error).startswith(pin.removeprefix("another "))
                joiner.error = None
                assert not joiner.node.ready.is_set()
            else:
                await s.until(lambda: common(s, 4, 4))

    run_virtual(main)


def test_a_pinned_peer_with_a_checkpoint_joins_its_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' history is read only back to an entry that we know, which is later than the anchor."""
    monkeypatch.setattr(transfer, "PAGE_ENTRIES", 2)

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
            assert again.node.engine.head.lineage == s.peers["a"].node.engine.head.lineage

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
