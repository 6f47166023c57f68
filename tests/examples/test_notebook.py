"""The notebook runs from its first cell to its last, and leaves no process behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def notebook() -> Any:
    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    return read


def test_the_notebook_is_short_and_stored_without_outputs(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert sum(len(cell.source.splitlines()) for cell in cells) < 80


def test_every_cell_of_the_notebook_runs_with_two_peers(notebook: Any) -> None:
    before = set(psutil.Process().children(recursive=True))
    NotebookClient(notebook, timeout=250, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(re.findall(r"round \d+ committed by 2, loss [\d.]+\n", text)) == 3
    assert re.search(r"; \d+ rounds, \d+ steps; the anchor is \w{12}\n\w+: .*, step \d+, \d+ steps/s\n", text)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert outputs[-1].data["text/plain"] == "0"  # the second peer's exit status
    psutil.wait_procs(left := set(psutil.Process().children(recursive=True)) - before, timeout=10)
    assert [process for process in left if process.is_running()] == []
