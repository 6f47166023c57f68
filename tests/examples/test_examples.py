"""The examples do what their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.swarm.processes import CTRL_C, Process, Swarm

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPBACK = "--host /ip4/127.0.0.1/tcp/0"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert re.search(rf"\n    (python|torchrun .*) examples/{example.name}", text.split('"""')[1])


def test_two_peers_of_the_minimal_example(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'minimal.py'} {LOOPBACK}", terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    two = [first, second]
    swarm.until(lambda: all("committed by 2" in peer.output for peer in two))
    for peer in two:
        peer.press(CTRL_C)
    assert [peer.wait() for peer in two] == [0, 0], swarm.report()
    assert "Traceback" not in first.output + second.output


@pytest.mark.long
def test_together_two_image_classifiers_know_what_each_was_not_shown(swarm: Swarm) -> None:
    demo = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --steps 180 {LOOPBACK}")
    assert demo.wait() == 0, swarm.report()
    results = re.findall(r"the peer of (. to .): (\d+)% alone, (\d+)% together", demo.output)
    assert {digits for digits, _, _ in results} == {"0 to 4", "5 to 9"}
    for _, alone, together in results:
        assert int(alone) <= 51 < int(together), demo.output


@pytest.mark.long
def test_the_second_image_classifier_is_started_by_the_line_of_the_first(swarm: Swarm) -> None:
    # Two rounds: in five steps the first one had left before the second one had its state.
    first = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --wait --steps 120 {LOOPBACK}")
    line = swarm.until(lambda: line_after("the second peer is started by:", first))
    second = swarm.start(f"{line} {LOOPBACK}")
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    assert "the peer of 0 to 4:" in first.output
    assert "the peer of 5 to 9:" in second.output


@pytest.mark.long
def test_two_peers_of_a_gpt2_under_the_trainer_of_transformers(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'huggingface_gpt2.py'} --tiny --steps 3000 {LOOPBACK}", terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    two = [first, second]
    swarm.until(lambda: all("'peers': 2" in peer.output for peer in two) and "checkpoint-100" in saved(first))
    for peer in two:
        peer.press(CTRL_C)
    assert [peer.wait() for peer in two] == [0, 0], swarm.report()
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", first.output)]
    assert losses[-1] < losses[0]
    assert "left at step" in second.output
    assert (first.directory / "gpt2" / "checkpoint-100" / "p2ptrain.safetensors").exists()


@pytest.mark.long
def test_two_peers_under_the_trainer_of_lightning(swarm: Swarm) -> None:
    command = f"python {EXAMPLES / 'lightning_module.py'} --steps 100000 {LOOPBACK}"
    first = swarm.start(command, terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    two = [first, second]
    swarm.until(lambda: all("peers 2" in peer.output for peer in two))
    checkpoint = first.directory / "lightning" / "last.ckpt"
    swarm.until(checkpoint.exists)
    for peer in two:
        peer.refused = True  # Lightning ends with status 1 after Ctrl-C
        peer.press(CTRL_C)
    assert [peer.wait() for peer in two] == [1, 1], swarm.report()
    assert "Traceback" not in first.output + second.output
    again = swarm.start(f"{command} --resume {checkpoint}", terminal=True)
    steps = swarm.until(lambda: re.findall(r"step (\d+), loss", again.output))
    assert int(steps[0]) >= 50
    again.refused = True
    again.press(CTRL_C)
    again.wait()


@pytest.mark.long
def test_the_processes_that_accelerate_launches_are_one_peer(swarm: Swarm) -> None:
    script = f"{EXAMPLES / 'accelerate_loop.py'} --steps 300 {LOOPBACK}"
    peer = swarm.start(f"accelerate launch --multi_gpu --num_processes 2 {script}")  # on CPUs too
    assert peer.wait() == 0, swarm.report()
    assert line_after("others join by:", peer)
    ranks = re.findall(r"rank (.) of 2: (step 300, norm of the weights [\d.]+)\n", peer.output)
    assert {rank for rank, _ in ranks} == {"0", "1"}
    assert len({where for _, where in ranks}) == 1, ranks


@pytest.mark.long
def test_the_processes_of_a_group_peer_end_with_the_same_weights(swarm: Swarm) -> None:
    group_peer = swarm.start(f"torchrun --nproc-per-node 2 {EXAMPLES / 'process_group_ddp.py'} --steps 1200 {LOOPBACK}")
    assert group_peer.wait() == 0, swarm.report()
    assert line_after("others join by:", group_peer)
    ranks = re.findall(r"rank (.): (step 1200, norm of the weights [\d.]+)\n", group_peer.output)
    assert {rank for rank, _ in ranks} == {"0", "1"}
    assert len({where for _, where in ranks}) == 1, ranks


@pytest.mark.long
def test_a_group_peer_that_loses_a_process_ends(swarm: Swarm) -> None:
    group_peer = swarm.start(f"torchrun --nproc-per-node 2 {EXAMPLES / 'process_group_ddp.py'} {LOOPBACK}")
    swarm.until(lambda: "round 0" in group_peer.output)
    group_peer.killed = True
    (rank_1,) = (p for p in psutil.Process(group_peer.pid).children() if p.environ().get("RANK") == "1")
    rank_1.kill()
    assert group_peer.wait() != 0


@pytest.mark.long
def test_a_sharded_peer_trains_to_the_end_and_gathers_the_agreed_weights_once(swarm: Swarm) -> None:
    sharded = swarm.start(f"torchrun --nproc-per-node 2 {EXAMPLES / 'fsdp_peer.py'} --steps 100 {LOOPBACK}")
    assert sharded.wait() == 0, swarm.report()
    assert line_after("others join by:", sharded)
    assert len(re.findall(r"step 100, norm of the agreed weights [\d.]+, hash \w{12}\n", sharded.output)) == 1


@pytest.mark.long
def test_a_checkpoint_is_tuned_by_its_owner_and_by_one_who_has_none(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'finetune.py'} --steps 100000 {LOOPBACK}", terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    two = [first, second]
    swarm.until(lambda: accuracies(second))
    for peer in two:
        peer.press(CTRL_C)
    assert [peer.wait() for peer in two] == [0, 0], swarm.report()
    (upright, lying), (_, learnt) = accuracies(first)
    assert lying < 50 < 80 < upright
    assert learnt > 80
    joined, _ = accuracies(second)
    assert max(joined) > 80  # it came with weights at random
    assert [(peer.directory / "digits.safetensors").exists() for peer in two] == [True, False]


@pytest.mark.long
def test_a_corpus_is_learnt_left_and_taken_up_again(swarm: Swarm, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"The {number} quick brown foxes jump over the lazy dog. " * 3000)
    command = f"python {EXAMPLES / 'own_corpus.py'} {texts} --steps 1000000 {LOOPBACK}"
    first = swarm.start(command, terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    swarm.until(lambda: "committed by 2" in first.output and "committed by 2" in second.output)
    first.press(CTRL_C)
    second.press(CTRL_C)
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    again = swarm.start(command, directory=first.directory, terminal=True)
    swarm.until(lambda: any(loss < 1 for _, loss in rounds_and_losses(again)))
    again.press(CTRL_C)
    assert again.wait() == 0, swarm.report()
    assert rounds_and_losses(again)[0][0] > rounds_and_losses(first)[-1][0]  # it goes on where it was, alone


def saved(process: Process) -> list[str]:
    """The checkpoints that a Trainer has written."""
    return [path.parent.name for path in process.directory.glob("gpt2/*/p2ptrain.safetensors")]


def accuracies(process: Process) -> list[tuple[int, int]]:
    """What a process printed of upright digits and of lying ones, in percent."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+)% of the upright digits, (\d+)% of", process.output)]


def rounds_and_losses(process: Process) -> list[tuple[int, float]]:
    """What a process printed of its rounds: each one's number and the loss at its end, in nats."""
    return [(int(a), float(b)) for a, b in re.findall(r"round (\d+) .*, loss ([\d.]+)\s", process.output)]


def line_after(heading: str, process: Process) -> str:
    """The line that a process has printed below a heading; empty as long as it has not."""
    _, _, rest = process.output.partition(f"{heading}\n")
    line, end, _ = rest.partition("\n")
    return line if end else ""
