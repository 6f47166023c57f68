"""Shell completion: the scripts, and the answers to a shell's requests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2ptrain.cli.main import SHELLS, cli
from p2ptrain.settings.presets import MODELS
from p2ptrain.training.models import PRESETS as SHAPES
from p2ptrain.training.models import count_parameters


def _completed(line: str) -> list[str]:
    """The completions that bash gets for the last word of a line: `plain,gpt-demo`, or `file,` for files."""
    words = line.split(" ")
    environ = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_P2PTRAIN_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(cli, [], prog_name="p2ptrain", env=environ)
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("p2ptrain jo", ["plain,join"]),
        ("p2ptrain join --init", ["plain,--initial-peers", "plain,--init-from"]),
        ("p2ptrain join --model gpt2", ["plain,gpt2-124m"]),
        ("p2ptrain join --preset ", ["plain,diloco", "plain,sparta-124m", "plain,noloco"]),
        ("p2ptrain join --round-codec i", ["plain,int8", "plain,int4", "plain,int2"]),
        ("p2ptrain doctor --device cu", ["plain,cuda"]),
        ("p2ptrain join --data st", ["plain,stdlib"]),
        ("p2ptrain join --data ../te", ["file,../te"]),
        ("p2ptrain join --initial-peers ad", ["file,ad"]),
        ("p2ptrain join --out ", ["dir,"]),
        ("p2ptrain join -c pe", ["file,pe"]),
        ("p2ptrain join --sync-every ", []),
        ("p2ptrain completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
    ],
)
def test_commands_options_names_and_files_are_completed(line: str, offered: list[str]) -> None:
    assert _completed(line) == offered


def test_every_model_is_offered() -> None:
    assert set(MODELS) == set(SHAPES)


def test_the_models_have_the_parameters_that_are_documented() -> None:
    for name, documented in MODELS.items():
        millions = count_parameters(name, vocab_size=None) / 1e6
        assert documented == (f"{millions:.0f}M" if millions > 50 else f"{millions:.1f}M")


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_P2PTRAIN_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.processes
def test_a_real_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    command = tmp_path / "p2ptrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2ptrain "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    script = (
        'eval "$(p2ptrain completion bash)"; COMP_WORDS=(p2ptrain join --model gpt-s); COMP_CWORD=3; '
        '_p2ptrain_completion p2ptrain; echo "${COMPREPLY[@]}"; complete -p p2ptrain'
    )
    environ = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run([bash, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "gpt-small"
    assert "-F _p2ptrain_completion p2ptrain" in done.stdout
