"""The healthcheck of the containers: it tells a peer at work from one that is not."""

from __future__ import annotations

import json
import os
import runpy
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HEALTHCHECK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "peers" / "healthcheck.py"))
answers, serves, trains, last_step_at = (HEALTHCHECK[name] for name in ("answers", "serves", "trains", "last_step_at"))
MULTISTREAM = HEALTHCHECK["MULTISTREAM"]


@contextmanager
def _server(greeting: bytes) -> Iterator[int]:
    """A port on which one client is greeted."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(len(MULTISTREAM))
                connection.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def _open_files(directory: Path, *files: Path) -> Path:
    """A directory such as /proc/1/fd."""
    directory.mkdir()
    for number, file in enumerate(files):
        os.symlink(file, directory / str(number))
    return directory


def _metrics(file: Path, *events: dict[str, object], tail: str = "") -> Path:
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + tail, encoding="utf-8")
    return file


def test_a_libp2p_peer_answers() -> None:
    with _server(MULTISTREAM) as port:
        assert answers(port)


@pytest.mark.parametrize("greeting", [b"", MULTISTREAM[:5], b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_is_no_libp2p_peer_does_not_count(greeting: bytes) -> None:
    with _server(greeting) as port:
        assert not answers(port)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not answers(port)
    assert not serves(port)


@pytest.mark.parametrize(
    ("greeting", "is_page"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 401 No\r\n\r\n", True),
        (b"HTTP/1.1 500 Oh\r\n\r\n", False),
        (MULTISTREAM, False),
        (b"", False),
    ],
)
def test_a_page_is_served(greeting: bytes, is_page: bool) -> None:
    with _server(greeting) as port:
        assert serves(port) == is_page


def test_a_worker_trains_while_its_newest_step_is_young(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path / "metrics.jsonl", {"event": "step", "t": 100.0}, {"event": "fragments", "t": 190.0})
    open_files = _open_files(tmp_path / "fd", tmp_path / "no such file", tmp_path / ".lock", metrics)
    assert trains(open_files, 60, now=160.0)
    assert not trains(open_files, 60, now=161.0)


def test_a_worker_that_has_not_begun_does_not_train(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path / "metrics.jsonl", {"event": "start", "t": 100.0})
    assert not trains(_open_files(tmp_path / "fd", metrics), 60, now=100.0)
    assert not trains(_open_files(tmp_path / "empty"), 60, now=100.0)


def test_the_newest_step_is_found_behind_an_unfinished_line(tmp_path: Path) -> None:
    steps = [{"event": "step", "t": float(t)} for t in range(3)]
    assert last_step_at(_metrics(tmp_path / "metrics.jsonl", *steps, tail='{"event": "st')) == 2.0


@pytest.mark.parametrize("line", ["null", "5", "[]", '"step"', "{}"])
def test_a_line_that_is_not_an_event_is_skipped(line: str, tmp_path: Path) -> None:
    assert last_step_at(_metrics(tmp_path / "metrics.jsonl", {"event": "step", "t": 2.0}, tail=f"{line}\n")) == 2.0


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    long = {"event": "sample", "values": "x" * HEALTHCHECK["TAIL_BYTES"]}
    metrics = _metrics(tmp_path / "metrics.jsonl", {"event": "step", "t": 5.0}, long)
    assert last_step_at(metrics) == float("-inf")
