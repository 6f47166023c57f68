"""Files that users name: a pipe that nobody writes to, or a device, is refused, and not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.network.identity import hold_identity
from p2ptrain.settings.access import PeerIdFile
from p2ptrain.settings.files import MAX_TEXT_BYTES, read_text
from p2ptrain.settings.initial_peers import expand_ticket, read_initial_peers
from p2ptrain.settings.run_key import read_key
from p2ptrain.settings.table import read_toml
from p2ptrain.training.data.source import open_source
from p2ptrain.training.data.tokenizer_file import find_tokenizer
from p2ptrain.training.pretrained import check_weights


def _hold(name: str) -> None:
    with hold_identity(name, Path()):
        pass


OPENERS: dict[str, Callable[[str], object]] = {
    "-c": lambda name: read_toml(Path(name)),
    "--data": open_source,
    "--tokenizer": find_tokenizer,
    "--initial-peers": lambda name: read_initial_peers(expand_ticket([name])[0]),
    "--run-key": lambda name: read_key(Path(name)),
    "--allow": lambda name: PeerIdFile(name, "--allow"),
    "--init-from": lambda name: check_weights(Path(name)),
    "--identity": _hold,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(opener: Callable[[str], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    for name in (str(tmp_path / "pipe.bin"), "/dev/zero"):
        with pytest.raises(ConfigError, match=rf"{name}.*a pipe or a device, not a file"):
            opener(name)


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"lr = 0.1")
    os.close(writing)
    try:
        assert read_toml(Path(f"/dev/fd/{reading}")) == {"lr": 0.1}
    finally:
        os.close(reading)


def test_a_text_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b" " * MAX_TEXT_BYTES)
    assert len(read_text(tmp_path / "a")) == MAX_TEXT_BYTES
    (tmp_path / "a").write_bytes(b" " * (MAX_TEXT_BYTES + 1))
    with pytest.raises(ConfigError, match=r"a: cannot be read \(has more than 1,048,576 bytes\)"):
        read_toml(tmp_path / "a")
