"""Two peers behind routers that masquerade, and a machine that anybody can dial."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.namespaces import Wires
from tests.links.peers import MODEL, RUN, join, join_all, wait_for_rounds
from tests.swarm.processes import Swarm, assert_anchors_agree


@pytest.mark.long
def test_two_private_peers_train_together_through_a_public_one(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    """The public peer relays no connection: each peer sends fragments and rounds to the peers that it can reach."""
    machines = [net.machine(), net.behind_nat(), net.behind_nat()]
    peers = join_all(swarm, tmp_path / "peers", machines, relay_peers=0)
    public, *private = peers
    wait_for_rounds(swarm, peers, by=3, count=3)
    assert_anchors_agree(*peers)
    for peer in private:
        assert peer.events("peers")[-1]["alive"] == [public.peer_id]
        assert sum(event["merged"] for event in peer.events("fragments")) > 0
        assert "forward a port of your router" in peer.errors
    assert "forward a port" not in public.errors


def test_two_private_peers_train_together_over_a_bootstrap_node(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    """It does not train, but it is a relay: each of the two has an address through it (docs/start/two-machines.md)."""
    helper = net.machine()
    bootstrap = swarm.start(
        "p2ptrain bootstrap --host-maddrs /ip4/0.0.0.0/tcp/4001", directory=tmp_path / "bootstrap", enter=helper.enter
    )
    swarm.until(bootstrap.addresses.exists)
    initial = f"--initial-peers {bootstrap.addresses}"
    founder = join(swarm, tmp_path / "0", net.behind_nat(), f"{RUN} {initial}")
    swarm.until_ready(founder)
    joiner = join(swarm, tmp_path / "1", net.behind_nat(), f"{MODEL} {initial}")
    peers = [founder, joiner]
    wait_for_rounds(swarm, peers, by=2, count=3)
    assert_anchors_agree(*peers)
    for peer in peers:
        assert any(f"{helper.address}/tcp/4001/p2p/" in maddr for maddr in peer.events("start")[0]["maddrs"])
        assert sum(event["merged"] for event in peer.events("fragments")) > 0
        assert "peers behind NAT reach it through a relay" in peer.errors


@pytest.mark.long  # an answer that dialling back failed comes after 15 s
@pytest.mark.parametrize("behind", ["firewall", "router"])
def test_a_peer_whose_firewall_lets_nobody_in_trains_with_others(
    net: Wires, swarm: Swarm, tmp_path: Path, behind: str
) -> None:
    """Its address is public, so that only others can tell it that it needs relays.

    After a restart within a minute none does: libp2p answers a peer that asks again with "too many dials".
    """
    helper = net.machine(subnet="8.20.7")  # outside, as peers of our own network are not asked
    bootstrap = swarm.start(
        "p2ptrain bootstrap --host-maddrs /ip4/0.0.0.0/tcp/4001", directory=tmp_path / "bootstrap", enter=helper.enter
    )
    swarm.until(bootstrap.addresses.exists)
    initial = f"--initial-peers {bootstrap.addresses}"
    machine = net.machine(closed=True)
    founder = join(swarm, tmp_path / "0", machine, f"{RUN} {initial}")
    swarm.until_ready(founder)
    if behind == "firewall":
        founder.terminate()
        assert founder.wait() == 0
        founder = join(swarm, tmp_path / "0", machine, f"{RUN} {initial}")
        swarm.until_ready(founder)
    other = net.machine(closed=True) if behind == "firewall" else net.behind_nat("silent")
    peers = [founder, join(swarm, tmp_path / "1", other, f"{MODEL} {initial}")]
    swarm.until_ready(*peers)
    wait_for_rounds(swarm, peers, by=2, count=3)
    assert_anchors_agree(*peers)
    assert any("connected directly to" in peer.errors for peer in peers)
    if behind == "router":  # those that were asked say so twice
        swarm.until(lambda: "a firewall blocks it" in founder.errors)


@pytest.mark.long
@pytest.mark.parametrize(("how", "direct"), [(["silent"], True), (["silent", "random"], False)])
def test_two_private_peers_dial_each_other_at_once_where_their_routers_let_them(
    net: Wires, swarm: Swarm, tmp_path: Path, how: list[str], direct: bool
) -> None:
    """Routers with one outer port for all destinations let them; with another one for each, the relay carries all."""
    helper = net.machine()
    bootstrap = swarm.start(
        "p2ptrain bootstrap --host-maddrs /ip4/0.0.0.0/tcp/4001", directory=tmp_path / "bootstrap", enter=helper.enter
    )
    swarm.until(bootstrap.addresses.exists)
    initial = f"--initial-peers {bootstrap.addresses}"
    founder = join(swarm, tmp_path / "0", net.behind_nat(*how), f"{RUN} {initial}")
    swarm.until_ready(founder)
    peers = [founder, join(swarm, tmp_path / "1", net.behind_nat(*how), f"{MODEL} {initial}")]
    swarm.until_ready(*peers)
    wait_for_rounds(swarm, peers, by=2, count=3)
    assert_anchors_agree(*peers)
    command = f"p2ptrain peers --initial-peers {bootstrap.addresses}"
    at = {"host_maddrs": f"/ip4/{helper.address}/tcp/0"}
    listed = swarm.start(command, directory=tmp_path / "peers", enter=helper.enter, settings=at)
    assert listed.wait() == 0
    assert "run p2ptrain: 2 peers" in listed.output
    assert ("relayed through" in listed.output) is not direct
    assert any("connected directly to" in peer.errors for peer in peers) is direct
