"""The file of the addresses of other peers, who choose what is in it."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.training.known_peers import KNOWN_PEERS_FILE, read_known_peers, write_known_peers

GOOD = "/ip4/10.0.0.2/tcp/1/p2p/QmbB1DWvycus3D9ME8PcQjN8Z9Z5vk8acfrFCTr5JD8xi4"


def test_an_address_that_is_none_does_not_end_training(tmp_path: Path) -> None:
    write_known_peers(tmp_path, ["/", "", "/ip4", GOOD])
    assert (tmp_path / KNOWN_PEERS_FILE).read_text() == f"{GOOD}\n"


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / KNOWN_PEERS_FILE).write_bytes(b"/\n\xff\x00\n" + GOOD.encode() + b"\n" + bytes(range(256)))
    assert read_known_peers(tmp_path) == (GOOD,)
