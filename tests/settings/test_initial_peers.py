"""Addresses in flags and files, and the printed join command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.settings.initial_peers import join_line, read_initial_peers, write_addresses

A = "/ip4/10.0.0.1/tcp/4001/p2p/QmA"
B = "/dns4/example.org/tcp/4001/p2p/QmB"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/QmA"


def test_addresses_and_files_mix_and_double_ones_count_once(tmp_path: Path) -> None:
    path = tmp_path / "peers.txt"
    path.write_text(f"# our bootstrap\n{A}\n\n{B}  # a friend's\n", encoding="utf-8")
    assert read_initial_peers([B, str(path)]) == (B, A)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "addresses"
    write_addresses(path, [B])
    write_addresses(path, [A, LOOPBACK])
    assert read_initial_peers([str(path)]) == (A, LOOPBACK)
    assert [item.name for item in path.parent.iterdir()] == ["addresses"]


@pytest.mark.parametrize(
    "text",
    ["localhost:4001", "ip4/10.0.0.1/tcp/4001/p2p/QmA", "/ip4/10.0.0.1/tcp/4001", "/ip4/10.0.0.1/p2p/", "QmA", "."],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--initial-peers") as caught:
        read_initial_peers([text])
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["a\0", "/ip4/10.0.0.1/tcp/\0/p2p/QmA"])
def test_a_null_character_is_refused_and_shown_escaped(text: str) -> None:
    with pytest.raises(ConfigError, match="--initial-peers") as caught:
        read_initial_peers([text])
    assert repr(text) in str(caught.value)


def test_a_file_must_hold_addresses(tmp_path: Path) -> None:
    path = tmp_path / "peers.txt"
    path.write_text("# nothing yet\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no address"):
        read_initial_peers([str(path)])
    path.write_text("hello\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'hello' is not a multiaddr"):
        read_initial_peers([str(path)])


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="--write-addresses"):
        write_addresses(tmp_path / "file" / "addresses", [A])


def test_the_line_names_every_way_in_but_loopback() -> None:
    assert join_line([A, B, LOOPBACK], "p2ptrain") == f"p2ptrain join --initial-peers {A} --initial-peers {B}"
    assert join_line([LOOPBACK], "p2ptrain") == f"p2ptrain join --initial-peers {LOOPBACK}"


def test_the_line_carries_what_a_joiner_cannot_know() -> None:
    line = join_line([A], "my run", "mymodels:cnn")
    assert shlex.split(line)[-4:] == ["--run-id", "my run", "--model", "mymodels:cnn"]
    assert shlex.split(join_line([A], "p2ptrain", run_key="my key"))[-2:] == ["--run-key", "my key"]
    assert "\n" not in line
