"""What a person at a terminal does: start, paste the printed line into another terminal, Ctrl-C, start again."""

from __future__ import annotations

from pathlib import Path

from tests.swarm.processes import CTRL_C, Process, Swarm, assert_anchors_agree

# In the environment, so that the commands are typed bare, and pasted as they were printed.
SETTINGS = {"steps": 0, "sync_every": 50, "fragment_fraction": 0.02}


def test_paste_the_line_leave_by_ctrl_c_and_continue(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.start("p2ptrain join", directory=tmp_path, terminal=True, settings=SETTINGS)
    line = swarm.until(lambda: first.join_line)
    second = swarm.start(line, directory=tmp_path, terminal=True, settings=SETTINGS)
    swarm.until(lambda: first.rounds(by=2) and second.rounds(by=2))

    step = leave_by_ctrl_c(second, tmp_path / "p2ptrain-p2ptrain-2")
    swarm.until(lambda: f"lost {second.peer_id}: it left the run" in first.output)
    swarm.until(lambda: first.rounds(second.rounds()[-1]["round"] + 1))

    again = swarm.start(line, directory=tmp_path, terminal=True, settings=SETTINGS)
    swarm.until(lambda: again.rounds(by=2))
    assert again.peer_id == second.peer_id
    assert "continuing run 'p2ptrain'" in again.output
    assert again.events("step")[0]["step"] > step
    swarm.until(lambda: first.rounds(again.rounds(by=2)[0]["round"]))
    assert_anchors_agree(first, second, again)

    step = leave_by_ctrl_c(first, tmp_path / "p2ptrain-p2ptrain")
    swarm.until(lambda: again.rounds(first.rounds()[-1]["round"] + 1))
    leave_by_ctrl_c(again, tmp_path / "p2ptrain-p2ptrain-2")
    alone = swarm.start("p2ptrain join", directory=tmp_path, terminal=True, settings=SETTINGS)
    swarm.until(lambda: alone.rounds())
    assert alone.peer_id == first.peer_id
    assert alone.events("step")[0]["step"] == step + 1
    assert alone.events("adopt")[0]["anchor_sha256"] == first.rounds()[-1]["anchor_sha256"]


def leave_by_ctrl_c(peer: Process, out: Path) -> int:
    """Ctrl-C, and all that must follow. Returns the step of the checkpoint."""
    assert peer.daemons
    peer.press(CTRL_C)
    assert peer.wait() == 0
    assert peer.leftovers() == []
    assert "Traceback" not in peer.output
    assert peer.events("stop")[-1]["reason"] == "interrupted"
    step = int(peer.events("step")[-1]["step"])
    assert (out / f"checkpoint-{step}" / "manifest.json").exists()
    return step
