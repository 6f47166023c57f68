"""A closed run of real processes: the key or a ticket with it lets in, others are told, and nothing shows the key."""

from __future__ import annotations

import base64
import re
import urllib.request
from pathlib import Path

import psutil
import pytest

from p2ptrain.settings.run_key import key_text, make_key_file, read_key
from tests.swarm.processes import Process, Swarm

STEPS = "--steps 0 --sync-every 50"


def holds(directory: Path, *secrets: bytes) -> list[Path]:
    """Files below a directory that hold one of these."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found += [path for secret in secrets if secret in content]
    return found


def command_lines(process: Process) -> str:
    tree = [psutil.Process(process._process.pid)]
    return "\n".join(" ".join(one.cmdline()) for one in [*tree, *tree[0].children(recursive=True)])


def test_a_closed_run_is_joined_with_its_key_and_shows_it_nowhere(swarm: Swarm, tmp_path: Path) -> None:
    key_file, other_file = tmp_path / "keys" / "friends.key", tmp_path / "keys" / "other.key"
    key_file.parent.mkdir()
    make_key_file(key_file, bytes(range(7, 39)))
    make_key_file(other_file, bytes(32))
    first = swarm.start(f"p2ptrain join {STEPS} --run-key {key_file} --prometheus 0")
    swarm.until_ready(first)
    swarm.until(lambda: "p2ptrain join p2pt1" in first.output)
    match = re.search(r"^p2ptrain join (p2pt1\w+) --run-key (\S+)$", first.output, re.MULTILINE)
    assert match is not None
    assert match[2] == str(key_file)

    second = swarm.start(f"p2ptrain join {match[1]} --run-key {key_file}")
    swarm.until(lambda: all(process.rounds(by=2) for process in (first, second)))

    line = swarm.refusal(f"p2ptrain join {match[1]}")
    assert f"the run is closed: peer {first.peer_id} asks for its key; give --run-key FILE" in line
    for tried in ("join", "peers"):
        line = swarm.refusal(f"p2ptrain {tried} --initial-peers {first.addresses} --run-key {other_file}")
        assert f"wrong run key: peer {first.peer_id} has another run key or run id" in line
    listed = swarm.start(f"p2ptrain peers --initial-peers {first.addresses} --run-key {key_file} --json")
    swarm.until(lambda: not listed.running)
    assert first.peer_id in listed.output
    assert second.peer_id in listed.output

    url = re.search(r"Prometheus metrics at (\S+)", first.output)
    assert url is not None
    with urllib.request.urlopen(url[1], timeout=20) as answer:
        scraped = answer.read()
    shown = command_lines(first).encode() + command_lines(second).encode()
    for process in (first, second):
        process.terminate()
    swarm.until(lambda: not first.running and not second.running)
    assert "broke the protocol" not in first.output + first.errors + second.output + second.errors

    key = read_key(key_file)
    secrets = [
        key.secret, key.secret.hex().encode(), base64.b64encode(key.secret), repr(key.secret).encode(),
        key_text(key).encode(), key_text(key)[5:45].encode(),
    ]  # fmt: skip
    assert set(holds(tmp_path, *secrets)) == {key_file}
    for secret in secrets:
        assert secret not in scraped
        assert secret not in shown
    # All of what they wrote was looked through: outputs, metrics and checkpoints.
    assert len(holds(tmp_path, first.peer_id.encode())) > 3


@pytest.mark.long
def test_a_ticket_with_the_key_is_enough_and_a_file_keeps_it_out_of_the_process_list(
    swarm: Swarm, tmp_path: Path
) -> None:
    key_file, ticket = tmp_path / "friends.key", tmp_path / "friends.ticket"
    make_key_file(key_file, bytes(range(7, 39)))
    first = swarm.start(f"p2ptrain join {STEPS} --run-key {key_file} --share-key --run-id friends")
    swarm.until_ready(first)
    swarm.until(lambda: "p2ptrain join p2pt1" in first.output)
    match = re.search(r"it holds the run key: .*\np2ptrain join (p2pt1\w+)$", first.output, re.MULTILINE)
    assert match is not None
    ticket.write_text(match[1] + "\n", encoding="utf-8")
    second = swarm.start(f"p2ptrain join {ticket}")
    swarm.until(lambda: all(process.rounds(by=2) for process in (first, second)))
    assert f"joined run 'friends' (model gpt-demo, endless steps) as peer {second.peer_id}" in second.output
    assert match[1] not in second.output
    assert "p2pt1" not in command_lines(second)
    assert not second.errors or "list of processes" not in second.errors

    # A program that knows the id, but not the key, gets nothing from the DHT either.
    line = swarm.refusal(f"p2ptrain peers --initial-peers {second.addresses} --run-id friends")
    assert "the run is closed" in line
