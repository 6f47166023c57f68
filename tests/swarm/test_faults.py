"""What goes wrong on volunteers' machines: programs are killed or stopped, and come back."""

from __future__ import annotations

from tests.swarm.processes import Process, Swarm, assert_anchors_agree

# Without end, and with a round every second or so.
FOUND = "p2ptrain join --steps 0 --sync-every 50 --fragment-fraction 0.02"


def three_peers(swarm: Swarm, **settings: object) -> list[Process]:
    """A founder and two who joined it, after a round of all three."""
    founder = swarm.start(FOUND, settings=settings)
    swarm.until_ready(founder)
    three = [founder, *(swarm.start(joining(founder), settings=settings) for _ in range(2))]
    swarm.until(lambda: all(peer.rounds(by=3) for peer in three))
    return three


def joining(peer: Process) -> str:
    return f"p2ptrain join --initial-peers {peer.addresses}"


def next_round(*peers: Process) -> int:
    """A round that none of these has begun."""
    return 2 + max(event["round"] for peer in peers for event in peer.rounds())


def in_a_round_of_all(peers: list[Process], since: int) -> bool:
    """Whether all of these have landed one and the same round, of all of them, numbered `since` or higher."""
    everybody = {peer.peer_id for peer in peers}
    landed = [
        {(event["lineage"], event["round"]) for event in peer.rounds(since) if set(event["contributors"]) >= everybody}
        for peer in peers
    ]
    return bool(set.intersection(*landed))


def test_a_killed_p2pd_is_replaced_and_training_goes_on(swarm: Swarm) -> None:
    three = founder, _, other = three_peers(swarm)
    lineage = founder.rounds()[-1]["lineage"]
    for victims in ([founder], [founder, other]):
        since = next_round(*three)
        for victim in victims:
            victim.kill_daemon()
        swarm.until(lambda: in_a_round_of_all(list(three), since))

    for victim, deaths in ((founder, 2), (other, 1)):
        told = victim.events("daemon")
        assert [event["status"] for event in told] == ["died", "restarted"] * deaths
        for died, restarted in zip(told[::2], told[1::2], strict=True):
            assert any(died["t"] < step["t"] < restarted["t"] for step in victim.events("step"))
        assert "the libp2p daemon (p2pd) has died (exit status -9): starting another" in victim.errors
    assert {event["lineage"] for peer in three for event in peer.rounds()} == {lineage}
    assert_anchors_agree(*three)
