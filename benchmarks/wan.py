"""A wide-area network on one machine: namespaces whose packets `wan.c` carries with rate, delay, jitter and loss."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.namespaces import Machine

SOURCE = Path(__file__).with_name("wan.c")


def why_not() -> str:
    """Why this machine cannot have such a network; "" if it can."""
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a wide-area network needs root and /dev/net/tun"
    missing = [command for command in ("cc", "ip", "nsenter") if shutil.which(command) is None]
    return f"a wide-area network needs {' and '.join(missing)}" if missing else ""


@contextlib.contextmanager
def wide_area(*links: str) -> Iterator[list[Machine]]:
    """Machines whose access links are described as `wan.c` wants it: "mbit=100,ms=25". Raises RuntimeError.

    The delay of a path is the sum of both ends', one way.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory:
        program = Path(directory) / "wan"
        subprocess.run(["cc", "-O2", "-o", program, SOURCE, "-lm"], check=True)
        with subprocess.Popen([program, *links], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as wan:
            assert wan.stdin is not None
            assert wan.stdout is not None
            try:
                machines = []
                for line in wan.stdout:
                    if line.strip() == "READY":
                        break
                    _, _, pid, address = line.split()
                    machines.append(Machine(("nsenter", "-t", pid, "-n", "--"), address, "", int(pid)))
                if len(machines) != len(links):
                    raise RuntimeError("the wide-area network did not start")
                yield machines
            finally:
                wan.stdin.close()
