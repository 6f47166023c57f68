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


def test_together_two_image_classifiers_know_what_each_was_not_shown(swarm: Swarm) -> None:
    demo = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --steps 300 {LOOPBACK}")
    assert demo.wait() == 0, swarm.report()
    results = re.findall(r"the peer of (. to .): (\d+)% alone, (\d+)% together", demo.output)
    assert {digits for digits, _, _ in results} == {"0 to 4", "5 to 9"}
    for _, alone, together in results:
        assert int(alone) <= 51 < int(together), demo.output


def test_the_second_image_classifier_is_started_by_the_line_of_the_first(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --wait --steps 5 {LOOPBACK}")
    line = swarm.until(lambda: line_after("the second peer is started by:", first))
    second = swarm.start(f"{line} {LOOPBACK}")
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    assert "the peer of 0 to 4:" in first.output
    assert "the peer of 5 to 9:" in second.output


def test_two_peers_of_a_gpt2_under_the_trainer_of_transformers(swarm: Swarm) -> None:
    command = f"python {EXAMPLES / 'huggingface_gpt2.py'} --tiny --steps 120"
    first = swarm.start(f"{command} {LOOPBACK}")
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}")
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    assert "'peers': 2" in first.output + second.output
    for peer in (first, second):
        losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", peer.output)]
        assert losses[-1] < 4 < losses[0]
        assert "the model of all peers is in" in peer.output
        assert (peer.directory / "gpt2" / "model.safetensors").exists()
        assert len(peer.events("step")) == 0  # it was asked for no metrics


def test_two_processes_are_one_peer_to_a_third(swarm: Swarm) -> None:
    island = swarm.start(f"torchrun --nproc-per-node 2 {EXAMPLES / 'island_ddp.py'} --steps 1200 {LOOPBACK}")
    line = swarm.until(lambda: line_after("others join by:", island))
    third = swarm.start(f"{line} {LOOPBACK}")
    assert [island.wait(), third.wait()] == [0, 0], swarm.report()
    assert "committed by 2" in island.output
    ranks = re.findall(r"rank (.) of 2: (step \d+, norm of the weights [\d.]+)", island.output)
    assert {rank for rank, _ in ranks} == {"0", "1"}
    assert len({where for _, where in ranks}) == 1, ranks
    assert ranks[0][1] in third.output  # the run ends in an average that all agree on


def test_an_island_that_loses_a_process_says_so_and_leaves_the_run(swarm: Swarm) -> None:
    island = swarm.start(f"torchrun --nproc-per-node 2 {EXAMPLES / 'island_ddp.py'} --steps 100000 {LOOPBACK}")
    swarm.until(lambda: "round 0" in island.output)
    island.refused = True
    (rank_1,) = (p for p in psutil.Process(island.pid).children() if p.environ().get("RANK") == "1")
    rank_1.kill()
    assert island.wait() != 0
    assert "round 0" in island.output


def test_a_checkpoint_is_tuned_by_its_owner_and_by_one_who_has_none(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'finetune.py'} --steps 300 {LOOPBACK}")
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}")
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    (upright, lying), (_, learnt) = accuracies(first)
    assert lying < 50 < 80 < upright
    assert learnt > 80
    (_, (joined, tuned)) = accuracies(second)
    assert tuned > 80
    assert joined > 50
    assert (first.directory / "digits.safetensors").exists()
    assert not (second.directory / "digits.safetensors").exists()


def test_a_corpus_is_learnt_left_and_taken_up_again(swarm: Swarm, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"The {number} quick brown foxes jump over the lazy dog. " * 3000)
    command = f"python {EXAMPLES / 'own_corpus.py'} {texts} --steps 400 {LOOPBACK}"
    first = swarm.start(command, terminal=True)
    line = swarm.until(lambda: line_after("others join by:", first))
    second = swarm.start(f"{line} {LOOPBACK}", terminal=True)
    swarm.until(lambda: "committed by 2" in first.output and "committed by 2" in second.output)
    first.press(CTRL_C)
    second.press(CTRL_C)
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    again = swarm.start(command, directory=first.directory)
    assert again.wait() == 0, swarm.report()
    rounds = [[int(number) for number in re.findall(r"round (\d+)", peer.output)] for peer in (first, again)]
    assert rounds[1][0] > rounds[0][-1]  # it goes on where it was, alone
    assert float(again.output.split()[-1]) < 1


def accuracies(process: Process) -> list[tuple[int, int]]:
    """What a process printed of upright digits and of lying ones, in percent."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+)% of the upright digits, (\d+)% of", process.output)]


def line_after(heading: str, process: Process) -> str:
    """The line that a process has printed below a heading; empty as long as it has not."""
    _, _, rest = process.output.partition(f"{heading}\n")
    line, end, _ = rest.partition("\n")
    return line if end else ""
