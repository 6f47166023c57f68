"""The output directory of a demo, which only the next demo may replace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2ptrain.demo.plan import RUN_ID
from p2ptrain.errors import ConfigError
from p2ptrain.training.output_dir import claim_out

MARKER = ".p2ptrain-demo"
BOOTSTRAP = "bootstrap"
CURVES = "curves.png"
SUMMARY = "summary.txt"
RESULTS = "results.json"
# Files that a demo writes, and that the next demo removes. Other files are the user's.
_WRITTEN = ("peer-*", "checkpoint-*", ".checkpoint-*", BOOTSTRAP, CURVES, SUMMARY, RESULTS)


def peer_directory(out: Path, number: int) -> Path:
    return out / f"peer-{number}"


@contextmanager
def claim_demo_directory(out: Path) -> Iterator[None]:
    """Make `out`, lock it, and remove what an earlier demo left in it.

    Raises:
        ConfigError: it is in use or not writable, or holds files but no earlier demo.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ConfigError(
            f"--out {out} is not empty, and no earlier demo wrote it; give another directory, or remove this one"
        )
    with claim_out(str(out), RUN_ID, joins=False):
        (out / MARKER).write_text("Written by `p2ptrain demo`; the next one replaces it.\n", encoding="utf-8")
        for pattern in _WRITTEN:
            for path in out.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        yield
