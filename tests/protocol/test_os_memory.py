"""Pages that are returned to the operating system take no memory, and what is beside them stays."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.protocol.os_memory import release_pages, release_unused

PAGE = mmap.PAGESIZE // 4


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_whole_pages_are_returned_and_the_rest_stays() -> None:
    values = torch.ones(8192 * PAGE).numpy()
    before = resident_bytes() if sys.platform == "linux" else 0
    release_pages(values[PAGE + 7 : -PAGE - 7])
    assert (values[: PAGE + 7] == 1).all()
    assert (values[-PAGE - 7 :] == 1).all()
    if sys.platform == "linux":
        assert resident_bytes() < before - values.nbytes // 2
    assert (values[2 * PAGE : -2 * PAGE] == (0 if sys.platform == "linux" else 1)).all()
    values[:] = 2
    assert (values == 2).all()


def test_pinned_memory_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has it by the addresses of its pages: with new ones, host and GPU would have different values."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    values = np.ones(16 * PAGE, np.float32)
    release_pages(values)
    assert (values == 1).all()


def test_less_than_a_page_stays_as_it_is() -> None:
    values = np.ones(PAGE, np.float32)
    release_pages(values[1:-1])
    release_unused()
    assert (values == 1).all()
