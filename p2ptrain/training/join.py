"""`p2ptrain join` from start to end: find or start the run, build the model and its data, train, leave.

Errors that can be found on this machine are raised before the network is opened.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from p2ptrain.errors import CheckpointError, ConfigError, RunMismatchError, UnreachableError
from p2ptrain.monitor.doctor.local import quick_look
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.monitor.trackers import open_tracker
from p2ptrain.peer.sinks import Sink
from p2ptrain.protocol.membership.reachability import best_first
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.initial_peers import join_line, ticket_line, write_addresses
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.table import Settings
from p2ptrain.signals import interruptible, stop_on_signals
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Corpus, Shards
from p2ptrain.training.data.source import open_source
from p2ptrain.training.data.token_files import TokenFolder
from p2ptrain.training.data.tokenizer import IDS
from p2ptrain.training.data.tokenizer_file import TRAIN
from p2ptrain.training.generation import generate_text
from p2ptrain.training.loop import TrainingProgress, run_training
from p2ptrain.training.models import (
    PRESETS,
    batch_windows,
    build,
    check_name,
    context_length,
    count_parameters,
    eval_tokens,
)
from p2ptrain.training.output_dir import claim_out
from p2ptrain.training.pretrained import check_weights, load_weights, read_weights
from p2ptrain.training.run_tokenizer import first_tokenizer, given_tokenizer, tokenizer_of
from p2ptrain.training.sharding import choose_shard, make_shards
from p2ptrain.training.trainer import Trainer, choose_device, choose_precision

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer
    from p2ptrain.peer.session import NetworkSession

IDENTITY_FILE = "identity.key"
METRICS_FILE = "metrics.jsonl"
# Addresses of the peers last seen alive. A restarted peer finds the run through them if its initial peers are gone, or
# if it started the run and has none.
REMEMBERED_FILE = "peers.txt"

SAMPLE_TOKENS = 100

logger = logging.getLogger(__name__)


def join_run(
    settings: Settings,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[TrainingProgress], None],
    on_status: Callable[[str], None] | None = None,
    sinks: Sequence[Sink] = (),
    on_peer: Callable[[Peer], None] = lambda peer: None,
    share_key: bool = False,
) -> None:
    """Take part in a run; blocks until it ends or the user stops it. Only for the main thread (signal handlers).

    Args:
        settings: merged from flags, environment and TOML.
        say: prints one line for the user.
        on_progress: called every few seconds.
        on_status: called with what the peer is doing while it joins; None: `say`.
        sinks: receive the peer's events, as its metrics file does.
        on_peer: called with the peer once it has joined the run.
        share_key: put the run key into the ticket that is printed; it must have one.

    Raises:
        ConfigError: a setting cannot work, or the network side of this peer failed during training.
    """
    config = settings.peer_config()
    run_id = str(settings.values["run_id"])
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if settings.explicit("model"):
        check_name(str(settings.values["model"]))
    if config.init_from:
        check_weights(Path(config.init_from))
    source = open_source(config.data)
    tokenizer = interruptible(partial(given_tokenizer, config.tokenizer, source))
    if tokenizer is not None:
        settings = settings.with_tokenizer(tokenizer.identity, tokenizer.vocab_size)

    with ExitStack() as stack:
        watching = list(sinks)
        if config.prometheus is not None:
            prometheus = stack.enter_context(closing(PrometheusSink(config.prometheus)))
            watching.append(prometheus)
            say(f"Prometheus metrics at {prometheus.url}")
        show = None
        if config.dashboard is not None:
            from p2ptrain.monitor.dashboard.from_peer import take_port  # only with its extra

            show = take_port(config.dashboard, settings.page_config(), stack)
        out = stack.enter_context(claim_out(config.out, run_id, joins=bool(config.network.initial_peers)))
        identity = Path(config.network.identity or out / IDENTITY_FILE)
        saved = _saved(out)
        ours = RunConfig.from_stated(saved.info["run"]) if saved else None
        if ours and settings.explicit("run_id") and ours.run_id != run_id:
            raise ConfigError(f"--out {out}: holds run {ours.run_id!r}, not {run_id!r}; give another --out")
        if saved and ours and saved.info.get("is_closed") and config.network.key is None:
            raise ConfigError(
                f"run {ours.run_id!r} in {out} is closed: give --run-key FILE, or a ticket that holds the key"
            )

        if config.log is not None:
            watching.append(stack.enter_context(closing(open_tracker(config.log, out, run_id))))
        named = dataclasses.replace(config.network, identity=str(identity))
        session = stack.enter_context(_open_session(named, _remembered(out), saved, say))
        network = config.network
        may_found = session.pins.allows_founding(session.network.peer_id)
        if not may_found and not session.knows_others and not saved:
            flag = "--anchor" if network.anchor else "--founder"
            raise ConfigError(f"{flag}: no peer of that run is known; add --initial-peers or a ticket")
        if network.founder not in ("", session.network.peer_id):
            by_ticket = settings.ticket is not None and settings.ticket.founder == network.founder
            origin = "the ticket" if by_ticket else "--founder"
            say(f"pinned by {origin} to the run that {network.founder} founded: no other run is joined or started")
        found = None
        if session.knows_others:
            # Early, so that it can be copied for an owner who has to allow it.
            logger.info("this peer's id is %s", session.network.peer_id)
            found = session.find_run(run_id, explicit=settings.explicit_run(), ours=ours)
        if found is None and ours is None and tokenizer is None:
            tokenizer = interruptible(partial(first_tokenizer, config.tokenizer, source, say))
            settings = settings.with_tokenizer(tokenizer.identity, tokenizer.vocab_size)
        run = settle_run(settings, found, ours, out)
        if session.knows_others and not found and not saved:
            say(f"no peers found for run {run_id!r}; starting it (--run-id chooses another run)")
        if saved and found is None and 0 < run.total_steps <= saved.step:
            say(
                f"run {run_id!r} is finished: {saved.step} steps, see {out}; start another with a new --run-id or --out"
            )
            return
        if config.tokenizer and config.tokenizer.startswith(TRAIN) and (found or saved):
            since = "has started" if found else "is continued"
            say(f"--tokenizer {config.tokenizer}: not used, because run {run_id!r} {since} with its own")
        if others := settings.preset_differences(run):
            say(f"--preset {config.preset}: not used, because run {run_id!r} has started with {', '.join(others)}")
        tokenizer = tokenizer_of(run, tokenizer, source, out, partial(_ask_tokenizer, session, run, say))
        corpus = interruptible(partial(source.corpus, tokenizer))
        known = count_parameters(run.model, vocab_size=run.vocab_size) if run.model in PRESETS else None
        for finding in quick_look(out, run.model, config.device, num_parameters=known):
            say(f"warning: {finding.check}: {finding.text}; {finding.remedy} (for details: p2ptrain doctor)")
        model = _build_model(run, saved)
        unused = f"--init-from {config.init_from}: not used, because"
        if config.init_from and found:
            say(f"{unused} run {run_id!r} has started; its weights are used")
        elif config.init_from and saved:
            say(f"{unused} the checkpoint of step {saved.step} in {out} is continued")
        elif config.init_from:
            load_weights(model, read_weights(Path(config.init_from)), origin=config.init_from)
            # Of two peers that start at once, neither finds the other, and only one starts the run.
            unless = ", unless another peer starts the run first" if session.knows_others else ""
            say(f"starting from the weights of {config.init_from}{unless}")
        model.to(device)
        # Before joining: this takes a second or more, and a member would delay rounds in that time.
        shards, shard = _shards(run, corpus, model, config.shard, session.network.peer_id, say)
        spans = None if shards is None else shards.spans(shard)
        seed = run.data_seed(session.network.peer_id) if config.seed is None else config.seed
        context = context_length(model)
        trainer = Trainer(
            model, corpus, run, batch_size=batch_windows(run.model, context, config.batch_tokens), seed=seed,
            spans=spans, tokenizer=tokenizer,
            micro_batch=None if config.micro_batch == "auto" else int(config.micro_batch),
            eval_tokens=config.eval_tokens or eval_tokens(run.model, context),
            precision=choose_precision(config.dtype, device), compiled=config.compile == "on",
            read_ahead=device.type == "cuda" or isinstance(source, TokenFolder),
        )  # fmt: skip
        if saved:
            trainer.load_state_dict(saved.state["trainer"])

        peer = stack.enter_context(
            session.enter(
                model, run, optimizer=trainer.optimizer.adamw, metrics=Path(config.metrics or out / METRICS_FILE),
                sinks=watching, resume_state=saved.state["peer"] if saved else None,
                tokenizer=tokenizer.file, on_status=on_status or say,
            )
        )  # fmt: skip
        on_peer(peer)
        if config.network.write_addresses:
            write_addresses(Path(config.network.write_addresses), peer.maddrs)
        if shards is not None:
            peer.shard_tokens = shards.sizes[shard]
            peer.record("shard", sharding=run.sharding, shard=shard, sizes=shards.sizes, partition_sha256=shards.digest)
        if show is not None:
            say(f"the run is shown at {show(peer)}")
        stop = stack.enter_context(stop_on_signals())
        verb = "continuing" if saved else "started" if peer.founded else "joined"
        length = f"{run.total_steps or 'endless'} steps"
        say(f"{verb} run {run_id!r} (model {run.model}, {length}) as peer {peer.peer_id}")
        for maddr in peer.maddrs:
            say(f"listening on {maddr}")
        say("other peers join with:")
        say(join_line(peer.maddrs, run_id, run.model, config.network.key_file))
        _say_ticket(peer, run, config.network, share_key, say)
        saved = None  # free it: gigabytes for a large model

        def progressed(progress: TrainingProgress) -> None:
            _remember(out, peer.alive_maddrs)
            on_progress(progress)

        def sample() -> None:
            try:
                written = generate_text(model, tokenizer, "\n", length=SAMPLE_TOKENS, temperature=0.8, seed=0)
                text = "".join(takewhile(lambda _: not stop(), written))
            except Exception as error:  # a text is not worth a run
                logger.warning("no sample at step %d: %s", peer.run_step, error)
            else:
                say(f"sample at step {peer.run_step}: {text!r}")

        if config.sample_every and tokenizer.identity == IDS:
            say("--sample-every: not used, because the run's tokenizer is not here; give it with --tokenizer")
            config = dataclasses.replace(config, sample_every=0)
        reason = run_training(
            peer, trainer, config, out=out, stop=stop, on_progress=progressed, on_sample_due=sample
        )  # fmt: skip
        hint = f"try: p2ptrain generate {out}" if reason == "finished" else "run the same command again to continue"
        is_saved = (out / checkpoint.name_of(peer.run_step)).exists()
        say(f"{reason} at step {peer.run_step}, {'saved' if is_saved else 'not saved'} in {out}; {hint}")


def _ask_tokenizer(session: NetworkSession, run: RunConfig, say: Callable[[str], None]) -> bytes | None:
    say(f"asking the peers of run {run.run_id!r} for its tokenizer")
    return session.find_tokenizer(run)


def _say_ticket(
    peer: Peer, run: RunConfig, network: NetworkConfig, share_key: bool, say: Callable[[str], None]
) -> None:
    shared = network.key if share_key else None
    line = ticket_line(
        best_first(peer.maddrs),
        run.run_id,
        run.model,
        founder=peer.run_founder,
        run_key=network.key_file,
        shared=shared,
    )
    if line is not None:
        note = "; it holds the run key: whoever has it can join, so send it over a safe channel" if shared else ""
        say(f"or with this ticket{note}:")
        say(line)
    if network.key is not None and network.run_key is None and shared is None:
        say("FILE is the run's key file; with --share-key a ticket is printed that holds the key, and needs no file")


def _saved(out: Path) -> checkpoint.Checkpoint | None:
    """Load the newest undamaged checkpoint; None without checkpoints. Raises ConfigError if all are damaged."""
    try:
        return checkpoint.load_newest(out)
    except CheckpointError as error:
        raise ConfigError(f"--out {error}; move them away to start anew") from error


def _remembered(out: Path) -> tuple[str, ...]:
    """Addresses of peers seen before the restart; empty if the file is missing or unreadable."""
    from p2ptrain.network.addresses import is_initial_peer  # imports hivemind, as _open_session does next

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
    """Save the addresses of the live peers that parse. If that fails, log a warning and keep the earlier file."""
    from p2ptrain.network.addresses import is_initial_peer

    if usable := [maddr for maddr in maddrs if is_initial_peer(maddr)]:
        try:
            write_addresses(out / REMEMBERED_FILE, usable)
        except ConfigError as error:
            logger.warning("the addresses of the other peers could not be saved: %s", error)


def _open_session(
    network: NetworkConfig, remembered: tuple[str, ...], saved: checkpoint.Checkpoint | None, say: Callable[[str], None]
) -> NetworkSession:
    """Open the network through the user's initial peers and the remembered addresses.

    If no peer answers, a peer with a checkpoint starts alone and keeps looking for the others: all peers may have been
    stopped, and one of them must start first. Without a checkpoint, only the user's initial peers are tried again.
    Raises UnreachableError if none of the user's initial peers answered, and there is no checkpoint.
    """
    # Imports hivemind, which takes a second; earlier errors need not wait for it.
    from p2ptrain.peer.session import NetworkSession

    known = dataclasses.replace(network, remembered_peers=remembered)
    try:
        return NetworkSession(known)
    except UnreachableError as error:
        if saved:
            say(f"{error}. Continuing from the checkpoint of step {saved.step}, alone until a peer is found")
            return NetworkSession(known, alone=True)
        if not remembered:
            raise
        say(f"none of the peers saved in {REMEMBERED_FILE} can be reached")
        return NetworkSession(network)


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
    try:
        run = settings.resolve_run(found or ours)
    except RunMismatchError as error:
        if found is None:
            raise RunMismatchError(f"{error}. The run's settings come from the checkpoint in {out}") from error
        raise
    if not run.model or not run.data:
        raise ConfigError(
            f"run {run.run_id!r} was started from Python; join it from Python with p2ptrain.join(model, run_id=…)"
        )
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


def _build_model(run: RunConfig, saved: checkpoint.Checkpoint | None) -> nn.Module:
    model = build(run.model, vocab_size=run.vocab_size, seed=run.run_seed)
    if saved:
        try:
            model.load_state_dict(saved.state["model"])
        except RuntimeError as error:
            raise ConfigError(f"the checkpoint does not fit model {run.model}: {error}; give another --out") from error
    return model


def _shards(
    run: RunConfig, corpus: Corpus, model: nn.Module, given: int | None, peer_id: str, say: Callable[[str], None]
) -> tuple[Shards | None, int]:
    """Compute the run's shards and this peer's shard number; (None, 0) without shards. `model` is only read."""
    if run.num_shards == 0 and given is None:
        return None, 0
    shard = choose_shard(given, run, peer_id)
    if run.sharding == "clusters":
        say(f"sorting the text into {run.num_shards} clusters; this takes a while")
    shards = make_shards(run, corpus, context=context_length(model), device=next(model.parameters()).device)
    assert shards is not None
    say(
        f"training on shard {shard} of {run.num_shards} ({run.sharding}): {shards.sizes[shard]:,} of "
        f"{sum(shards.sizes):,} tokens; partition {shards.digest[:12]}, the same on peers with the same text"
    )
    return shards, shard


def _differences(ours: RunConfig, theirs: RunConfig) -> str:
    mine, live = ours.to_dict(), theirs.to_dict()
    changed = [name for name in mine if mine[name] != live[name]]
    return ", ".join(f"{name}: {mine[name]!r} in the checkpoint, {live[name]!r} in the run" for name in changed)
