"""Tickets: what survives, what is noticed, and what a ticket does as an initial peer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.cli.main import cli
from p2ptrain.errors import ConfigError
from p2ptrain.settings.initial_peers import ticket_line
from p2ptrain.settings.peer_id import to_base58
from p2ptrain.settings.run_key import RunKey, base32, checksum, from_base32, key_text, make_key_file, without_secrets
from p2ptrain.settings.table import Settings, merge
from p2ptrain.settings.ticket import MAX_ADDRESSES, MAX_CHARS, PREFIX, Ticket, parse_ticket, ticket_text

A = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
B = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
ONE = f"/ip4/203.0.113.7/tcp/4001/p2p/{A}"
KEY = RunKey(bytes(range(100, 132)))
FULL = Ticket(
    "novels ü",
    (
        ONE,
        f"/ip6/2001:db8::1/udp/65535/quic-v1/p2p/{A}",
        f"/dns4/peer.example.org/tcp/443/wss/p2p/{B}",
        f"/ip4/198.51.100.1/tcp/4001/p2p/{B}/p2p-circuit/p2p/{A}",
    ),
    founder=B,
    key=KEY,
)


def word_of(ticket: Ticket) -> str:
    word = ticket_text(ticket)
    assert word is not None
    return word


def settings_of(*given: str, **flags: str) -> Settings:
    return merge({"initial_peers": given, **flags}, {})


@pytest.mark.parametrize(
    "ticket",
    [
        FULL, Ticket("p2ptrain", (ONE,)), Ticket("p2ptrain", (ONE,), founder=A), Ticket("p2ptrain", (ONE,), founder=B),
        Ticket("novels ü", (ONE,)), Ticket("東" * 128, (ONE,), founder=A), Ticket("p2ptrain", (ONE, ONE)),
        Ticket("p2ptrain", (f"/ip4/10.0.0.1/tcp/0/p2p/{B}",)), Ticket("p2ptrain", (f"/ip4/10.0.0.1/udp/1/p2p/{A}",)),
        Ticket("p2ptrain", (f"/ip6/::1/tcp/1/p2p/{A}",)), Ticket("p2ptrain", (f"/ip4/10.0.0.1/tcp/1/ws/p2p/{A}",)),
        Ticket("p2ptrain", (f"/ip4/10.0.0.1/tcp/1/p2p/{A}/p2p-circuit/p2p/{A}",)),
        Ticket("p2ptrain", (f"/ip4/10.0.0.1/tcp/1/p2p/Qm{'1' * 44}",)),
        Ticket("p2ptrain", (f"/ip4/10.0.0.1/tcp/1/p2p/Qm{'z' * 44}",)),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_ticket_survives_its_text(ticket: Ticket) -> None:
    word = word_of(ticket)
    assert word.startswith(PREFIX)
    assert word.isalnum()
    assert parse_ticket(word) == parse_ticket(f" {word.upper()}\n") == ticket


def test_a_ticket_is_short_and_bounded() -> None:
    assert len(word_of(Ticket("p2ptrain", (ONE,)))) == len(word_of(Ticket("p2ptrain", (ONE,), founder=A))) == 76
    assert len(word_of(Ticket("xy", (ONE,)))) <= 80
    many = tuple(f"/dns4/{'x' * 200}{i}/tcp/4001/p2p/{A}" for i in range(20))
    longest = parse_ticket(word_of(Ticket("東" * 128, many, founder=B, key=KEY)))
    assert longest == Ticket("東" * 128, many[:4], founder=B, key=KEY)
    ids = [to_base58(bytes([number]) * 64) for number in range(1, 17)]
    through = "".join(f"/p2p/{peer_id}" for peer_id in ids)
    word = word_of(Ticket("\U0001d11e" * 128, (f"/dns4/{'x' * 255}{through}",) * 20, key=KEY))
    assert 0.8 * MAX_CHARS < len(word) <= MAX_CHARS
    assert parse_ticket(word).addresses
    assert len(parse_ticket(word_of(Ticket("x" * 128, (ONE,) * 20))).addresses) == MAX_ADDRESSES


def test_addresses_of_other_forms_are_left_out() -> None:
    odd = (
        "", "/", "ip4/1.2.3.4", "/ip4/1.2.3.4/tcp/4001", f"/ip4/::1/tcp/1/p2p/{A}", f"/ip4/1.2.3.4/tcp/70000/p2p/{A}",
        f"/ip4/1.2.3.4/tcp/x/p2p/{A}", f"/unix/a/p2p/{A}", "/ip4/1.2.3.4/tcp/1/p2p/0OIl", "/ip4/1.2.3.4/tcp/1/p2p/",
        f"/ip4/1.2.3.4/tcp/1/p2p/{A}/p2p", f"/dns4/{'x' * 300}/tcp/1/p2p/{A}",
    )  # fmt: skip
    assert parse_ticket(word_of(Ticket("r", (*odd, ONE)))).addresses == (ONE,)
    assert ticket_text(Ticket("r", odd)) is None
    assert ticket_line(odd, "r") is None


@pytest.mark.parametrize("ticket", [Ticket("p2ptrain", (ONE,), key=KEY), Ticket("p2ptrain", (ONE,))])
def test_one_wrong_or_missing_letter_is_noticed(ticket: Ticket) -> None:
    word = word_of(ticket)
    for index in range(len(PREFIX), len(word)):
        for other in (word[:index] + "a2"[word[index] == "a"] + word[index + 1 :], word[:index] + word[index + 1 :]):
            if other != word:
                with pytest.raises(ConfigError) as caught:
                    parse_ticket(other)
                assert word[10:20] not in str(caught.value)
        with pytest.raises(ConfigError, match=r"cut \(it has \d+ characters\): copy the whole word"):
            parse_ticket(word[:index])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("p2pt2abc", "the ticket is of version 2, and this p2ptrain reads version 1: update p2ptrain"),
        ("p2pt", "a ticket begins with p2pt1; copy the whole word"),
        ("p2pt1", "mistyped or cut"),
        ("p2pt1" + "a" * 100_000, "mistyped or cut"),
        ("p2pt1ä", "mistyped or cut"),
    ],
)
def test_what_is_no_ticket_is_refused_with_the_fix(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_ticket(word)
    with pytest.raises(ConfigError, match=message):
        settings_of(word)


@given(noise=st.binary(max_size=200), seed=st.integers(0, 2**32))
def test_malformed_content_with_a_right_checksum_is_refused_or_well_formed(noise: bytes, seed: int) -> None:
    rng = random.Random(seed)
    data = from_base32(word_of(rng.choice([FULL, Ticket("xy", (ONE,))]))[len(PREFIX) :])
    assert data is not None
    damaged = bytearray(data[:-4])
    damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    for body in (noise, bytes(damaged), bytes(damaged[: rng.randrange(len(damaged))])):
        try:
            ticket = parse_ticket(PREFIX + base32(body + checksum(PREFIX, body)))
        except ConfigError:
            continue
        assert ticket.addresses
        assert all("/p2p/" in address and address.isprintable() for address in ticket.addresses)
        assert 1 <= len(ticket.run_id) <= 128


def test_a_ticket_is_an_initial_peer_that_brings_run_id_and_key(tmp_path: Path) -> None:
    word = word_of(FULL)
    path = tmp_path / "friends.ticket"
    path.write_text(f"# from Ann\n{word}\n", encoding="utf-8")
    for settings in (
        settings_of(word), settings_of(str(path)), merge({}, {"P2PTRAIN_INITIAL_PEERS": word}),
        settings_of(word, run_id=FULL.run_id), settings_of(word, word),
    ):  # fmt: skip
        network = settings.network_config()
        assert network.initial_peers == FULL.addresses
        assert network.key == KEY
        assert settings.values["run_id"] == FULL.run_id
        assert network.founder == FULL.founder
        assert settings.explicit_run() == {"run_id": FULL.run_id}
        for text in (repr(settings), repr(network), repr(settings.values)):
            assert word not in text
            assert key_text(KEY) not in text
            assert repr(KEY.secret) not in text
    both = settings_of(word, f"/ip4/10.0.0.1/tcp/1/p2p/{B}").network_config()
    assert both.initial_peers == (*FULL.addresses, f"/ip4/10.0.0.1/tcp/1/p2p/{B}")
    assert settings_of(word, founder=B).network_config().founder == B
    plain = settings_of(word_of(Ticket("r", (ONE,)))).network_config()
    assert (plain.key, plain.founder) == (None, "")
    short = word_of(Ticket("r", (f"/ip4/10.0.0.1/tcp/1/p2p/{A}",), founder="2a"))
    with pytest.raises(ConfigError, match="the ticket's founder: '2a' must be a whole peer id"):
        settings_of(short)


def test_what_contradicts_a_ticket_is_refused(tmp_path: Path) -> None:
    word = word_of(FULL)
    with pytest.raises(ConfigError, match="--run-id: 'other' is not the run of the ticket, 'novels ü'; leave it out"):
        settings_of(word, run_id="other")
    with pytest.raises(ConfigError, match=f"--founder: {A} is not the founder in the ticket, {B}; leave it out"):
        settings_of(word, founder=A)
    with pytest.raises(ConfigError, match="two tickets were given: give one"):
        settings_of(word, word_of(Ticket("r", (ONE,))))
    make_key_file(tmp_path / "same.key", KEY.secret)
    make_key_file(tmp_path / "other.key", bytes(32))
    assert settings_of(word, run_key=str(tmp_path / "same.key")).network_config().key == KEY
    with pytest.raises(ConfigError, match="is not the key in the ticket; leave --run-key out"):
        settings_of(word, run_key=str(tmp_path / "other.key")).network_config()
    damaged = tmp_path / "damaged"
    damaged.write_text(word[:-1], encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged: the ticket is mistyped or cut"):
        settings_of(str(damaged))


def test_the_command_of_a_ticket_adds_what_a_joiner_needs() -> None:
    word = word_of(Ticket("r", (ONE,)))
    assert ticket_line([ONE], "r") == f"p2ptrain join {word}"
    assert ticket_line([ONE], "r", "my:model", run_key="a b.key") == (
        f"p2ptrain join {word} --run-key 'a b.key' --model my:model"
    )
    shared = ticket_line([ONE], "r", run_key="a.key", shared=KEY)
    assert shared == f"p2ptrain join {word_of(Ticket('r', (ONE,), key=KEY))}"


def test_a_file_may_hold_the_printed_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "friends.ticket"
    path.write_text(f"p2ptrain join {word_of(FULL)}\n", encoding="utf-8")
    path.chmod(0o600)
    assert settings_of(str(path)).ticket == FULL
    assert not caplog.records
    path.chmod(0o644)
    settings_of(str(path))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"warning: {path} holds a run key, and other users")
    caplog.clear()
    path.write_text(word_of(Ticket("r", (ONE,))), encoding="utf-8")  # no secret
    settings_of(str(path))
    assert not caplog.records


def test_secrets_at_the_wrong_place_are_refused_unseen(tmp_path: Path) -> None:
    word, key = word_of(FULL), key_text(KEY)
    path = tmp_path / "file"

    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["join", *arguments])
        error = result.exception
        text = without_secrets(str(error)) if isinstance(error, ConfigError) else result.output
        assert result.exit_code
        for secret in (word, key):
            parts = [secret[start : start + 8] for start in range(8, len(secret) - 8)]
            assert not any(part in text for part in parts), text
        return text

    path.write_text(f"{key}\n", encoding="utf-8")
    assert refused(str(path)) == f"{path}: this file holds a run key: use --run-key {path}"
    assert "this is a run key, and a secret" in refused(key)
    half = len(word) // 2
    for text in (f"{word[:half]}\n{word[half:]}", f"p2ptrain join {word} --run-key FILE", f"{ONE}\n{word}"):
        path.write_text(text, encoding="utf-8")
        assert "write the ticket as one word" in refused(str(path))
    for parts in ((word[:half], word[half:]), ("--initial-peers", word[:half], word[half:])):
        assert "write the ticket as one word" in refused(*parts)
    assert "write it as one word" in refused(f"{word[:half]} {word[half:]}")
    assert "this is a ticket: give it without --run-key" in refused("--run-key", word)
    assert "is not a ticket, an address or a file" in refused(word[1:])
    assert "no such file" in refused("--data", key, "--new").lower()


def test_commands_take_a_ticket_and_show_no_key(tmp_path: Path) -> None:
    word = word_of(FULL)
    shown = CliRunner().invoke(cli, ["config", "show", word, "--json"])
    assert shown.exit_code == 0, shown.output
    assert '"value": "novels \\u00fc"' in shown.output
    assert ONE in shown.output
    assert word not in shown.output
    assert "other users of this machine can see it in the list of processes" in shown.output
    path = tmp_path / "friends.ticket"
    path.write_text(word, encoding="utf-8")
    shown = CliRunner().invoke(cli, ["config", "show", str(path)])
    assert ONE in shown.output
    assert "list of processes" not in shown.output
    for command in ("join", "peers", "dashboard", "doctor"):
        refused = CliRunner().invoke(cli, [command, word[:-2]])
        assert isinstance(refused.exception, ConfigError), refused.output
        assert "the ticket is mistyped or cut" in str(refused.exception)
    refused = CliRunner().invoke(cli, ["join", "--share-key"])
    assert "--share-key: has no meaning without a key; add --run-key FILE" in str(refused.exception)
