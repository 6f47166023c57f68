"""The benchmark of rounds that land late: the algebra of its rules, its codings, and its results, on a small scale."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks import kept_runs, late, late_rules
from benchmarks.late_rules import ON_TIME, RULES, Array, Landing, Prediction, aged, heloco
from benchmarks.late_training import Cell, Setup, coder_of, mean_of, muon_step, simulate, sparse, topk_mean
from p2ptrain.algorithms.outer import outer_step
from p2ptrain.training.data import Characters, Corpus, load_corpus

TINY = Setup(steps=13, warmup_steps=2, layers=1, width=16, batch_size=2, eval_windows=8)
TENSORS = [slice(0, 40), slice(40, 64)]


def vector(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(64, np.float32)


def landing(progress: Array) -> Landing:
    """A landing after this progress, of a peer whose snapshot is not the mean of all."""
    snapshot = vector(0)
    return Landing(
        snapshot + progress, snapshot, vector(1), vector(2), np.float32(0.01) * vector(3), vector(4), TENSORS
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words, chance = ["the", "peer", "sends", "a", "round", "of", "means"], random.Random(0)
    file = tmp_path_factory.mktemp("late") / "text.txt"
    file.write_text(" ".join(chance.choice(words) for _ in range(9000)))
    return file


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return load_corpus(str(text), Characters())


def test_without_progress_all_landings_but_those_of_on_time_are_plain() -> None:
    arrived = landing(np.zeros(64, np.float32))
    for name, rule in RULES.items():
        is_plain = np.allclose(rule.land(arrived), arrived.target, atol=1e-6)
        assert is_plain == (not name.startswith(("keep", "mix"))), name
        assert name in ON_TIME or is_plain


def test_add_keeps_the_progress_and_keep_all_that_the_peer_had_moved() -> None:
    progress = vector(5)
    arrived = landing(progress)
    np.testing.assert_allclose(RULES["add"].land(arrived), arrived.target + progress, rtol=1e-6)
    moved = arrived.now - arrived.before
    np.testing.assert_allclose(RULES["keep"].land(arrived), arrived.after + moved, atol=1e-5)
    np.testing.assert_array_equal(RULES["write"].land(arrived), arrived.target)


def test_damping_mixes_the_landing_of_add_with_the_anchor() -> None:
    arrived = landing(vector(5))
    mix = 0.25 * RULES["add"].land(arrived) + 0.75 * arrived.target
    np.testing.assert_allclose(RULES["damped 0.25"].land(arrived), mix, atol=1e-6)
    np.testing.assert_allclose(RULES["mix 0.25"].land(arrived), 0.25 * arrived.now + 0.75 * arrived.target, atol=1e-6)


def test_net_leaves_out_what_the_momentum_expected_and_nothing_else() -> None:
    still = landing(np.zeros(64, np.float32))
    ahead = still.after - (still.before - still.mean)
    other = vector(6)
    for tensor in TENSORS:
        other[tensor] -= np.dot(other[tensor], ahead[tensor]) / np.dot(ahead[tensor], ahead[tensor]) * ahead[tensor]
    for times, left in ((0.5, 0.0), (1.5, 0.5), (-0.5, -0.5)):
        arrived = landing(np.float32(times) * ahead + other)
        expected = arrived.target + np.float32(left) * ahead + other
        np.testing.assert_allclose(RULES["net"].land(arrived), expected, atol=1e-5)


def test_delay_compensation_turns_large_progress_by_the_shift() -> None:
    arrived = landing(np.ones(64, np.float32))
    shift = arrived.target - arrived.begun
    np.testing.assert_allclose(
        RULES["dc-asgd 0.1"].land(arrived), arrived.target + 1 - np.float32(0.1) * shift, atol=1e-5
    )


def prediction(anchor: Array, moment: Array, sent: Array, mean_before: Array) -> Prediction:
    def step_from(gradient: Array) -> Array:
        predicted, copy = anchor.copy(), moment.copy()
        outer_step("nesterov", predicted, [copy], gradient, lr=0.7, momentum=0.6, round_=1)
        return predicted

    return Prediction(anchor - sent, sent, mean_before, moment, mean_before, 4, 0.6, step_from)


def test_guesses_are_right_where_their_assumption_holds() -> None:
    anchor, gradient = vector(0), vector(1)
    steady = prediction(anchor, gradient / np.float32(0.4), gradient, gradient)
    for guess in (late_rules.look_ahead, late_rules.eager, late_rules.own_step):
        np.testing.assert_allclose(guess(steady), steady.step_from(gradient), atol=1e-5)
    half = late_rules.look_ahead(steady, 0.5)
    np.testing.assert_allclose(half, (steady.snapshot + steady.step_from(gradient)) / 2, atol=1e-5)


def test_heloco_keeps_aligned_tensors_shrinks_opposed_ones_and_turns_weak_ones() -> None:
    gradient, moment = np.zeros(64, np.float32), np.zeros(64, np.float32)
    tensors = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    gradient[:8] = [1, 0.5, -1, 1, 0, 1, 1, 1]
    moment[:8] = [1, 0, 1, 0, 1, 0, 0, 0]
    corrected = heloco(gradient, [moment], tensors, 0.8)
    np.testing.assert_array_equal(corrected[:2], gradient[:2])
    assert -1 < corrected[2] < 0
    assert corrected[3] == 1
    assert corrected[4] > 0
    assert np.linalg.norm(corrected[4:6]) == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(corrected[6:8], gradient[6:8])


def test_age_scales_the_outer_gradient_until_the_cut_off() -> None:
    mean = vector(0)
    np.testing.assert_array_equal(aged(mean, [], TENSORS, 0), mean)
    assert not aged(mean, [], TENSORS, late_rules.CUT_OFF).any()
    assert 0 < np.linalg.norm(aged(mean, [], TENSORS, 0.8)) < np.linalg.norm(mean)


def test_outer_steps_are_the_usual_one_on_time() -> None:
    for name, rule in RULES.items():
        optimizer, lr, momentum = rule.outer(0)
        is_usual = (optimizer, round(lr, 9), momentum) == late_rules.usual(0)
        assert is_usual == (not name.startswith(("cgad adam", "plain mean", "outer "))), name


def test_sparse_keeps_the_largest_values_of_each_tensor_and_the_mean_is_over_senders() -> None:
    values = np.random.default_rng(0).standard_normal(4096 + 64).astype(np.float32)
    decoded, size = sparse(values, tensors=[slice(0, 4096), slice(4096, 4160)], kept=64)
    positions = np.flatnonzero(decoded)
    assert set(positions) == {*np.argsort(np.abs(values[:4096]))[-64:], 4096 + np.abs(values[4096:]).argmax()}
    assert size == -(-(65 * 14 + 2 * 64) // 8)
    np.testing.assert_allclose(decoded[positions], values[positions], atol=1.3)  # little more than signs
    other = np.zeros_like(decoded)
    np.testing.assert_array_equal(mean_of([decoded, other], of_senders=True), decoded)
    np.testing.assert_array_equal(mean_of([decoded, other], of_senders=False), decoded / 2)


def test_the_mean_of_topk_leaves_out_who_sent_nothing_and_the_lesser_sign() -> None:
    sent = [np.zeros(64, np.float32) for _ in range(3)]
    sent[0][:3], sent[1][:3], sent[2][0] = (2, 2, 1), (4, -3, 0), -1
    assert topk_mean(sent)[:4].tolist() == [3, -3, 1, 0]


def test_a_coder_decodes_what_the_codec_does() -> None:
    code, error_decay = coder_of("int4", TENSORS)
    decoded, size = code(vector(0))
    assert (size, error_decay) == (34, 0)
    np.testing.assert_allclose(decoded, vector(0), atol=0.3)


def test_muon_in_float32_is_that_of_torch() -> None:
    matrices = [nn.Parameter(torch.randn(shape, generator=torch.manual_seed(0))) for shape in ((8, 32), (24, 8))]
    copies = [nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    muon = torch.optim.Muon(copies, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for seed in range(2):
        for matrix, copy in zip(matrices, copies, strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=torch.manual_seed(seed))
            copy.grad = matrix.grad.clone()
        muon_step(matrices, momenta, lr=0.1, weight_decay=0.1)
        muon.step()
    for matrix, copy in zip(matrices, copies, strict=True):
        torch.testing.assert_close(matrix, copy, atol=3e-3, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rules_differ_only_if_rounds_are_late(corpus: Corpus, optimizer: str) -> None:
    def loss(rule: str, delay: int) -> float:
        return simulate(Cell("late", rule, delay, optimizer, 2, "iid", 0, sync_every=4), corpus, None, TINY)["loss"]

    on_time, late_loss = loss("add", 0), loss("add", 2)
    assert late_loss != on_time
    for rule in ("write", "net", "eager", "less momentum"):
        assert loss(rule, 0) == pytest.approx(on_time, abs=1e-4)
        assert loss(rule, 2) != pytest.approx(late_loss, abs=1e-6), rule


def test_peers_may_be_late_by_different_times(corpus: Corpus) -> None:
    cell = Cell("late", "add", 2, "adamw", 3, "iid", 0, sync_every=4)
    spread = dataclasses.replace(cell, spread=True)
    assert (cell.delays, spread.delays) == ([2, 2, 2], [0, 1, 2])
    on_time, all_late, between = (
        simulate(of, corpus, None, TINY)["loss"] for of in (dataclasses.replace(cell, delay=0), cell, spread)
    )
    assert len({on_time, all_late, between}) == 3
    assert simulate(dataclasses.replace(spread, delay=0), corpus, None, TINY)["loss"] == on_time


def test_sections_in_turn_send_the_bytes_of_the_whole_and_are_all_averaged(corpus: Corpus) -> None:
    setup = dataclasses.replace(TINY, steps=15)  # three rounds, of each section, too
    whole, sections = (
        simulate(Cell("late", rule, 2, "adamw", 2, "iid", 0, sync_every=4), corpus, None, setup)
        for rule in ("add", "2 sections in turn")
    )
    assert sections["mb"] == pytest.approx(whole["mb"], rel=0.01)
    assert sections["loss"] != whole["loss"]
    # Averages bring the peers as close together as those of the whole do.
    assert abs(sections["own_loss"] - sections["loss"]) < 2 * abs(whole["own_loss"] - whole["loss"]) + 1e-3


def test_the_page_has_the_results() -> None:
    text = (late.RESULTS.parent / "late.md").read_text(encoding="utf-8")
    results = late.read_results(late.RESULTS)
    for grid in ("late", "bytes"):
        assert late.table(results, grid) in text


def test_peers_learn(corpus: Corpus) -> None:
    setup = dataclasses.replace(TINY, steps=60, lr=1e-2)
    for codec in ("int4", "topk", "sparse128"):
        learnt = simulate(Cell("bytes", "add", 0, "adamw", 2, "iid", 0, codec, 10), corpus, None, setup)
        assert learnt["loss"] < 3.2  # 4.6 at the start
        assert learnt["mb"] > 0


@pytest.mark.processes
def test_runs_are_appended_and_not_repeated(text: Path, tmp_path: Path) -> None:
    file, cells = tmp_path / "late.jsonl", [Cell("late", "add", d, "adamw", 2, "iid", 0, sync_every=4) for d in (0, 2)]
    assert late.read_results(file) == {}
    for cell in cells:
        kept_runs.append(file, late.measure(cell, text, TINY))
        with file.open("a") as cut_off:
            cut_off.write('{"grid": "la')
    results = late.read_results(file)
    assert list(results) == cells
    assert results[cells[0]]["loss"] > 0
    lines = late.table(results, "late").splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| 2 peers, iid, adamw, H = 4: add", "0"], ["| 2 peers, iid, adamw, H = 4: add", "2"]
    ]  # fmt: skip


def test_the_report_compares_with_add_on_time(tmp_path: Path) -> None:
    file = tmp_path / "late.jsonl"
    for rule, delay, seed, loss in (("add", 0, 0, 2.0), ("add", 0, 1, 2.1), ("net", 20, 0, 2.1), ("net", 20, 1, 2.3)):
        cell = Cell("late", rule, delay, "muon", 4, "iid", seed)
        kept_runs.append(file, {**dataclasses.asdict(cell), "loss": loss, "own_loss": loss, "mb": 1.0})
    printed = CliRunner().invoke(late.main, ["--results", str(file), "--report"], catch_exceptions=False).output
    assert printed.splitlines()[2:] == [
        "| net | as `add` | 2.200 ± 0.100 of 2 (+0.150) |", "| add | 2.050 ± 0.050 of 2 (+0.000) | – |"
    ]  # fmt: skip


def test_runs_in_other_settings_have_a_table_of_their_own(tmp_path: Path) -> None:
    file, cell = tmp_path / "late.jsonl", Cell("late", "add", 0, "muon", 4, "iid", 0)
    for changed, loss in (
        ({}, 2.0), ({"lr": 6e-3}, 1.9), ({"lr": 6e-3, "delay": 20}, 2.2), ({"sync_every": 50, "steps": 2000}, 1.8),
        ({"delay": 20, "spread": True}, 2.1),
    ):  # fmt: skip
        kept_runs.append(file, {**dataclasses.asdict(dataclasses.replace(cell, **changed)), "loss": loss})
    assert late.table(late.read_results(file), "late").splitlines()[4:] == [
        "| other settings | d | loss |", "| --- | --- | --- |",
        "| 4 peers, iid, muon, lr 0.006: add | 0 | 1.900 (+0.000) |",
        "| 4 peers, iid, muon, lr 0.006: add | 20 | 2.200 (+0.300) |",
        "| 4 peers, iid, muon, peers late by 0 to d: add | 20 | 2.100 (+0.100) |",
        "| 4 peers, iid, muon, H = 50, 2000 steps: add | 0 | 1.800 (+0.000) |",
    ]  # fmt: skip


def test_a_cell_may_have_a_rate_and_steps_of_its_own(corpus: Corpus) -> None:
    cell = Cell("late", "add", 2, "adamw", 2, "iid", 0, sync_every=4)
    named = dataclasses.replace(cell, lr=TINY.lr, steps=TINY.steps)
    usual = simulate(cell, corpus, None, TINY)
    assert simulate(named, corpus, None, TINY) == usual
    assert simulate(dataclasses.replace(named, lr=2 * TINY.lr), corpus, None, TINY) != usual
    assert simulate(dataclasses.replace(named, steps=TINY.steps + 4), corpus, None, TINY) != usual


def test_every_cell_is_run_once_and_the_most_informative_first() -> None:
    for grid in ("late", "bytes"):
        everything = list(late.cells(grid))
        assert len(set(everything)) == len(everything)
    first = list(late.cells("late"))[: 2 * len(RULES)]
    assert {(cell.peers, cell.shards, cell.seed) for cell in first} == {(4, "iid", 0)}
