"""Peers that come and go while one model is trained."""

from __future__ import annotations

import json
import statistics

import psutil
import pytest

from tests.swarm.processes import Event, Process, Swarm, assert_anchors_agree

# Without end, and with a round every second or so.
FOUND = "p2ptrain join --steps 0 --sync-every 50 --fragment-fraction 0.02 --eval-every 50"


def test_a_swarm_outlives_its_founder_and_takes_in_a_late_joiner(swarm: Swarm) -> None:
    founder = swarm.start(FOUND)
    swarm.until_ready(founder)
    others = [swarm.start(f"p2ptrain join --initial-peers {founder.addresses}") for _ in range(3)]
    four = [founder, *others]
    swarm.until(lambda: all(peer.rounds(by=4) for peer in four))
    assert len({event["lineage"] for peer in four for event in peer.rounds()}) == 1

    (daemon,) = founder.daemons
    founder.kill()
    founder.wait()
    swarm.until(lambda: not is_alive(daemon))
    last = max(event["round"] for peer in four for event in peer.rounds())
    without_founder = sorted(peer.peer_id for peer in others)
    swarm.until(lambda: all(without_founder in contributors(peer, last + 1) for peer in others))

    first_loss = founder.events("eval")[0]["loss"]
    loss_before = statistics.median(peer.events("eval")[-1]["loss"] for peer in others)
    late = swarm.start(f"p2ptrain join --initial-peers {others[0].addresses}")
    swarm.until(lambda: all(evals_after_a_round_with(late, peer) for peer in (*others, late)))
    assert late.events("adopt")[0]["round"] >= last
    # No spike: neither in what it takes over, nor in what the others have once its first outer gradient is in.
    losses = [late.events("eval")[0], *(evals_after_a_round_with(late, peer)[0] for peer in others)]
    assert max(event["loss"] for event in losses) < loss_before + (first_loss - loss_before) / 4
    assert_anchors_agree(*four, late)


@pytest.mark.long
def test_a_bootstrap_node_brings_peers_together_and_is_not_needed_after_that(swarm: Swarm) -> None:
    bootstrap = swarm.start("p2ptrain bootstrap")
    swarm.until_ready(bootstrap)
    join = f"{FOUND} --initial-peers {bootstrap.addresses}"
    two = [swarm.start(join), swarm.start(join)]
    swarm.until(lambda: all(peer.rounds(by=2) for peer in two))
    assert {peer.events("adopt")[0]["reason"] for peer in two} == {"founded the run", "adopted the swarm's state"}

    lister = swarm.start(f"p2ptrain peers --initial-peers {bootstrap.addresses} --json")
    assert lister.wait() == 0, swarm.report()
    members = json.loads(lister.output)
    assert [member["peer_id"] for member in members] == sorted(peer.peer_id for peer in two)
    assert all(member["round"] >= 0 and member["maddrs"] for member in members)

    bootstrap.kill()
    bootstrap.wait()
    last = max(event["round"] for peer in two for event in peer.rounds())
    swarm.until(lambda: all(peer.rounds(last + 2, by=2) for peer in two))

    # Nor by one that comes back: it remembers the other.
    stays, goes = two
    swarm.until(lambda: goes.remembered)
    goes.kill()
    goes.wait()
    back = swarm.start(join, directory=goes.directory)
    swarm.until(lambda: back.rounds(by=2))
    assert back.events("start")[0]["peer_id"] == goes.peer_id
    assert_anchors_agree(stays, goes, back)


def test_a_run_with_a_length_ends_by_itself(swarm: Swarm) -> None:
    # Large batches, and room for the second: the run must not be over before it has started.
    first = swarm.start("p2ptrain join --steps 1200 --sync-every 200 --batch-tokens 512")
    swarm.until_ready(first)
    second = swarm.start(f"p2ptrain join --initial-peers {first.addresses} --batch-tokens 512")
    swarm.until(lambda: second.events("step"))
    for peer in (first, second):
        assert peer.wait() == 0, swarm.report()
        assert peer.events("stop")[-1]["reason"] == "finished"
        assert "finished at step 1200" in peer.output
    assert_anchors_agree(first, second)


def contributors(peer: Process, since: int) -> list[list[str]]:
    """Who contributed to the rounds that landed at a peer, numbered `since` or higher."""
    return [sorted(event["contributors"]) for event in peer.rounds(since)]


def evals_after_a_round_with(late: Process, peer: Process) -> list[Event]:
    """What a peer measured on held-out text once it had landed a round to which `late` contributed."""
    started = late.events("start")
    rounds = [event for event in peer.rounds() if started and late.peer_id in event["contributors"]]
    return [event for event in peer.events("eval") if rounds and event["t"] > rounds[0]["t"]]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
