"""Execs p2pd so that Linux kills it when its parent ends: `python launcher.py <parent's pid> <p2pd> <flags…>`.

This is a separate script because Python code between fork and exec can hang in a process with many threads.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() == parent:  # else the parent died before prctl
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
