"""What a peer says once it has joined: its ticket, also as a QR code."""

from __future__ import annotations

import segno

from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.ticket import parse_ticket
from p2ptrain.training.announcement import MAX_QR_CHARS, announce, qr_rows
from tests.fakes import MADDR, FakePeer

# Light above and below each other, as a pair of modules of one column.
PAIRS = {" ": (1, 1), "▄": (1, 0), "▀": (0, 1), "█": (0, 0)}


def said(run: RunConfig, *, qr: bool) -> list[str]:
    lines: list[str] = []
    announce(
        FakePeer(run), run, NetworkConfig(), processes=1, continues=False, share_key=False, qr=qr, say=lines.append
    )  # type: ignore[arg-type]
    return lines


def modules(rows: list[str]) -> list[tuple[int, ...]]:
    """The dark (1) and light (0) modules that the rows show."""
    return [tuple(PAIRS[letter][half] for letter in row) for row in rows for half in (0, 1)]


def test_the_qr_code_is_that_of_the_ticket() -> None:
    run = RunConfig(run_id="p2ptrain")
    plain, lines = said(run, qr=False), said(run, qr=True)
    assert lines[: len(plain)] == plain
    word = plain[-1].split()[2]
    rows = lines[len(plain) :]
    # The lower half of the last row is below the code.
    code = segno.make_qr(word.upper(), error="l").matrix_iter(border=2)
    assert modules(rows)[:-1] == [tuple(row) for row in code]
    assert parse_ticket(word.upper()).addresses == (MADDR,)


def test_the_longest_ticket_that_is_shown_fits_into_a_terminal() -> None:
    assert {len(row) for row in qr_rows("P" * MAX_QR_CHARS)} == {61}
    lines = said(RunConfig(run_id="東" * 128), qr=True)
    assert lines[-1].startswith("the ticket is too long for a QR code in a terminal: ")
