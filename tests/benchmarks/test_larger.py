"""The larger model of docs/evidence/results.md, at a small size: text, arms, and that runs done are not repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.larger import ARMS, VOCABULARY, Size, experiment, library_text, llama_10m, measure, read, table
from p2ptrain.training.models import GPT, GPTConfig


def test_the_text_is_of_the_library_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "test/a.py", "site-packages/a.py", "c.txt", "_sysconfigdata_x.py", "d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert library_text(1, tmp_path) == "a/z.py\nb.py\nd.py"
    # Until it is enough.
    assert library_text(7e-6, tmp_path) == "a/z.py\nb.py"


def test_all_arms_have_the_same_settings_but_for_peers_rounds_and_batch() -> None:
    alone, four, parallel = (experiment(arm, Size(), Path("data")) for arm in ARMS)
    assert [(e.peers, e.batch_size, e.run.sync_every) for e in (alone, four, parallel)] == [
        (1, 2, 100), (4, 2, 25), (1, 8, 100)
    ]  # fmt: skip
    assert alone.run == parallel.run
    assert {e.run.total_steps * e.batch_size * e.peers for e in (four, parallel)} == {800}
    assert sum(parameter.numel() for parameter in llama_10m().parameters()) == 10_492_224


def small() -> torch.nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, layers=1, heads=1, width=8, context=16))


@pytest.mark.processes
def test_what_is_missing_is_run_and_read_back(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    for name, count in (("train", 4000), ("val", 400)):
        np.random.default_rng(0).integers(0, 300, count).astype("<u2").tofile(tmp_path / f"{name}.bin")
    size = Size(steps=8, sync_every=4, batch=1, warmup_steps=2, eval_windows=3, model=f"{__name__}:small")
    rows = measure(size, tmp_path, results)
    assert [(row["arm"], row["tokens"], len(row["losses"])) for row in rows] == [
        ("one peer", 128, 1), ("four peers, simulated", 512, 4), ("data parallel, in one process", 512, 1)
    ]  # fmt: skip
    assert [len(row["rounds"]) for row in rows] == [1, 2, 1]
    lines = table(rows).splitlines()
    assert lines[2].startswith("| one peer | 8 | – | 1 | 128 | ")
    assert lines[3].startswith("| four peers, simulated | 8 | 4 | 1 | 512 | ")
    assert lines[4].startswith("| data parallel, in one process | 8 | – | 4 | 512 | ")
    assert lines[2].endswith(" | 0 |")
    assert lines[3].endswith(f" | {rows[1]['mb_per_peer']:,.1f} |")
    # Six bytes for each parameter and step.
    parameters = sum(parameter.numel() for parameter in small().parameters())
    assert lines[4].endswith(f" | {8 * 6e-6 * parameters:,.0f} (computed) |")
    # Nothing is run again; another size is another result.
    written = results.read_text()
    assert measure(size, tmp_path, results) == rows
    assert results.read_text() == written
    assert read(results, dataclasses.replace(size, batch=2)) == []
