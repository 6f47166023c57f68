"""The status of peers: the progress of a round as text, also in heartbeats."""

from __future__ import annotations

import trio

from tests.protocol.swarm import RUN, TestPeer, run_virtual, swarm


class Listener(trio.abc.Instrument):
    """Notes each status of a peer, whenever any task has done a step."""

    def __init__(self, peer: TestPeer) -> None:
        self.heard: list[str] = []
        self._peer = peer

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        status = self._peer.node.status
        if self.heard[-1:] != [status]:
            self.heard.append(status)


def test_a_round_is_told_from_its_call_to_its_landing() -> None:
    async def main() -> None:
        async with swarm(RUN, bandwidth_bytes_s=1e6, seed=3) as peers:
            first = peers.start("a", founder=True)
            second = peers.start("b")
            listener = Listener(second)
            trio.lowlevel.add_instrument(listener)
            with trio.fail_after(600):
                while not [event for event in second.rounds("committed") if event["group_size"] == 2]:
                    await trio.sleep(0.1)
                while not any(other.status == "training" and other.round for other in first.node.others):
                    await trio.sleep(0.1)
            trio.lowlevel.remove_instrument(listener)
            (other,) = first.node.others
            assert (other.peer_id, other.speed > 0, other.rtt_s >= 0) == ("b", True, True)

        told = [status.partition(": ")[2] for status in listener.heard if status.startswith("round ")]
        begins = told.index("gathering")
        # "agreeing" is between the last two where the others' word is waited for.
        steps = [status for status in told[begins:] if "/" not in status and status != "agreeing"]
        assert steps[:4] == ["gathering", "averaging", "fetching the mean", "landing"]
        sent = [status for status in told if status.startswith("sending ")]
        total = sent[0].partition("/")[2]
        assert sent[0] == f"sending 0/{total}"
        assert listener.heard[0] == "joining"
        assert "training" in listener.heard

    run_virtual(main)
