"""Chooses the run that a peer trains, and its settings: those of the live run, of the checkpoint, or of a new run."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import CheckpointError, ConfigError, RunMismatchError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.initial_peers import nobody_found
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.settings.table import Settings
from p2ptrain.signals import interruptible
from p2ptrain.training import checkpoint
from p2ptrain.training.data.source import Source
from p2ptrain.training.data.tokenizer import IDS, Tokenizer
from p2ptrain.training.data.tokenizer_file import TOKENIZER_FILE, TRAIN
from p2ptrain.training.run_tokenizer import first_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from p2ptrain.peer.session import NetworkSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """A run that this peer can train.

    Attributes:
        run: its settings.
        tokenizer: its tokenizer.
        is_live: whether other peers train it already.
    """

    run: RunConfig
    tokenizer: Tokenizer
    is_live: bool


def read_saved(out: Path, settings: Settings, config: PeerConfig) -> checkpoint.Checkpoint | None:
    """Load the newest undamaged checkpoint in `out`; None without checkpoints.

    Raises ConfigError if all are damaged, or if they are of another run or of a closed one whose key is missing.
    """
    try:
        saved = checkpoint.load_newest(out)
    except CheckpointError as error:
        raise ConfigError(f"--out {error}; move them away to start anew") from error
    if saved is None:
        return None
    ours, run_id = RunConfig.from_stated(saved.info["run"]), settings.values["run_id"]
    if settings.explicit("run_id") and ours.run_id != run_id:
        raise ConfigError(f"--out {out}: holds run {ours.run_id!r}, not {run_id!r}; give another --out")
    if saved.info.get("is_closed") and config.network.key is None:
        closed = f"run {ours.run_id!r} in {out} is closed"
        raise ConfigError(f"{closed}: give --run-key FILE, or a ticket that holds the key")
    return saved


def check_pins(session: NetworkSession, settings: Settings, config: PeerConfig, *, continues: bool) -> str | None:
    """Return a line about the run that `--founder` or a ticket pins this peer to; None without a pin.

    Raises ConfigError if no peer of that run is known. `continues`: whether there is a checkpoint.
    """
    network, peer_id = config.network, session.network.peer_id
    if not session.pins.allows_founding(peer_id) and not session.knows_others and not continues:
        flag = "--anchor" if network.anchor else "--founder"
        raise ConfigError(f"{flag}: no peer of that run is known; add --initial-peers or a ticket")
    if network.founder in ("", peer_id):
        return None
    by_ticket = settings.ticket is not None and settings.ticket.founder == network.founder
    origin = "the ticket" if by_ticket else "--founder"
    return f"pinned by {origin} to the run that {network.founder} founded: no other run is joined or started"


def choose_run(
    session: NetworkSession,
    settings: Settings,
    config: PeerConfig,
    source: Source,
    given: Tokenizer | None,
    saved: checkpoint.Checkpoint | None,
    *,
    out: Path,
    say: Callable[[str], None],
) -> Chosen | None:
    """Find the run, or start one, and get its tokenizer. If the run is finished, print that and return None.

    Args:
        given: the tokenizer that the user gave; `settings` have its identity and size.
        saved: the peer's checkpoint in `out`.

    Raises ConfigError like `settle_run` and `tokenizer_of`.
    """
    run_id, tokenizer = str(settings.values["run_id"]), given
    ours = RunConfig.from_stated(saved.info["run"]) if saved else None
    found = None
    if session.knows_others:
        # Logged early, so that the user can send it to an owner who has to allow this peer.
        logger.info("this peer's id is %s", session.network.peer_id)
        found = session.find_run(run_id, explicit=settings.explicit_run(), ours=ours)
    if found is None and ours is None and tokenizer is None:
        tokenizer = interruptible(
            partial(first_tokenizer, config.tokenizer, str(settings.values["model"]), source, say)
        )
        settings = settings.with_tokenizer(tokenizer.identity, tokenizer.vocab_size)
    run = settle_run(settings, found, ours, out)
    if session.knows_others and not found and not saved:
        say(nobody_found(run_id, "--run-id"))
    # Until the run's last round has landed, it can be made up for. Older checkpoints do not say.
    if saved and found is None and run.is_over_at(saved.step) and saved.info.get("finished", True):
        say(
            f"run {run_id!r} is finished: {saved.step} steps, see {out}; start another with a new "
            f"--run-id or --out, from these weights with --init-from {shlex.quote(str(out))}"
        )
        return None
    if config.tokenizer and config.tokenizer.startswith(TRAIN) and (found or saved):
        since = "has started" if found else "is continued"
        say(f"--tokenizer {config.tokenizer}: not used, because run {run_id!r} {since} with its own")
    if others := settings.preset_differences(run):
        say(f"--preset {config.preset}: not used, because run {run_id!r} has started with {', '.join(others)}")

    def ask() -> bytes | None:
        say(f"asking the peers of run {run.run_id!r} for its tokenizer")
        return session.find_tokenizer(run)

    return Chosen(run, tokenizer_of(run, tokenizer, source, out, ask), is_live=found is not None)


def settle_run(settings: Settings, found: RunConfig | None, ours: RunConfig | None, out: Path) -> RunConfig:
    """Choose the run's settings: those of the live run (`found`), else of the checkpoint (`ours`), else of a new run.

    Raises:
        ConfigError: the checkpoint contradicts the live run, or the run needs an option that the user did not give.
        RunMismatchError: the user's settings contradict the run's.
    """
    if found and ours and found != ours:
        raise ConfigError(
            f"--out {out}: its checkpoint has other settings than the live run "
            f"({_differences(ours, found)}); give another --out"
        )
    adopted = found or ours
    if adopted is not None:
        _check_prepared(settings, adopted)
    try:
        run = settings.resolve_run(adopted)
    except RunMismatchError as error:
        if found is None:
            raise RunMismatchError(f"{error}. The run's settings come from the checkpoint in {out}") from error
        raise
    if not run.model or not run.data:
        fix = "join it from Python with p2ptrain.join(model, run_id=…)"
        raise ConfigError(f"run {run.run_id!r} was started from Python; {fix}")
    if ":" in run.model and not settings.explicit("model") and found:
        # Another peer must not choose which code runs on this machine.
        raise ConfigError(
            f"run {run.run_id!r} trains model {run.model}, which is code that you must have: add --model {run.model}"
        )
    if settings.explicit("sharding") and run.num_shards == 0:
        raise ConfigError(f"--sharding {run.sharding}: has no meaning without shards; add --num-shards N")
    if run.data == "text" and not settings.explicit("data"):
        raise ConfigError(f"run {run.run_id!r} trains on text that every peer brings: add --data FILE or DIR")
    return run


def _check_prepared(settings: Settings, run: RunConfig) -> None:
    """Raise RunMismatchError if the user's data was prepared with another tokenizer than the run's."""
    made_with = settings.from_files.get("tokenizer", run.tokenizer)
    if settings.explicit("tokenizer") or made_with == run.tokenizer:
        return
    theirs, fix = "ids of a tokenizer that it does not name", "give token files with these ids"
    if run.tokenizer != IDS:
        theirs, given = _called(run.tokenizer), run.tokenizer
        if _is_file(given):
            given = f"{TOKENIZER_FILE} (it is in the output directory of each peer of the run)"
        fix = (
            "give the text itself as --data, which is then tokenized with the run's tokenizer, or prepare it again "
            f"with --tokenizer {given}"
        )
    raise RunMismatchError(
        f"--data {settings.values['data']}: was prepared with {_called(made_with)}, but run {run.run_id!r} has "
        f"{theirs}; {fix}; or choose another --run-id"
    )


def _called(tokenizer: str) -> str:
    return f"the tokenizer file {tokenizer[:12]}…" if _is_file(tokenizer) else f"the tokenizer {tokenizer!r}"


def _is_file(tokenizer: str) -> bool:
    """Whether this is the hash of a tokenizer's file, and not the name of a built-in one."""
    return len(tokenizer) == 64


def _differences(ours: RunConfig, theirs: RunConfig) -> str:
    mine, live = ours.to_dict(), theirs.to_dict()
    changed = [name for name in mine if mine[name] != live[name]]
    return ", ".join(f"{name}: {mine[name]!r} in the checkpoint, {live[name]!r} in the run" for name in changed)
