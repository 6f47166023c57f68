"""What goes wrong on volunteers' machines: programs are killed or stopped, and come back."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

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


def saved_steps(peers: list[Process]) -> list[int]:
    """The step of each peer's last checkpoint; 0 without one."""
    found = [(peer.directory / "p2ptrain-p2ptrain").glob("checkpoint-*") for peer in peers]
    return [max((int(path.name.partition("-")[2]) for path in paths), default=0) for paths in found]


def next_round(*peers: Process) -> int:
    """A round that none of these has begun."""
    return 2 + max(event["round"] for peer in peers for event in peer.rounds())


def until_all_are_in_one(swarm: Swarm, peers: list[Process]) -> None:
    """Wait for a round of all of these that none has begun yet."""
    since = next_round(*peers)
    swarm.until(lambda: in_a_round_of_all(peers, since))


def in_a_round_of_all(peers: list[Process], since: int) -> bool:
    """Whether all of these have landed one and the same round, of all of them, numbered `since` or higher."""
    if not all(peer.events("start") for peer in peers):
        return False
    everybody = {peer.peer_id for peer in peers}
    landed = [
        {(event["lineage"], event["round"]) for event in peer.rounds(since) if set(event["contributors"]) >= everybody}
        for peer in peers
    ]
    return bool(set.intersection(*landed))


@pytest.mark.long
def test_a_killed_p2pd_is_replaced_and_training_goes_on(swarm: Swarm) -> None:
    three = founder, _, other = three_peers(swarm)
    lineage = founder.rounds()[-1]["lineage"]
    for victims in ([founder], [founder, other]):
        for victim in victims:
            victim.kill_daemon()
        until_all_are_in_one(swarm, three)

    for victim in (founder, other):
        # The first restart may be over within a step; a daemon that dies again soon is restarted after seconds.
        while not stepped_without_daemon(victim):
            victim.kill_daemon()
            until_all_are_in_one(swarm, three)
        assert "the libp2p daemon (p2pd) died (exit status -9); restarting it" in victim.errors
    assert {event["lineage"] for peer in three for event in peer.rounds()} == {lineage}
    assert_anchors_agree(*three)


def stepped_without_daemon(peer: Process) -> bool:
    """Whether this peer has made a step between a death of its p2pd and the restart."""
    told = peer.events("daemon")
    assert [event["status"] for event in told] == ["died", "restarted"] * (len(told) // 2)
    gaps = zip(told[::2], told[1::2], strict=True)
    return any(died["t"] < step["t"] < restarted["t"] for died, restarted in gaps for step in peer.events("step"))


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [0, 75])
def test_one_that_was_stopped_wakes_up_behind_and_catches_up(stopped_s: int, swarm: Swarm) -> None:
    """One with its p2pd, as on a machine that sleeps, one without; until they count as lost, and for so long after it.

    With 75 s every timeout is over: others have forgotten where they were, and their own voters were out of sight.
    """
    three = founder, whole, alone = three_peers(swarm)
    fourth = swarm.start(joining(founder))
    four = [*three, fourth]
    swarm.until(lambda: in_a_round_of_all(four, 0))

    whole.pause(with_daemon=True)
    until_all_are_in_one(swarm, [founder, alone, fourth])
    alone.pause(with_daemon=False)
    awake, asleep = [founder, fourth], [whole, alone]
    stopped_at = next_round(*four)
    swarm.until(lambda: all(f"lost {peer.peer_id}" in other.errors for peer in asleep for other in awake))
    time.sleep(stopped_s)
    until_all_are_in_one(swarm, awake)
    woken_at = next_round(*awake) - 1
    for peer in asleep:
        peer.wake()

    swarm.until(lambda: in_a_round_of_all(four, woken_at))
    ids = {peer.peer_id for peer in asleep}
    meanwhile = [event for peer in four for event in peer.rounds(stopped_at) if event["round"] < woken_at]
    assert meanwhile
    assert not any(ids & set(event["contributors"]) for event in meanwhile)
    assert len({event["lineage"] for peer in four for event in peer.rounds()}) == 1
    assert_anchors_agree(*four)


@pytest.mark.long
def test_a_killed_peer_comes_back_as_itself(swarm: Swarm) -> None:
    three = founder, other, victim = three_peers(swarm)
    swarm.until(lambda: victim.remembered)
    victim.kill()
    victim.wait()
    until_all_are_in_one(swarm, [founder, other])

    again = swarm.start(joining(founder), directory=victim.directory)
    swarm.until(lambda: again.rounds())
    assert again.peer_id == victim.peer_id
    until_all_are_in_one(swarm, [founder, other, again])
    assert_anchors_agree(*three, again)


def test_a_run_whose_peers_were_all_killed_goes_on_from_their_checkpoints(swarm: Swarm) -> None:
    three = three_peers(swarm, checkpoint_minutes=0.03)
    # A first checkpoint may be from before the round of all three.
    after = [peer.events("step")[-1]["step"] for peer in three]
    swarm.until(
        lambda: all(
            peer.remembered and step > least for peer, step, least in zip(three, saved_steps(three), after, strict=True)
        )
    )
    for peer in three:
        peer.kill()
    for peer in three:
        peer.wait()
    steps = saved_steps(three)

    # The same commands again, and the founder is not the first: the first to start begins, and the rest find it.
    ids = [peer.peer_id for peer in three]
    again = [swarm.start(joining(three[0]), directory=three[1].directory)]
    swarm.until_ready(*again)
    assert "alone until a peer is found" in again[0].output
    again += [swarm.start(joining(again[0]), directory=peer.directory) for peer in (three[0], three[2])]
    swarm.until(lambda: in_a_round_of_all(again, 0))
    assert [again[1].peer_id, again[0].peer_id, again[2].peer_id] == ids
    restored, *others = (peer.events("adopt")[0] for peer in again)
    assert restored["reason"] == "restored from a checkpoint"
    assert again[0].events("step")[0]["step"] == steps[1] + 1
    # An adopted state is that of the last round, so it may be at an earlier step than a checkpoint.
    assert all(other["round"] >= restored["round"] >= 0 for other in others)
    assert_anchors_agree(*three, *again)


def test_a_full_disk_is_reported_and_training_goes_on(swarm: Swarm, tmp_path: Path) -> None:
    refused = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if refused.returncode:
        pytest.skip(f"this machine does not allow mounting a small disk: {refused.stderr.strip()}")
    (disk := tmp_path / "disk").mkdir()
    # Room for an identity and addresses, and for no checkpoint.
    mounting = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    peer = swarm.start(
        f"{FOUND} --out {disk}", settings={"checkpoint_minutes": 0.001},
        enter=["unshare", "-rm", "sh", "-c", mounting, str(disk)],
    )  # fmt: skip
    swarm.until(lambda: peer.errors.count("No space left on device") > 2)
    steps = len(peer.events("step"))
    swarm.until(lambda: len(peer.events("step")) > steps + 20)
    peer.terminate()
    assert peer.wait() == 75
    assert "training goes on without this checkpoint" in peer.errors
    assert f"but no checkpoint could be written to {disk}, for the reason above; mend it, and run" in peer.errors
