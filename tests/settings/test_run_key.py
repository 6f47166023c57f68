"""Key files: made once for their owner only, read back, and refused with the reason but without the secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.cli.main import cli
from p2ptrain.errors import ConfigError
from p2ptrain.settings.run_key import PREFIX, RunKey, key_text, make_key_file, parse_key, read_key, without_secrets
from p2ptrain.settings.table import merge
from tests.fakes import full_disk

KEY = RunKey(bytes(range(100, 132)))
WORD = key_text(KEY)


def test_a_key_survives_its_text_and_its_file(tmp_path: Path) -> None:
    assert WORD.startswith(PREFIX)
    assert WORD.isalnum()
    assert parse_key(WORD) == parse_key(f" {WORD.upper()}\n") == KEY
    path = tmp_path / "run.key"
    make_key_file(path, KEY.secret)
    assert read_key(path) == KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_not_in_its_repr() -> None:
    for text in (repr(KEY), str(KEY), f"{[KEY]}"):
        assert KEY.secret.hex() not in text
        assert repr(KEY.secret) not in text
        assert WORD not in text


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists and is not changed; choose another file"):
        make_key_file(path, KEY.secret)
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_full_disk_leaves_no_part_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    with full_disk(), pytest.raises(ConfigError, match="choose a file that can be written"):
        make_key_file(path, KEY.secret)
    make_key_file(path, KEY.secret)


@pytest.mark.parametrize("index", range(len(WORD)))
def test_one_wrong_letter_is_noticed(index: int) -> None:
    for letter in "a7":
        if WORD[index] != letter:
            with pytest.raises(ConfigError):
                parse_key(WORD[:index] + letter + WORD[index + 1 :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 words, not one key; copy the whole file"),
        (f"{WORD} {WORD}", "holds 2 words"),
        (WORD[:-1], f"its key has {len(WORD) - 1} characters of {len(WORD)}"),
        (WORD + "a", f"its key has {len(WORD) + 1} characters of {len(WORD)}"),
        (WORD[:-1] + "1", "or others than a-z and 2-7"),
        (WORD[:-1] + "ä", "or others than a-z and 2-7"),
        ("x" + WORD[1:], "it holds no word that begins with p2pk1"),
        (WORD[:7] + WORD[8] + WORD[7] + WORD[9:], "its key is mistyped: the checksum does not fit"),
    ],
)
def test_a_damaged_file_is_refused_with_the_fix_and_without_its_content(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    error = str(caught.value)
    assert message in error
    assert error.startswith(f"--run-key {path}: ")
    assert "p2ptrain key FILE" in error
    assert WORD[5:15] not in error


def test_a_byte_order_mark_is_no_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text(f"{WORD}\n", encoding="utf-8-sig")
    assert read_key(path) == KEY


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for name, message in ((tmp_path / "missing", "no such file"), (tmp_path, "Is a directory"), (Path("a\0"), "null")):
        with pytest.raises(ConfigError, match=message):
            read_key(name)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_key(binary)


def test_a_key_or_a_ticket_in_place_of_its_file_is_refused_unseen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a run key itself; write it to a file") as caught:
        read_key(Path(WORD))
    assert WORD[5:15] not in str(caught.value)
    for config in ({"run_key": "p2pt1" + "ab" * 40}, {"run_key": "P2PT1" + "AB" * 40}):
        with pytest.raises(ConfigError, match="this is a ticket: give it without --run-key") as caught:
            merge(config, {})
        assert "abab" not in str(caught.value).lower()
    (tmp_path / "friends.ticket").write_text("p2ptrain join p2pt1" + "ab" * 40, encoding="utf-8")
    with pytest.raises(ConfigError, match="this file holds a ticket: give it without --run-key"):
        read_key(tmp_path / "friends.ticket")


@pytest.mark.parametrize("founder", ["Qm" + "a" * 43, "Qm" + "a" * 45, "12D3Koo" + "a" * 44, "a" * 46])
def test_a_cut_id_of_a_founder_is_refused(founder: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole peer id"):
        merge({"founder": founder}, {})


def test_other_values_show_only_the_prefix_of_a_secret() -> None:
    for name in ("founder", "round_codec", "steps"):
        with pytest.raises(ConfigError) as caught:
            merge({name: WORD}, {})
        assert "'p2pk1…'" in str(caught.value)
        assert WORD[5:15] not in str(caught.value)
    assert without_secrets(f"a {WORD.upper()}, b") == "a P2PK1…, b"


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.key"
    make_key_file(path, KEY.secret)
    merge({"run_key": str(path)}, {})
    assert not caplog.records
    path.chmod(0o640)
    merge({"run_key": str(path)}, {})
    (record,) = caplog.records
    assert record.getMessage() == (
        f"warning: {path} holds a run key, and other users of this machine can read it: chmod 600 {path}"
    )


def test_what_is_no_key_file_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "text"
    text.write_text("no key", encoding="utf-8")
    for path in (tmp_path, text, tmp_path / "missing", Path("/dev/null")):
        with pytest.raises(ConfigError, match="--run-key"):
            merge({"run_key": str(path)}, {}).network_config()
    assert not caplog.records


def test_the_setting_names_a_file_and_only_the_network_gets_its_content(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    make_key_file(path, KEY.secret)
    settings = merge({}, {"P2PTRAIN_RUN_KEY": str(path)})
    assert settings.network_config().key == KEY
    assert merge({}, {}).network_config().key is None
    for text in (repr(settings), repr(settings.network_config()), repr(settings.peer_config())):
        assert WORD not in text
        assert repr(KEY.secret) not in text
    assert "run_key" not in settings.resolve_run(None).to_dict()
    result = CliRunner().invoke(cli, ["config", "show", "--run-key", str(path), "--json"])
    assert result.exit_code == 0
    assert str(path) in result.output
    assert WORD not in result.output


def test_the_command_makes_a_key_and_says_what_to_do_with_it(tmp_path: Path) -> None:
    path = tmp_path / "friends.key"
    result = CliRunner().invoke(cli, ["key", str(path)])
    assert result.exit_code == 0, result.output
    assert f"p2ptrain join --run-key {path}" in result.output
    word = key_text(read_key(path))
    assert word in path.read_text(encoding="utf-8")
    assert word not in result.output
    again = CliRunner().invoke(cli, ["key", str(path)])
    assert isinstance(again.exception, ConfigError)
    assert key_text(read_key(path)) == word
    other = tmp_path / "other.key"
    CliRunner().invoke(cli, ["key", str(other)])
    assert read_key(other) != read_key(path)
