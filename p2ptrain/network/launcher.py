"""Becomes p2pd, after telling Linux to kill it together with us: `python launcher.py <our pid> <p2pd> <its flags…>`.

Run as a script of its own, because what Python does between fork and exec in a process with many threads may hang.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() == parent:  # else it died before the kernel was told
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
