"""An unexpected exception anywhere in a node costs a link or a restart of the node, never training."""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Callable
from typing import Any

import pytest
import trio

from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.protocol.exchange.types import Landing
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.node import runner as node_runner
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.node.runner import RESTART_AFTER_S
from p2ptrain.protocol.wire.messages import KINDS, Hello, Message
from tests.protocol.swarm import RUN, Swarm, TestPeer, run_virtual, swarm

NAMES = "abc"
SMALL = [("head", (64, 64))]


class Bug(Exception):
    """What no code expects."""


def blank(kind: type[Any]) -> Any:
    """A message of a kind, of the right types and without a sense."""
    if kind in (str, int, float, bool):
        return kind()
    if kind is bytes:
        return bytes(32)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return () if inner[-1] is Ellipsis else tuple(map(blank, inner))
    return None if inner else kind(*(blank(hint) for _, hint in typing.get_type_hints(kind).items()))


def committed_after(s: Swarm, now: float, *names: str) -> bool:
    """Whether a round that began after `now` has landed at all of these, and all of these are in its mean."""
    return all(
        any(set(names) <= set(r["contributors"]) and r["t"] - r["wall_s"] > now for r in s.peers[name].rounds())
        for name in names
    )


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


async def start_trio(s: Swarm, **options: Any) -> None:
    for name in NAMES:
        s.start(name, founder=name == "a", **options)
    await s.until(lambda: all(p.current.ready.is_set() for p in s.peers.values()))
    await s.until(lambda: committed_after(s, 0.0, *NAMES))


# --- a message ---------------------------------------------------------------------------------------------------


def fail_at(node: Node, kind: type[Message]) -> Callable[[], bool]:
    """Raise in the node's handling of the next message of a kind. Returns whether it has."""
    done = False
    if kind is Hello:
        receive = node.links._handshake._receive

        async def receive_hello(*arguments: Any) -> Any:
            nonlocal done
            if not done:
                done = True
                raise Bug(f"at {kind.__name__}")
            return await receive(*arguments)

        node.links._handshake._receive = receive_hello  # type: ignore[method-assign]
        return lambda: done
    handle = node.links._on_message

    async def on_message(link: Link, message: Message, payload: bytes) -> None:
        nonlocal done
        if isinstance(message, kind) and not done:
            done = True
            raise Bug(f"at {kind.__name__}")
        await handle(link, message, payload)

    for link in node.links.live.values():
        link._setup = dataclasses.replace(link._setup, handler=on_message)
    return lambda: done


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_an_error_at_any_message_costs_its_link_alone(kind: type[Message], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s)
            a, b = s.peers["a"].node, s.peers["b"].node
            links = dict(b.links.live)
            nodes = {name: peer.node for name, peer in s.peers.items()}
            caplog.clear()
            done = fail_at(b, kind)
            if kind is Hello:
                links["a"].close("dialled anew")
            else:
                # Some kinds come by themselves, others seldom.
                a.links.live["b"].send(blank(kind))
            await s.until(done)
            failed_s = trio.current_time()
            await trio.sleep(0.5)
            lost = [name for name, link in links.items() if link.lost.is_set()]
            assert len(lost) == 1
            assert kind is Hello or f"internal error while handling {kind.__name__}" in links[lost[0]].lost_reason
            (error,) = errors_in(caplog)
            assert error.exc_info is not None
            assert f"at {kind.__name__}" in error.getMessage()
            # It is linked again, nobody has a strike, and all three commit a round.
            await s.until(lambda: sorted(b.links.live) == ["a", "c"], within_s=30)
            assert all(not peer.node.links.strikes for peer in s.peers.values())
            await s.until(lambda: committed_after(s, failed_s, *NAMES))
            assert {name: peer.node for name, peer in s.peers.items()} == nodes
            assert [peer.error for peer in s.peers.values()] == [None] * len(NAMES)
            assert len(errors_in(caplog)) == 1

    run_virtual(main)


@pytest.mark.parametrize("what", ["settings", "events", "part", "record", "head", "manifest", "chunk", "buffers"])
def test_an_error_in_an_answer_costs_the_link_of_the_one_who_asked(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s)
            a, b = s.peers["a"].node, s.peers["b"].node
            caplog.clear()
            answer = b._server._answer
            link = b.links.live["a"]

            async def fail_once(link: Link, request: Any) -> None:
                if request.what == what:
                    b._server._answer = answer  # type: ignore[method-assign]
                    raise Bug(what)
                await answer(link, request)

            b._server._answer = fail_once  # type: ignore[method-assign]
            with pytest.raises(PeerLostError, match="b: it closed the connection"):
                await a.links.request(a.links.live["b"], what, timeout_s=10)
            assert f"answering a request for '{what}'" in link.lost_reason
            failed_s = trio.current_time()
            await s.until(lambda: committed_after(s, failed_s, *NAMES))
            assert len(errors_in(caplog)) == 1
            assert not b.links.strikes
            assert not b._server._serving

    run_virtual(main)


# --- a node ------------------------------------------------------------------------------------------------------


def fail_node(peer: TestPeer) -> None:
    peer.current._fail(Bug("in the node"))


async def stepping(s: Swarm, peer: TestPeer, *, seconds: float) -> None:
    """Training goes on meanwhile."""
    steps = peer.exchange.steps
    await trio.sleep(seconds)
    assert peer.exchange.steps - steps > 0.9 * seconds / peer.step_s


@pytest.mark.parametrize("victim", NAMES)
def test_a_node_that_fails_is_built_anew_where_it_stood(victim: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers[victim]
            assert peer.runner is not None
            node, incarnation = peer.current, peer.current.incarnation
            caplog.clear()
            fail_node(peer)
            failed_s, position = trio.current_time(), peer.exchange.run_step
            await trio.sleep(0.1)
            assert "restarting the network side (1 of 5)" in peer.runner.status
            assert peer.runner.failure is None
            await stepping(s, peer, seconds=5)
            assert peer.current is not node
            await s.until(lambda: peer.current.ready.is_set(), within_s=30)
            assert peer.runner.last_ready is peer.current
            assert peer.current.peer_id == victim
            assert peer.current.incarnation != incarnation
            assert peer.exchange.run_step >= position
            (error,) = errors_in(caplog)
            assert "is started again in 0.5 s" in error.getMessage()
            await s.until(lambda: committed_after(s, failed_s, *NAMES))
            assert peer.runner.status == peer.current.status

    run_virtual(main)


def test_a_lone_founder_that_fails_goes_on_from_its_anchor() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            peer = s.start("a", founder=True, restarts=True)
            await s.until(lambda: len(peer.rounds("solo")) >= 2)
            assert peer.runner is not None
            head = peer.current.driver.head
            before = len(peer.rounds("solo"))
            fail_node(peer)
            await trio.sleep(1)
            await s.until(lambda: peer.current.ready.is_set())
            after = peer.current.driver.head
            assert (after.genesis, after.state_hash) == (head.genesis, head.state_hash)
            await s.until(lambda: len(peer.rounds("solo")) >= before + 2)
            assert [event["reason"] for event in peer.events if event["event"] == "adopt"] == [
                "founded the run", "restored from a checkpoint",
            ]  # fmt: skip

    run_virtual(main)


def test_a_node_that_fails_while_a_round_lands_lands_it_first() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers["b"]
            peer.paused = True
            await s.until(lambda: peer.exchange.landing_pending, within_s=600)
            node = peer.current
            fail_node(peer)
            await trio.sleep(5)
            assert peer.current is node
            peer.paused = False
            failed_s = trio.current_time()
            await s.until(lambda: peer.current is not node and peer.current.ready.is_set())
            await s.until(lambda: committed_after(s, failed_s, *NAMES))

    run_virtual(main)


def test_a_node_that_fails_when_it_is_told_of_a_landing_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers["b"]
            node = peer.current

            def fail(landing: Landing, held_s: float) -> None:
                raise Bug("told of a landing")

            monkeypatch.setattr(node.driver.committer, "landed", fail)
            await s.until(lambda: peer.current is not node and peer.current.ready.is_set())
            failed_s = trio.current_time()
            await s.until(lambda: committed_after(s, failed_s, *NAMES))

    run_virtual(main)


def test_a_state_that_was_left_half_changed_is_taken_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers["b"]
            peer.current.state.anchor[3] += 1.0
            fail_node(peer)
            failed_s = trio.current_time()
            await s.until(lambda: committed_after(s, failed_s, *NAMES))
            assert "left half changed" in caplog.text
            assert [event["reason"] for event in peer.events if event["event"] == "adopt"][-1] == (
                "adopted the swarm's state"
            )

    run_virtual(main)


def test_after_five_restarts_in_a_row_it_is_given_up_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers["b"]
            assert peer.runner is not None
            build = peer.runner._build

            def build_bad(*arguments: Any) -> Node:
                node = build(*arguments)

                async def fail() -> None:
                    await trio.sleep(1)
                    raise Bug("always")

                node.state_sync.joining.establish = fail  # type: ignore[method-assign]
                return node

            peer.runner._build = build_bad
            caplog.clear()
            began_s = trio.current_time()
            fail_node(peer)
            await s.until(lambda: peer.runner is not None and peer.runner.failure is not None)
            assert trio.current_time() - began_s >= sum(RESTART_AFTER_S)
            assert "failed 6 times in a row, last with Bug('always')" in str(peer.runner.failure)
            assert "cut off" in peer.runner.status
            assert len(errors_in(caplog)) == len(RESTART_AFTER_S) + 1
            await stepping(s, peer, seconds=30)
            now = trio.current_time()
            await s.until(lambda: committed_after(s, now, "a", "c"))

    run_virtual(main)


def test_a_long_healthy_time_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_runner, "RESTART_AFTER_S", (0.5,))
    monkeypatch.setattr(node_runner, "HEALTHY_S", 10.0)

    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            peer = s.start("a", founder=True, restarts=True, step_s=1.0)
            assert peer.runner is not None
            for _ in range(4):
                await s.until(lambda: peer.current.ready.is_set())
                await trio.sleep(11)
                node = peer.current
                fail_node(peer)
                await s.until(lambda node=node: peer.current is not node)  # type: ignore[misc]
            assert peer.runner.failure is None

    run_virtual(main)


@pytest.mark.parametrize("phase", ["run_forever", "membership", "driver", "establish"])
def test_an_error_anywhere_in_a_node_is_the_nodes_alone(phase: str) -> None:
    """At its beginning, and in each of its parts."""

    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s, restarts=True)
            peer = s.peers["c"]
            assert peer.runner is not None
            build, broken = peer.runner._build, 0

            def build_bad(*arguments: Any) -> Node:
                nonlocal broken
                node = build(*arguments)

                async def fail(**options: Any) -> None:
                    await trio.sleep(1)
                    raise Bug(phase)

                broken += 1
                if broken == 1:
                    owner, name = {
                        "run_forever": (node, "run_forever"), "membership": (node.membership, "run_forever"),
                        "driver": (node.driver, "run_forever"), "establish": (node.state_sync.joining, "establish"),
                    }[phase]  # fmt: skip
                    setattr(owner, name, fail)
                return node

            peer.runner._build = build_bad
            fail_node(peer)
            failed_s = trio.current_time()
            await s.until(lambda: broken == 2)
            await s.until(lambda: committed_after(s, failed_s, *NAMES))

    run_virtual(main)


def test_a_run_that_cannot_be_joined_is_not_tried_again() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            s.network.close_directory()
            peer = s.start("b", restarts=True)
            assert peer.runner is not None
            await s.until(lambda: peer.runner is not None and peer.runner.failure is not None)
            assert isinstance(peer.runner.failure, ConfigError)
            assert "no answer from the DHT" in str(peer.runner.failure)

    run_virtual(main)


# --- what it talks to ---------------------------------------------------------------------------------------------


def test_a_push_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await start_trio(s)
            gossip = s.peers["b"].node._gossip
            assert gossip is not None
            send, failures = gossip._send, 0

            async def fail(push: Any) -> float:
                nonlocal failures
                failures += 1
                if failures < 5:
                    raise Bug("pushing")
                return await send(push)

            gossip._send = fail  # type: ignore[method-assign]
            sent = s.peers["b"].node.links.counters.fragments_sent
            await s.until(lambda: s.peers["b"].node.links.counters.fragments_sent > sent + 10)
            assert len(errors_in(caplog)) == 1

    run_virtual(main)


def test_restarts_come_later_and_later() -> None:
    assert list(node_runner.RESTART_AFTER_S) == sorted(node_runner.RESTART_AFTER_S)
    assert len(node_runner.RESTART_AFTER_S) == 5
