"""`p2ptrain join`: start a run or join one, and train."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from p2ptrain.cli.find import choose_nearby
from p2ptrain.cli.options import SettingsCommand, settings_command
from p2ptrain.errors import ConfigError
from p2ptrain.settings.access import Access
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.table import NETWORK_SETTINGS, RUN_SETTINGS, TRAINING_SETTINGS, Settings
from p2ptrain.settings.torchrun import launch_of

if TYPE_CHECKING:
    from rich.console import Console

    from p2ptrain.training.progress import TrainingProgress

SETTINGS = [setting.name for setting in (*RUN_SETTINGS, *NETWORK_SETTINGS, *TRAINING_SETTINGS)]
# The options that `--help` shows, as most people need no others.
COMMON = (
    "run_id", "model", "steps", "lr", "sync_every", "initial_peers", "host_maddrs", "announce_maddrs", "run_key",
    "data", "batch_tokens", "device", "threads", "out", "dashboard",
)  # fmt: skip


class JoinCommand(SettingsCommand):
    """Under torchrun only rank 0 runs the command. The other ranks parse it, and then follow rank 0."""

    def invoke(self, ctx: click.Context) -> Any:
        launch = launch_of(os.environ)
        if launch.rank == 0:
            return super().invoke(ctx)
        from p2ptrain.training.job import follow

        return follow(launch)


@settings_command(*SETTINGS, common=COMMON, kind=JoinCommand)
@click.option("--plain", is_flag=True, help="Print lines instead of a live view; default without a terminal.")
@click.option("--share-key", is_flag=True, help="Put the run key into the printed ticket, which is then a secret.")
@click.option("--new", is_flag=True, help="Do not look for runs on the local network.")
@click.option("--qr", is_flag=True, help="Print the ticket as a QR code, too.")
def join(settings: Settings, plain: bool, share_key: bool, new: bool, qr: bool) -> None:
    """Start a run or join one, and train.

    Without a ticket or --initial-peers it looks for runs on the local network for two seconds, and asks whether to join
    one. If there is none, a new run starts, and prints the command and the ticket with which other machines join it. A
    peer that joins adopts the run's settings, weights, step and learning rate. Ctrl-C leaves the run and writes a
    checkpoint; the same command continues from it.

    \b
    Start a run: a small GPT on the source code of Python's library; or join one on the local network:
        p2ptrain join
    Join it from another machine, on one CPU core:
        p2ptrain join p2pt1… --threads 1
        p2ptrain join --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm… --threads 1
    Start a run with your own text and model, for 10,000 steps:
        p2ptrain join --run-id novels --data texts/ --model mymodels:small_gpt --steps 10000
    Be one peer with all 8 GPUs of a machine, in 8 processes:
        torchrun --nproc-per-node 8 -m p2ptrain join p2pt1…
    """
    for name in ("dashboard", "prometheus"):
        if settings.values[name] is not None:
            require_extra("dashboard", f"--{name}")
    # The import of torch takes seconds: check first what is cheap to check.
    network = settings.network_config()
    if new and network.initial_peers:
        raise ConfigError("--new: has no meaning with a ticket or --initial-peers; leave one of them out")
    Access(network).check_allowed(network.initial_peers)
    if share_key and network.key is None:
        raise ConfigError("--share-key: has no meaning without a key; add --run-key FILE")
    if sys.stdout.isatty():
        click.echo("starting: loading torch takes a few seconds")
    from p2ptrain.training.join import check_local, join_run

    source, device = check_local(settings, launch_of(os.environ))
    if not new and not network.initial_peers:
        settings = choose_nearby(settings)
        network = settings.network_config()
        Access(network).check_allowed(network.initial_peers)
    train = partial(join_run, settings, source, device, share_key=share_key, qr=qr, launch=launch_of(os.environ))
    console = None if plain else _live_console()
    if console is None:
        pairs = PairSteps()
        train(say=_say, on_progress=lambda now: _say(format_progress(now, pairs.by_status)), sinks=[pairs])
        return
    from p2ptrain.monitor.liveview import LiveView
    from p2ptrain.monitor.terminal import open_terminal
    from p2ptrain.settings.initial_peers import join_line

    view = LiveView()
    with open_terminal(console, view.drawing) as terminal:
        train(
            say=terminal.say,
            on_progress=lambda progress: view.say_time_left(progress.left_s),
            on_status=view.say_status,
            sinks=[view],
            on_peer=lambda peer: view.follow(
                peer, join_line(peer.maddrs, peer.run.run_id, peer.run.model, network.key_file)
            ),
        )


def _live_console() -> Console | None:
    """The terminal if it can show a live view, else None; rich is imported only for a terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    from p2ptrain.monitor.terminal import is_worth_it

    console = Console(highlight=False)
    return console if is_worth_it(console, os.environ) else None


def _say(text: str) -> None:
    """Print a line. Discard output once stdout is closed, as after Ctrl-C in `p2ptrain join | tee log`."""
    try:
        click.echo(text)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # a full disk may have space again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class PairSteps:
    """A sink that counts the outer steps of a peer in a run with pairs.

    Attributes:
        by_status: the counts; None in a run with rounds.
    """

    def __init__(self) -> None:
        self.by_status: Counter[str] | None = None

    def write(self, event: str, /, **fields: Any) -> None:
        if event == "start" and fields["run"]["averaging"] == "pairwise":
            self.by_status = Counter()
        elif event == "pair" and self.by_status is not None:
            self.by_status[fields["status"]] += 1

    def close(self) -> None: ...


def format_progress(progress: TrainingProgress, pairs: Counter[str] | None = None) -> str:
    """Format one progress line. `pairs`: outer steps by status, in a run with pairs."""
    from p2ptrain.formatting import duration

    length = f"/{progress.total_steps}" if progress.total_steps else ""
    skipped = sum(progress.skipped.values())
    outer = f"round {progress.round}" if pairs is None else f"pairs {pairs['paired']}, alone {pairs['alone']}"
    left = "" if progress.left_s is None or progress.left_s < 1 else f", {duration(progress.left_s)} left"
    perplexity = math.exp(min(progress.eval_loss, 99.0))
    in_bits = "" if progress.bits_per_byte is None else f", {progress.bits_per_byte:.2f} bits a byte"
    of_peak = "" if progress.mfu is None else f", {100 * progress.mfu:.1f} % MFU"
    return (
        f"step {progress.run_step}{length}{left} · loss {progress.loss:.3f}, held-out {progress.eval_loss:.3f}"
        f" (perplexity {perplexity:.1f}{in_bits}) · {progress.tokens_per_s:,.0f} tokens/s{of_peak}, "
        f"{100 * progress.exchange:.1f} % exchange · peers {progress.peers} · {outer} · "
        f"fragments {progress.sent} out, {progress.merged} in, {skipped} skipped"
    )
