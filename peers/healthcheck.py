"""Whether the peer in this container does its work, for `healthcheck:` of compose.yaml: exit status 0 or 1.

It looks from outside and imports nothing of p2ptrain: a check is to cost milliseconds, not the start of a peer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
import time
from pathlib import Path

# The first message on every libp2p connection, from both sides: length, protocol, end of line.
MULTISTREAM = b"\x13/multistream/1.0.0\n"
TIMEOUT_S = 3.0
# The peer is the first process of its container. It holds its metrics file open, wherever that is.
OPEN_FILES = Path("/proc/1/fd")
METRICS_FILE = "metrics.jsonl"
# Thousands of steps fit in here; what else is recorded between two of them is far smaller.
TAIL_BYTES = 1024 * 1024


def answers(port: int) -> bool:
    """Whether a libp2p peer greets us on a port of this container."""
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            connection.sendall(MULTISTREAM)
            with connection.makefile("rb") as stream:
                return stream.read(len(MULTISTREAM)) == MULTISTREAM
    except OSError:
        return False


def serves(port: int) -> bool:
    """Whether a page is served on a port of this container; it may ask for its token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status in (http.HTTPStatus.OK, http.HTTPStatus.UNAUTHORIZED)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def trains(open_files: Path, within_s: float, now: float) -> bool:
    """Whether the process with these open files records its metrics, and has made a step in the last `within_s`."""
    for descriptor in open_files.iterdir():
        try:
            file = Path(os.readlink(descriptor))
        except OSError:  # closed meanwhile
            continue
        if file.name == METRICS_FILE:
            return now - last_step_at(file) <= within_s
    return False


def last_step_at(metrics: Path) -> float:
    """When the newest step in a metrics file was made, in seconds since the epoch; minus infinity without any."""
    with metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = stream.read().splitlines()
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # the line that is being written, or the second half of the first one
            continue
        if isinstance(event, dict) and event.get("event") == "step":
            return float(event["t"])
    return float("-inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    checks.add_parser("answers").add_argument("--port", type=int, required=True)
    checks.add_parser("serves").add_argument("--port", type=int, required=True)
    checks.add_parser("trains").add_argument("--within", type=float, required=True, metavar="SECONDS")
    arguments = parser.parse_args()
    # A text given to sys.exit is printed, for `docker inspect`, and makes the exit status 1.
    if arguments.check == "answers" and not answers(arguments.port):
        sys.exit(f"no libp2p peer answers on port {arguments.port}")
    if arguments.check == "serves" and not serves(arguments.port):
        sys.exit(f"no page is served on port {arguments.port}")
    if arguments.check == "trains" and not trains(OPEN_FILES, arguments.within, time.time()):
        sys.exit(f"no step in the last {arguments.within:g} s")


if __name__ == "__main__":
    main()
