"""`p2ptrain key`: make the key of a closed run."""

from __future__ import annotations

import secrets
import shlex

import click

from p2ptrain.cli.options import complete_files
from p2ptrain.settings.files import user_path
from p2ptrain.settings.run_key import SECRET_BYTES, make_key_file

DEFAULT_FILE = "run.key"


@click.command()
@click.argument("file", default=DEFAULT_FILE, metavar="[FILE]", shell_complete=complete_files)
def key(file: str) -> None:
    """Make a key for a closed run.

    Only peers that have the key can see the run or join it. Writes a new secret to FILE (run.key), which only you can
    read, and never changes a file that exists.

    \b
        p2ptrain key friends.key
        p2ptrain join --run-key friends.key
    With a ticket that holds the key, so that the others need no file:
        p2ptrain join --run-key friends.key --share-key
    """
    path = user_path(file)
    make_key_file(path, secrets.token_bytes(SECRET_BYTES))
    shown = shlex.quote(file)
    click.echo(f"{file}: a new run key. Whoever has this file can join the run: keep it secret.")
    click.echo("Start the run:")
    click.echo(f"p2ptrain join --run-key {shown}")
    click.echo("Copy the file to the others over a safe channel. They add the same option to the line that it prints.")
    click.echo("Or add --share-key: then the printed ticket holds the key, and is as secret as the file.")
