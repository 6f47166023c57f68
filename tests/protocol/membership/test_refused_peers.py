"""Peers that the user of a machine refuses: no link in either direction, and none that stays."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import trio

from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.membership.lookup import ask_settings, check_key
from p2ptrain.protocol.membership.status import list_members
from p2ptrain.settings.access import DENIED, NOT_ALLOWED, Access
from p2ptrain.settings.peer_config import NetworkConfig
from tests.protocol.swarm import RUN, common, run_virtual, start_all, swarm
from tests.protocol.wiring import hello_of, start_endpoint, until


def test_a_refused_peer_is_neither_dialled_nor_accepted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        denied = {"b"}
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:

            def refusal(peer_id: str) -> str | None:
                return DENIED if peer_id in denied else None

            a = await start_endpoint(network, nursery, hello_of("a"), refusal=refusal)
            b = await start_endpoint(network, nursery, hello_of("b"), chosen=("a",))
            c = await start_endpoint(network, nursery, hello_of("c"))
            with pytest.raises(PeerLostError, match="b: it is on your deny list"):
                await a.links.connect("b", [])
            with pytest.raises(
                PeerLostError, match=f"peer a refuses this peer: {DENIED}; ask its owner to allow your id b"
            ):
                await b.links.connect("a", [])
            await c.links.connect("a", [])
            await trio.sleep(1)
            assert (a.linked, b.linked) == (["c"], [])
            assert not a.links.strikes
            denied.clear()
            await b.links.connect("a", [])
            await until(lambda: a.linked == ["c", "b"])
            nursery.cancel_scope.cancel()

    run_virtual(main)
    (logged,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert logged == f"a refused the link: '{DENIED}'; your id is b"


def test_who_looks_for_a_run_that_refuses_it_is_told_so() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2))
            for peer in s.peers.values():
                peer.node.links._refusal = lambda peer_id: NOT_ALLOWED if peer_id == "x" else None
            transport, directory = s.network.transport("x"), s.network.directory("x")
            refused = f"peer a refuses this peer: {NOT_ALLOWED}; ask its owner to allow your id x"
            with pytest.raises(ConfigError, match=refused):
                await ask_settings(transport, directory, "test", timeout_s=5, rng=random.Random(0), chosen="a")
            with pytest.raises(ConfigError, match=refused):
                await list_members(transport, directory, "test", chosen="a")
            with pytest.raises(ConfigError, match=refused):
                await check_key(transport, "test", chosen="a")

    run_virtual(main)


def test_a_peer_that_is_taken_off_an_allow_list_loses_its_link_and_dials_in_vain(tmp_path: Path) -> None:
    async def main() -> None:
        ids = {name: f"Qm{44 * name}" for name in "abc"}
        path = tmp_path / "members.txt"
        path.write_text("\n".join(ids.values()), encoding="utf-8")
        access = Access(NetworkConfig(allow=str(path)))
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of(ids["a"]), refusal=access.refusal)
            b = await start_endpoint(network, nursery, hello_of(ids["b"]))
            c = await start_endpoint(network, nursery, hello_of(ids["c"]))
            await a.links.connect(ids["b"], [])
            await c.links.connect(ids["a"], [])
            path.write_text(ids["c"], encoding="utf-8")
            access.refresh()
            access.refresh()  # content counts at the second read
            await until(lambda: set(a.links.live) == {ids["c"]}, within_s=3)
            with pytest.raises(PeerLostError, match="this peer is not on its allow list"):
                await b.links.connect(ids["a"], [])
            with pytest.raises(PeerLostError, match="it is not on your allow list"):
                await a.links.connect(ids["b"], [])
            assert not a.links.strikes
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_peer_that_is_banned_loses_its_link_and_rounds_go_on() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            denied = {"x"}
            for name in "abc":
                links = s.peers[name].node.links
                assert links.get("x") is not None
                links._refusal = lambda peer_id: DENIED if peer_id in denied else None
            await s.until(lambda: not any("x" in s.peers[name].node.links.live for name in "abc"), within_s=3)
            round_ = s.peers["a"].node.driver.head.round
            lost = s.peers.pop("x")
            await s.until(lambda: min(s.peers[name].node.driver.head.round for name in "abc") >= round_ + 3)
            assert not lost.node.links.live
            assert lost.error is None

    run_virtual(main)
