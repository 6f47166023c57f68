"""Claims are judged by their figures, and every shipped experiment can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.cli.simulate import reproduce
from p2ptrain.errors import ConfigError
from p2ptrain.simulation.reproduction.experiments import Claim, known_reproductions, read_reproduction, run_reproduction

SMALL = """
title = "Small"
peers = 2
steps = 24
sync_every = 12
eval_every = 12
[[arm]]
name = "apart"
fragment_fraction = 0.0
[[arm]]
name = "together"
fragment_fraction = 0.1
[[claim]]
row = "S5"
text = "gossip keeps peers together"
left = "together"
right = "apart"
measure = "correlation"
direction = "higher"
paper = "78.1 % → 90.3 %"
[[claim]]
row = "X1"
text = "gossip sends less"
left = "together"
right = "apart"
measure = "bytes"
direction = "lower"
paper = "-"
[[claim]]
row = "X2"
text = "both are the same"
left = "together"
right = "apart"
measure = "bytes"
direction = "equal"
paper = "-"
[[claim]]
row = "X3"
text = "going apart costs no more"
left = "apart"
right = "together"
measure = "bytes"
direction = "not higher"
paper = "-"
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("name", known_reproductions())
def test_a_shipped_experiment_has_claims_and_takes_minutes(name: str) -> None:
    reproduction = read_reproduction(name)
    assert reproduction.claims
    work = sum(arm.peers * arm.run.total_steps * arm.batch_size / 4 for arm in reproduction.variants)
    assert work <= 36_000  # at 6.5 ms a step on each of two cores: two minutes
    assert all(claim.paper for claim in reproduction.claims)
    # The papers' momentum, not ours.
    assert {arm.run.outer_momentum for arm in reproduction.variants} == {0.9}


def test_the_headline_rows_are_marked() -> None:
    rows = {c.row for name in known_reproductions() if (r := read_reproduction(name)).headline for c in r.claims}
    assert rows >= {"S5", "S7", "D1", "D12", "S12"}


@pytest.mark.long
@pytest.mark.processes
def test_claims_are_judged_by_their_figures(small: Path) -> None:
    reproduction = read_reproduction(str(small))
    outcome = run_reproduction(reproduction, [0, 1])
    verdicts = [claim.judge(outcome.records[:1]) for claim in reproduction.claims]
    words = [verdict.words for verdict in verdicts]
    assert words == ["holds", "does not hold: the other way round", "does not hold", "holds"]
    assert verdicts[0].left > verdicts[0].right
    assert len(outcome.records) == 2
    correlation, sent, _, _ = outcome.verdicts
    assert correlation.spread
    assert correlation.spread > 0
    assert sent.words == "does not hold: the other way round"


class Made:
    """Records with only a number of bytes."""

    def __init__(self, bytes_sent: float) -> None:
        self.bytes_sent = bytes_sent


@pytest.mark.parametrize(("seeds", "words"), [(2, "within noise"), (4, "within noise"), (6, "holds"), (20, "holds")])
def test_more_seeds_make_a_difference_certain(seeds: int, words: str) -> None:
    """Half of the seeds say 0, half say -2: a difference of -1 with a standard deviation near 1."""
    claim = Claim("X", "less", "left", "right", "bytes", "lower", "-")
    by_seed = [{"left": Made(100 - 2 * (seed % 2)), "right": Made(100)} for seed in range(seeds)]
    verdict = claim.judge(by_seed)  # type: ignore[arg-type]
    assert verdict.left - verdict.right == -1
    assert verdict.words == words


@pytest.mark.long
@pytest.mark.processes
def test_the_command_prints_the_papers_figure_beside_ours(small: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(reproduce, [str(small), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "78.1 % → 90.3 %" in result.output
    assert "holds" in result.output
    written = {path.name for path in (tmp_path / "out" / "small").iterdir()}
    assert written == {"apart", "together", "curves.png", "verdicts.json"}
    assert "| S5 |" in (tmp_path / "out" / "claims.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('left = "together"', 'left = "togehter"'), "did you mean together"),
        (('measure = "correlation"', 'measure = "corelation"'), "did you mean correlation"),
        (('direction = "higher"', 'direction = "up"'), "must be one of lower, higher, equal, not higher"),
        (('row = "S5"', 'rwo = "S5"'), "rwo"),
    ],
)
def test_a_mistake_in_a_claim_is_named(small: Path, change: tuple[str, str], message: str) -> None:
    small.write_text(SMALL.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_reproduction(str(small))


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(ConfigError, match="no experiment 's77'; did you mean s7"):
        read_reproduction("s77")


def test_a_claim_says_which_arm_it_is_about() -> None:
    with pytest.raises(ConfigError, match="names a variant 'c'"):
        Claim.read(
            {"row": "", "text": "", "left": "c", "right": "a", "measure": "bytes", "direction": "lower", "paper": ""},
            ["a", "b"],
        )


def test_the_table_of_rows_points_at_files_that_are_there() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/evidence/reproduction.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:p2ptrain|tests)/[\w/.]+)`", text)
    assert len(paths) > 40
    assert [path for path in paths if not (root / path).exists()] == []
    named = {name for row in re.findall(r"^\| [SD]\d.*\| ([\w, ]+) \|$", text, re.M) for name in row.split(", ")}
    assert set(known_reproductions()) <= named


def test_the_example_of_faults_strikes_six_times_and_mends_each() -> None:
    reproduction = read_reproduction(str(Path(__file__).parents[3] / "examples" / "faults.toml"))
    calm, struck = reproduction.variants
    assert not calm.schedule
    actions = [scheduled_event.action for scheduled_event in struck.schedule]
    assert len(actions) == 12
    for fault, end in (("crash", "join"), ("pause", "resume"), ("cut", "mend"), ("narrow", "widen")):
        assert actions.count(fault) == actions.count(end) > 0
