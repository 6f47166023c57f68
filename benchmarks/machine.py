"""Describes the machine and the package that a run measures, with the time and the load."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def machine() -> dict[str, str]:
    """The date, the package, the machine, and its load average over the last minute."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "package": package(),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def package() -> str:
    """git's hash of the directory `p2ptrain`, as committed, and "+" if its files differ; "" without git.

    Runs of one package ran the same code of ours, whatever else commits between them changed.
    """
    try:
        differs = git("status", "--porcelain", "--", "p2ptrain") != ""
        return git("rev-parse", "--short=7", "HEAD:p2ptrain") + "+" * differs
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(*words: str) -> str:
    """Run a command of git in this repository, and return what it prints. Raises OSError or CalledProcessError."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()
