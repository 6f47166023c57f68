"""The command `p2ptrain`. An error of the user is one line that says what to change, without a traceback."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys

import click
from click.shell_completion import get_completion_class

from p2ptrain import __version__
from p2ptrain.cli.bootstrap import bootstrap
from p2ptrain.cli.config import config
from p2ptrain.cli.dashboard import dashboard
from p2ptrain.cli.data import data
from p2ptrain.cli.demo import demo
from p2ptrain.cli.doctor import doctor
from p2ptrain.cli.estimate import estimate
from p2ptrain.cli.find import find, peers
from p2ptrain.cli.generate import export, generate
from p2ptrain.cli.join import join
from p2ptrain.cli.key import key
from p2ptrain.cli.simulate import reproduce, simulate
from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.settings.run_key import without_secrets
from p2ptrain.settings.torchrun import rank_of
from p2ptrain.signals import interrupt_on_signals

TRY_LATER = 75  # EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # the exit status that shells use for Ctrl-C
SHELLS = ("bash", "zsh", "fish")
# Environment variable in which click gets completion requests; derived from the command's name.
VARIABLE = "_P2PTRAIN_COMPLETE"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Train one neural network on many machines, peer to peer.

    \b
    Try it on this machine, in two minutes:
        p2ptrain demo
    Start a run:
        p2ptrain join
    Join it from machines on the same network, after a question:
        p2ptrain join
    Join it from other machines, with the ticket or the address that it prints:
        p2ptrain join p2pt1…
        p2ptrain join --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm…
    """


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete p2ptrain.

    \b
    For bash, at the end of ~/.bashrc:
        eval "$(p2ptrain completion bash)"
    For zsh, at the end of ~/.zshrc (after compinit):
        eval "$(p2ptrain completion zsh)"
    For fish, once:
        p2ptrain completion fish > ~/.config/fish/completions/p2ptrain.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "p2ptrain", VARIABLE).source())


OF_SWARMS = (demo, join, find, key, bootstrap, peers, dashboard, doctor)
OF_ONE_MACHINE = (estimate, data, generate, export, simulate, reproduce, config, completion)
for command in (*OF_SWARMS, *OF_ONE_MACHINE):
    cli.add_command(command)


def main() -> None:
    """Entry point of the command; ends the process."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("p2ptrain").setLevel(logging.INFO)
    # It has its own handler, so its lines (retries of a download) would appear twice.
    logging.getLogger("huggingface_hub").propagate = False
    # It warns of malformed packets, which any machine on the network can send.
    logging.getLogger("zeroconf").propagate = False
    # Containers and service managers stop programs with SIGTERM: treat it as Ctrl-C from the start.
    interrupt_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or a log may not have all characters of a text
        sys.stdout.reconfigure(errors="replace")
    rank = rank_of(os.environ)
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the end); rank 0 prints
    try:
        cli.main(prog_name="p2ptrain", standalone_mode=False)
    except click.UsageError as error:
        if rank:
            return  # rank 0 has the same arguments, and reports it
        if len(sys.argv) == 1:  # the message is the help
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        # click gives no context if an option of a command lacks its value.
        names = [name for name in sys.argv[1:2] if name in cli.commands]
        command = error.ctx.command_path if error.ctx else " ".join(["p2ptrain", *names])
        _fail(f"{error.format_message()} (see {command} --help)")
    except ConfigError as error:
        _fail(str(error), TRY_LATER if isinstance(error, TransientError) else 2)
    except BrokenPipeError:
        # The reader of our output has exited, as `head` does; keep Python from reporting it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        if not rank:
            click.echo("p2ptrain: interrupted", err=True)
        sys.exit(INTERRUPTED)
    finally:
        # Skip the garbage collection at exit: it would walk through all of torch (0.8 s of CPU).
        gc.freeze()


def _fail(message: str, status: int = 2) -> None:
    rank = rank_of(os.environ)
    origin = f"error of rank {rank}" if rank else "error"
    click.echo(f"p2ptrain: {origin}: {without_secrets(message)}", err=True)
    sys.exit(status)
