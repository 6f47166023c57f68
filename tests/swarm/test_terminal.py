"""What a person at a terminal does: start, paste the printed line into another terminal, Ctrl-C, start again."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from pathlib import Path

import psutil
import pyte
import pytest

from p2ptrain.signals import TOGETHER_S
from p2ptrain.training import checkpoint
from tests.swarm.processes import CTRL_C, Process, Swarm, assert_anchors_agree

STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
# In the environment, so that the commands are typed bare, and pasted as they were printed.
SETTINGS = {"steps": 0, "sync_every": 50, "fragment_fraction": 0.02}


def test_paste_the_line_leave_by_ctrl_c_and_continue(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.start("p2ptrain join", directory=tmp_path, terminal=True, settings=SETTINGS)
    line = swarm.until(lambda: first.join_line)
    second = swarm.start(line, directory=tmp_path, terminal=True, settings=SETTINGS)
    swarm.until(lambda: first.rounds(by=2) and second.rounds(by=2))
    swarm.until(lambda: f"…{second.peer_id[-6:]}   training" in first.shown)

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
    assert alone.events("adopt")[0]["anchor_hash"] == first.rounds()[-1]["anchor_hash"]


def test_a_run_from_beginning_to_end_as_its_terminal_shows_it(swarm: Swarm) -> None:
    peer = swarm.start("p2ptrain join --steps 60 --sync-every 20", terminal=True)
    plain = swarm.start("p2ptrain join --steps 60 --sync-every 20 --plain", terminal=True)
    assert (peer.wait(), plain.wait()) == (0, 0)
    screen = pyte.HistoryScreen(80, 24, history=1000)
    pyte.ByteStream(screen).feed(peer.typed_out)
    above = ["".join(line[column].data for column in range(80)) for line in screen.history.top]
    text = "\n".join(line.rstrip() for line in [*above, *screen.display])
    # The log and other lines, the last frame, and the last line, in this order.
    order = [
        "other peers join with:",
        "round 0 solo",
        "run p2ptrain · step 60/60",
        "loss ",
        "this one  left: ",
    ]
    places = [text.rindex(part) for part in [*order, "finished at step 60: held-out "]]
    assert places == sorted(places)
    assert b"\x1b" not in plain.typed_out
    assert "step 60/60 · loss " in plain.output


def test_ctrl_c_while_it_looks_for_its_initial_peer(swarm: Swarm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and never says a word
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
        peer = swarm.start(f"p2ptrain join --initial-peers {address}", terminal=True)
        swarm.until(lambda: peer.daemons)
        give_up_by_ctrl_c(peer)


@pytest.mark.long
def test_ctrl_c_while_state_comes_and_twice_in_the_middle_of_a_step(swarm: Swarm) -> None:
    # A state of some 80 MB, and steps of a second and more.
    founder = swarm.start("p2ptrain join --model gpt-small --batch-tokens 4096 --steps 0", terminal=True)
    swarm.until_ready(founder)
    joiner = swarm.start(f"p2ptrain join --initial-peers {founder.addresses}", terminal=True)
    swarm.until(lambda: "downloading state" in joiner.output)
    founder.pause(with_daemon=False)
    give_up_by_ctrl_c(joiner)
    founder.wake()

    founder.killed = True  # it has no time to clean up; what it leaves, the next peer of this machine removes
    swarm.until(lambda: founder.events("step"))
    while founder.running:
        with contextlib.suppress(OSError):  # its terminal goes with it
            founder.press(CTRL_C)
        time.sleep(0.1)
        with contextlib.suppress(psutil.Error):  # it must not come to its end before the next one
            founder.pause(with_daemon=False)
            time.sleep(TOGETHER_S)
            founder.wake()
    assert founder.wait() == 130
    swarm.until(lambda: founder.leftovers() == [])


@pytest.mark.long
def test_ctrl_c_in_the_middle_of_rounds_and_checkpoints(swarm: Swarm) -> None:
    # A round every five steps and a checkpoint after each step: there is hardly a moment without.
    settings = {"steps": 0, "sync_every": 5, "fragment_fraction": 0.02}
    founder = swarm.start("p2ptrain join", terminal=True, settings=settings | {"checkpoint_minutes": 0.00001})
    swarm.until_ready(founder)
    joiner = swarm.start(f"p2ptrain join --initial-peers {founder.addresses}", terminal=True)
    swarm.until(lambda: founder.rounds(by=2) and joiner.rounds(by=2))
    for peer in (joiner, founder):
        out = peer.directory / "p2ptrain-p2ptrain"
        step = leave_by_ctrl_c(peer, out)
        saved = checkpoint.load_newest(out)
        assert saved is not None
        assert saved.step == step
        assert list(out.glob(".*.tmp")) == []
    assert_anchors_agree(founder, joiner)


def give_up_by_ctrl_c(peer: Process) -> None:
    """Ctrl-C before it takes part, and all that must follow."""
    peer.refused = True
    peer.press(CTRL_C)
    assert peer.wait() == 130
    assert peer.leftovers() == []
    assert "p2ptrain: interrupted" in peer.output
    assert "Traceback" not in peer.output


def leave_by_ctrl_c(peer: Process, out: Path) -> int:
    """Ctrl-C, and all that must follow. Returns the step of the checkpoint."""
    assert peer.daemons
    peer.press(CTRL_C)
    assert peer.wait() == 0
    assert peer.leftovers() == []
    assert "Traceback" not in peer.output
    assert peer.events("stop")[-1]["reason"] == "interrupted"
    # Not the last step that it recorded: a round that lands while it leaves moves it to the step of the round.
    (step,) = re.findall(rf"interrupted at step (\d+), saved in {out.name}", peer.shown)
    assert (out / f"checkpoint-{step}" / "manifest.json").exists()
    return int(step)
