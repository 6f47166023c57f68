"""Files of peer ids: what is read, what is refused with its line, and what happens when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.settings.access import MAX_FILE_BYTES, Access, PeerIdFile
from p2ptrain.settings.peer_config import NetworkConfig

A = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
B = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


def deny_file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refresh(access: Access) -> None:
    """Twice, so that the content counts as settled."""
    access.refresh()
    access.refresh()


@pytest.mark.parametrize("half", [b"", f"{A}\n".encode(), f"{A}\n{B[:20]}".encode()])
def test_a_file_that_is_being_written_is_not_used(
    tmp_path: Path, half: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = deny_file(tmp_path / "allow", f"{A}\n{B}\n")
    access = Access(NetworkConfig(allow=str(path)))
    for _ in range(3):
        path.write_bytes(half)
        access.refresh()
        assert access.refusal(B) is None
        deny_file(path, f"{A}\n{B}\n# again\n")
        access.refresh()
        assert access.refusal(B) is None
    assert not caplog.records
    path.write_bytes(half)
    access.refresh()
    assert access.refusal(B) is None
    access.refresh()
    assert (access.refusal(B) is None) == half.endswith(B[:20].encode())


def test_a_byte_order_mark_is_no_part_of_the_first_id(tmp_path: Path) -> None:
    path = tmp_path / "deny"
    path.write_text(f"{A}\n{B}\n", encoding="utf-8-sig")
    assert PeerIdFile(str(path), "--deny").ids == {A, B}


def test_ids_are_read_one_per_line_with_comments(tmp_path: Path) -> None:
    path = deny_file(tmp_path / "deny", f"# sends nonsense\r\n{A}\n\n  {B}  # since Monday\n{A}\n")
    assert PeerIdFile(str(path), "--deny").ids == {A, B}


@pytest.mark.parametrize("text", ["", "\n", "# nobody yet\n"])
def test_a_list_may_be_empty(tmp_path: Path, text: str) -> None:
    assert PeerIdFile(str(deny_file(tmp_path / "deny", text)), "--deny").ids == frozenset()


@pytest.mark.parametrize(
    "line",
    [
        "Bob",
        A[:-1],
        A + "x" * 10,
        f"/ip4/10.0.0.1/tcp/4001/p2p/{A}",
        f"{A} {B}",
        A.replace("Y", "0"),
        "\x00",
        "\x1b[2J",
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_value(tmp_path: Path, line: str) -> None:
    path = deny_file(tmp_path / "deny", f"{B}\n{line}\n")
    with pytest.raises(ConfigError, match="is not a peer id; write only the id") as caught:
        Access(NetworkConfig(deny=str(path)))
    assert f"--deny {path}, line 2: {line!r}" in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "missing", tmp_path, "null\0"):
        with pytest.raises(ConfigError, match="give a file with one peer id per line"):
            Access(NetworkConfig(deny=str(name)))
    huge = deny_file(tmp_path / "huge", "#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="has more than 1,048,576 bytes"):
        Access(NetworkConfig(deny=str(huge)))


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = deny_file(tmp_path / "deny", f"{A}\n")
    access = Access(NetworkConfig(deny=str(path)))
    refresh(access)
    assert not caplog.records
    assert (access.refusal(A), access.refusal(B)) == ("this peer is on its deny list", None)
    deny_file(path, f"{B}\n")  # of another length, or not: the content is compared
    refresh(access)
    assert (access.refusal(A), access.refusal(B)) == (None, "this peer is on its deny list")
    assert [record.getMessage() for record in caplog.records] == [f"--deny {path}: read again, 1 added, 1 removed"]


def test_a_file_that_breaks_keeps_the_list_of_before_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = deny_file(tmp_path / "deny", f"{A}\n")
    access = Access(NetworkConfig(deny=str(path)))
    for broken in (f"{B}\nBob\n", None):
        caplog.clear()
        if broken is None:
            path.unlink()
        else:
            deny_file(path, broken)
        for _ in range(3):
            refresh(access)
        assert access.refusal(A) is not None
        assert access.refusal(B) is None
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().endswith("; the previous list stays in use")
    deny_file(path, f"{B}\n")
    refresh(access)
    assert access.refusal(A) is None
    assert access.refusal(B) is not None


def test_initial_peers_that_the_lists_refuse_are_an_error(tmp_path: Path) -> None:
    allow, deny = deny_file(tmp_path / "allow", f"{A}\n"), deny_file(tmp_path / "deny", f"{A}\n")
    at = {peer_id: f"/ip4/10.0.0.1/tcp/4001/p2p/{peer_id}" for peer_id in (A, B)}
    listed, denied = Access(NetworkConfig(allow=str(allow))), Access(NetworkConfig(deny=str(deny)))
    listed.check_allowed([at[A]])
    denied.check_allowed([at[B]])
    Access(NetworkConfig()).check_allowed(at.values())
    with pytest.raises(ConfigError, match=f"--allow {allow} does not hold your initial peer {B}; add it"):
        listed.check_allowed(at.values())
    with pytest.raises(ConfigError, match=f"--deny {deny} holds your initial peer {A}; remove it"):
        denied.check_allowed(at.values())


def test_a_ticket_among_the_initial_peers_is_not_shown(tmp_path: Path) -> None:
    """From Python, where initial peers are not checked before."""
    access = Access(NetworkConfig(allow=str(deny_file(tmp_path / "friends", ""))))
    with pytest.raises(ConfigError, match="does not hold your initial peer p2pt1…; add it"):
        access.check_allowed(["p2pt1" + "ab" * 40])


def test_without_a_file_everybody_is_welcome() -> None:
    access = Access(NetworkConfig())
    assert not access.has_files
    assert access.refusal(A) is None
    refresh(access)


def test_an_allow_list_refuses_all_others_and_a_deny_list_goes_before_it(tmp_path: Path) -> None:
    allow, deny = tmp_path / "allow", tmp_path / "deny"
    deny_file(allow, f"{A}  # Ann\n{B}\n")
    deny_file(deny, f"{B}\n")
    access = Access(NetworkConfig(allow=str(allow), deny=str(deny)))
    assert access.has_files
    assert access.refusal(A) is None
    assert access.refusal(B) == "this peer is on its deny list"
    assert access.refusal("Qm" + 44 * "z") == "this peer is not on its allow list"
    deny_file(allow, "# nobody\n")
    refresh(access)
    assert access.refusal(A) == "this peer is not on its allow list"
    with pytest.raises(ConfigError, match=r"--allow .*missing.: No such file or directory; give a file"):
        Access(NetworkConfig(allow=str(tmp_path / "missing")))
