"""`p2ptrain join` from beginning to end: find the run or found it, build what it trains, train, leave.

What can be seen to be wrong on this machine is said before the network is touched.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from p2ptrain.errors import CheckpointError, ConfigError, RunMismatchError, UnreachableError
from p2ptrain.monitor.doctor.quick import quick_look
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.peer.sinks import Sink
from p2ptrain.settings.config import NetworkConfig, RunConfig
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.initial_peers import join_line, write_addresses
from p2ptrain.settings.table import Settings
from p2ptrain.signals import stop_on_signals
from p2ptrain.training import checkpoint
from p2ptrain.training.data import VOCAB_SIZE, Corpus, Shards, load_corpus
from p2ptrain.training.loop import Progress, run_training
from p2ptrain.training.models import PRESETS, build, check_name, context_length, count_parameters
from p2ptrain.training.output_dir import claim_out
from p2ptrain.training.pretrained import check_weights, load_weights, read_weights
from p2ptrain.training.sharding import choose_shard, make_shards
from p2ptrain.training.trainer import Trainer, choose_device

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer
    from p2ptrain.peer.session import NetworkSession

IDENTITY_FILE = "identity.key"
METRICS_FILE = "metrics.jsonl"
# Addresses of the peers that were last seen alive: what a restarted peer finds the run by, should the address that
# it first joined through be gone, or should it be the founder.
REMEMBERED_FILE = "peers.txt"
# A guess between a slow DHT and a person who waits: looking up one key takes well below a second.
FIND_RUN_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def join_run(
    settings: Settings,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None],
    on_status: Callable[[str], None] | None = None,
    sinks: Sequence[Sink] = (),
    on_peer: Callable[[Peer], None] = lambda peer: None,
) -> None:
    """Take part in a run until it ends or Ctrl-C.

    Args:
        settings: merged from flags, environment and TOML.
        say: shows one line to the user.
        on_progress: shows how training goes on, every few seconds.
        on_status: shows what the peer does while it enters the run; None: it is said like all else.
        sinks: who gets the peer's events besides its metrics file.
        on_peer: called with the peer once it has entered the run.

    Raises:
        ConfigError: something the user gave cannot work.
    """
    config = settings.peer_config()
    if config.dashboard is not None:
        require_extra("dashboard", "--dashboard")
    run_id = str(settings.values["run_id"])
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if settings.explicit("model"):
        check_name(str(settings.values["model"]))
    if config.init_from:
        check_weights(Path(config.init_from))
    corpus = load_corpus(config.data)

    with ExitStack() as stack:
        watching = list(sinks)
        if config.prometheus is not None:
            prometheus = stack.enter_context(closing(PrometheusSink(config.prometheus)))
            watching.append(prometheus)
            say(f"figures for Prometheus at {prometheus.url}")
        out = stack.enter_context(claim_out(config.out, run_id, joins=bool(config.network.initial_peers)))
        identity = Path(config.network.identity or out / IDENTITY_FILE)
        saved = _saved(out)

        network = dataclasses.replace(config.network, identity=str(identity))
        session = stack.enter_context(_open_session(network, _remembered(out), saved, say))
        found = session.find_run(run_id, timeout_s=FIND_RUN_TIMEOUT_S) if session.knows_others else None
        run = settle_run(settings, found, saved, out)
        if session.knows_others and not found and not saved:
            say(f"nobody of run {run_id!r} is there: starting it, unless somebody else does; --run-id chooses another")
        if saved and found is None and 0 < run.total_steps <= saved.step:
            say(
                f"run {run_id!r} is finished: {saved.step} steps, see {out}; start another with a new --run-id or --out"
            )
            return
        known = count_parameters(run.model, vocab_size=VOCAB_SIZE) if run.model in PRESETS else None
        for finding in quick_look(out, run.model, config.device, num_parameters=known):
            say(f"warning: {finding.check}: {finding.text}; {finding.remedy} (p2ptrain doctor tells more)")
        model = _build_model(run, saved)
        if config.init_from:
            _start_from(config.init_from, model, found, saved, out, session.knows_others, say)
        model.to(device)
        # Before the run is entered: it takes a second of imports, in which a member would only hold up rounds.
        shards, shard = _shards(run, corpus, model, config.shard, session.peer_id, say)
        spans = None if shards is None else shards.spans(shard)
        seed = run.data_seed(session.peer_id) if config.seed is None else config.seed
        trainer = Trainer(model, corpus, run, batch_size=config.batch_size, seed=seed, spans=spans)
        if saved:
            trainer.load_state_dict(saved.state["trainer"])

        peer = stack.enter_context(
            session.enter(
                model,
                run,
                optimizer=trainer.optimizer,
                metrics=Path(config.metrics or out / METRICS_FILE),
                sinks=watching,
                resume_state=saved.state["peer"] if saved else None,
                on_status=on_status or say,
            )
        )
        on_peer(peer)
        if config.write_addresses:
            write_addresses(Path(config.write_addresses), peer.maddrs)
        if shards is not None:
            peer.shard_tokens = shards.sizes[shard]
            peer.record("shard", sharding=run.sharding, shard=shard, sizes=shards.sizes, partition_sha256=shards.digest)
        if config.dashboard is not None:
            _show(stack, peer, config.dashboard, settings, say)
        stop = stack.enter_context(stop_on_signals())
        verb = "continuing" if saved else "started" if peer.founded else "joined"
        _say_hello(say, peer.peer_id, peer.maddrs, peer.run, verb)
        saved = None  # a large model's is gigabytes

        def progressed(progress: Progress) -> None:
            _remember(out, peer.alive_maddrs)
            on_progress(progress)

        reason = run_training(peer, trainer, config, out=out, stop=stop, on_progress=progressed)
        hint = f"try: p2ptrain generate {out}" if reason == "finished" else "the same command again continues"
        is_saved = (out / checkpoint.name_of(peer.run_step)).exists()
        say(f"{reason} at step {peer.run_step}, {'saved' if is_saved else 'not saved'} in {out}; {hint}")


def _show(stack: ExitStack, peer: Peer, port: int, settings: Settings, say: Callable[[str], None]) -> None:
    """Serve the page of the run as this peer sees it, until `stack` ends."""
    from p2ptrain.monitor.dashboard.dashboard import Source, showing

    watch = peer.watch()
    stack.callback(watch.stop)
    page = dataclasses.replace(settings.page_config(), port=port)
    say(f"the run is shown at {stack.enter_context(showing(Source(peer.run.run_id, watch), page))}")


def _saved(out: Path) -> checkpoint.Checkpoint | None:
    """What to go on from. Raises ConfigError where all that there is is damaged."""
    try:
        return checkpoint.load_newest(out)
    except CheckpointError as error:
        raise ConfigError(f"--out {error}; move them away to start afresh") from error


def _remembered(out: Path) -> tuple[str, ...]:
    """Addresses of the peers that we trained with before; none where there is no (readable) record of them."""
    from p2ptrain.network.addresses import is_initial_peer  # imports hivemind, as _open_lobby does next

    path = out / REMEMBERED_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        logger.warning("%s: %s; the peers noted there are not asked", path, error.strerror)
        return ()
    for line in lines:
        if not is_initial_peer(line):
            logger.warning("%s: %.200r is not an address; the line is skipped", path, line)
    return tuple(dict.fromkeys(filter(is_initial_peer, lines)))


def _remember(out: Path, maddrs: list[str]) -> None:
    """Note whom we train with, as far as what they call their addresses are addresses.

    Where that cannot be written, what was noted before has to do.
    """
    from p2ptrain.network.addresses import is_initial_peer

    if usable := [maddr for maddr in maddrs if is_initial_peer(maddr)]:
        try:
            write_addresses(out / REMEMBERED_FILE, usable)
        except ConfigError as error:
            logger.warning("the addresses of the other peers could not be noted: %s", error)


def _open_session(
    network: NetworkConfig, remembered: tuple[str, ...], saved: checkpoint.Checkpoint | None, say: Callable[[str], None]
) -> NetworkSession:
    """The network, joined through the addresses that the user gave and those that we remember.

    Where none answers, a run of which we have a checkpoint goes on with us, and the others are looked for meanwhile:
    they may all have been ended, and one must be the first. Without a checkpoint, remembered peers alone may be gone.
    """
    from p2ptrain.peer.session import (
        NetworkSession,  # imports hivemind, which takes a second that no error before need wait for
    )

    known = dataclasses.replace(network, remembered_peers=remembered)
    try:
        return NetworkSession.open(known)
    except UnreachableError as error:
        if saved:
            say(f"{error}. Going on from the checkpoint of step {saved.step}, alone until one of them is found")
            return NetworkSession.open(known, alone=True)
        if not remembered:
            raise
        say("none of the peers from before can be reached")
        return NetworkSession.open(network)


def settle_run(
    settings: Settings, found: RunConfig | None, saved: checkpoint.Checkpoint | None, out: Path
) -> RunConfig:
    """The settings to train with: those of the live run, else of our checkpoint, else of a new run.

    Args:
        settings: what the user gave.
        found: the settings of the live run, or None.
        saved: our newest checkpoint, or None.
        out: its directory, for messages.

    Raises:
        ConfigError: these contradict each other, or the run needs something that only the user can give.
    """
    ours = RunConfig.from_stated(saved.info["run"]) if saved else None
    if found and ours and found != ours:
        raise ConfigError(
            f"--out {out}: its checkpoint is of a run with other settings than the one found now "
            f"({_differences(ours, found)}); give another --out"
        )
    try:
        run = settings.resolve_run(found or ours)
    except RunMismatchError as error:
        if found is None:
            raise RunMismatchError(f"{error}. The run's settings are those of the checkpoint in {out}") from error
        raise
    if not run.model or not run.data:
        raise ConfigError(
            f"run {run.run_id!r} was started from a Python program; join it with p2ptrain.join(model, run_id=…) there"
        )
    if ":" in run.model and not settings.explicit("model") and found:
        # A stranger must not choose which code of this machine is called.
        raise ConfigError(
            f"run {run.run_id!r} trains the model {run.model}, code that you must have: add --model {run.model}"
        )
    if settings.explicit("sharding") and run.num_shards == 0:
        raise ConfigError(f"--sharding {run.sharding}: has no meaning without shards; add --num-shards N")
    if run.data == "text" and not settings.explicit("data"):
        raise ConfigError(f"run {run.run_id!r} trains on text that every peer brings: add --data FILE or DIR")
    return run


def _build_model(run: RunConfig, saved: checkpoint.Checkpoint | None) -> nn.Module:
    model = build(run.model, vocab_size=VOCAB_SIZE, seed=run.run_seed)
    if saved:
        try:
            model.load_state_dict(saved.state["model"])
        except RuntimeError as error:
            raise ConfigError(f"the checkpoint does not fit model {run.model}: {error}; give another --out") from error
    return model


def _start_from(
    init_from: str,
    model: nn.Module,
    found: RunConfig | None,
    saved: checkpoint.Checkpoint | None,
    out: Path,
    knows_others: bool,
    say: Callable[[str], None],
) -> None:
    """Give `model` the first weights that the user chose, or say why the run's are taken instead."""
    if found:
        say(f"--init-from {init_from}: not used, as run {found.run_id!r} is under way; its weights are taken instead")
        return
    if saved:
        say(f"--init-from {init_from}: not used, as the checkpoint of step {saved.step} in {out} is continued instead")
        return
    load_weights(model, read_weights(Path(init_from)), origin=init_from)
    # Two that start at once both find nobody, and one of them founds the run.
    unless = ", unless another peer founds the run before us" if knows_others else ""
    say(f"starting from the weights of {init_from}{unless}")


def _shards(
    run: RunConfig, corpus: Corpus, model: nn.Module, given: int | None, peer_id: str, say: Callable[[str], None]
) -> tuple[Shards | None, int]:
    """The run's shards and the number of ours; None and 0 in a run without any. `model` is not touched."""
    if run.num_shards == 0 and given is None:
        return None, 0
    shard = choose_shard(given, run, peer_id)
    if run.sharding == "clusters":
        say(f"sorting the text into {run.num_shards} clusters, which takes a while")
    shards = make_shards(run, corpus, context=context_length(model), device=next(model.parameters()).device)
    assert shards is not None
    say(
        f"training on shard {shard} of {run.num_shards} ({run.sharding}): {shards.sizes[shard]:,} of "
        f"{sum(shards.sizes):,} characters; partition {shards.digest[:12]}, the same on peers with the same text"
    )
    return shards, shard


def _say_hello(say: Callable[[str], None], peer_id: str, maddrs: list[str], run: RunConfig, verb: str) -> None:
    say(f"{verb} run {run.run_id!r} (model {run.model}, {run.total_steps or 'endless'} steps) as peer {peer_id}")
    for maddr in maddrs:
        say(f"listening on {maddr}")
    say("others join with:")
    say(join_line(maddrs, run.run_id, run.model))


def _differences(ours: RunConfig, theirs: RunConfig) -> str:
    mine, live = ours.to_dict(), theirs.to_dict()
    return ", ".join(f"{name}: {mine[name]!r} there, {live[name]!r} here" for name in mine if mine[name] != live[name])
