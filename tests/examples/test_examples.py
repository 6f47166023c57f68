"""The examples do what their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.swarm.processes import CTRL_C, Process, Swarm

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPBACK = "--host /ip4/127.0.0.1/tcp/0"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"\n    python examples/{example.name}" in text.split('"""')[1]


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
    demo = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --demo --steps 300 {LOOPBACK}")
    assert demo.wait() == 0, swarm.report()
    results = re.findall(r"the peer of (. to .): (\d+)% alone, (\d+)% together", demo.output)
    assert {digits for digits, _, _ in results} == {"0 to 4", "5 to 9"}
    for _, alone, together in results:
        assert int(alone) <= 51 < int(together), demo.output


def test_the_second_image_classifier_is_started_by_the_line_of_the_first(swarm: Swarm) -> None:
    first = swarm.start(f"python {EXAMPLES / 'image_classifier.py'} --steps 5 {LOOPBACK}")
    line = swarm.until(lambda: line_after("the second peer is started by:", first))
    second = swarm.start(f"{line} {LOOPBACK}")
    assert [first.wait(), second.wait()] == [0, 0], swarm.report()
    assert "the peer of 0 to 4:" in first.output
    assert "the peer of 5 to 9:" in second.output


def line_after(heading: str, process: Process) -> str:
    """The line that a process has printed below a heading; empty as long as it has not."""
    _, _, rest = process.output.partition(f"{heading}\n")
    line, end, _ = rest.partition("\n")
    return line if end else ""
