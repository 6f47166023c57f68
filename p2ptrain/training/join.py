"""`p2ptrain join` from start to end: find or start the run, build the model and its data, train, leave.

Errors that can be found on this machine are raised before the network is opened.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.doctor.local import quick_look
from p2ptrain.monitor.estimate import vectors_more
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.monitor.trackers import open_tracker
from p2ptrain.peer.sinks import Sink
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.initial_peers import write_addresses
from p2ptrain.settings.machine import free_memory_bytes
from p2ptrain.settings.peer_config import default_dir
from p2ptrain.settings.table import Settings
from p2ptrain.settings.torchrun import ONE_PROCESS, Launch
from p2ptrain.settings.unusual import unusual
from p2ptrain.signals import interruptible
from p2ptrain.training import checkpoint
from p2ptrain.training.announcement import announce
from p2ptrain.training.choose_run import check_pins, choose_run, read_saved
from p2ptrain.training.data.source import Source, open_source
from p2ptrain.training.data.tokenizer import IDS, Tokenizer
from p2ptrain.training.device import device_of
from p2ptrain.training.job import Job, build_model, build_trainer
from p2ptrain.training.known_peers import open_session, write_known_peers
from p2ptrain.training.loop import TrainingEnd, take_part
from p2ptrain.training.memory import check_tokens
from p2ptrain.training.models import PRESETS, check_name, count_parameters
from p2ptrain.training.output_dir import claim_out, is_numbered, to_continue
from p2ptrain.training.parallel import check_fsdp
from p2ptrain.training.pretrained import check_weights, load_weights, read_weights
from p2ptrain.training.progress import TrainingProgress
from p2ptrain.training.ranks import join_ranks, open_ranks
from p2ptrain.training.run_tokenizer import given_tokenizer

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer

IDENTITY_FILE = "identity.key"
METRICS_FILE = "metrics.jsonl"
# A finished run with fewer rounds than this share of those that its H plans says so (guess).
NOTABLE_SHARE = 0.9


def check_local(settings: Settings, launch: Launch = ONE_PROCESS) -> tuple[Source, torch.device]:
    """Look for mistakes that can be found on this machine before anything is asked or waited for.

    Returns:
        The data, opened, and the device of this rank.

    Raises:
        ConfigError: a setting cannot work on this machine.
    """
    config = settings.peer_config()
    device = device_of(config.device, launch)
    check_fsdp(config, launch.size)
    if config.batch_tokens:
        check_tokens("--batch-tokens", config.batch_tokens, free_memory_bytes())
    if settings.explicit("model"):
        check_name(str(settings.values["model"]))
    if config.init_from:
        check_weights(Path(config.init_from))
    return open_source(config.data), device


def join_run(
    settings: Settings,
    source: Source,
    device: torch.device,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[TrainingProgress], None],
    on_status: Callable[[str], None] | None = None,
    sinks: Sequence[Sink] = (),
    on_peer: Callable[[Peer], None] = lambda peer: None,
    share_key: bool = False,
    qr: bool = False,
    launch: Launch = ONE_PROCESS,
) -> None:
    """Take part in a run; blocks until it ends or the user stops it. Only for the main thread (signal handlers).

    Args:
        settings: merged from flags, environment and TOML, and checked.
        source, device: as `check_local` returned them.
        say: prints one line for the user.
        on_progress: called every few seconds.
        on_status: called with what the peer is doing while it joins; None: `say`.
        sinks: receive the peer's events, as its metrics file does.
        on_peer: called with the peer once it has joined the run.
        share_key: put the run key into the ticket that is printed; it must have one.
        qr: print the ticket as a QR code, too.
        launch: rank 0, and how many processes this peer has; the others call `follow`.

    Raises:
        ConfigError: a setting cannot work, or the network side of this peer failed during training.
    """
    config = settings.peer_config()
    run_id = str(settings.values["run_id"])
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = interruptible(partial(given_tokenizer, config.tokenizer, source))
    if tokenizer is not None:
        settings = settings.with_tokenizer(tokenizer.identity, tokenizer.vocab_size)

    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(launch))
        watching = list(sinks)
        if config.prometheus is not None:
            prometheus = stack.enter_context(closing(PrometheusSink(config.prometheus)))
            watching.append(prometheus)
            say(f"Prometheus metrics at {prometheus.url}")
        show = None
        if config.dashboard is not None:
            from p2ptrain.monitor.dashboard.serve import take_port  # only with its extra

            show = take_port(config.dashboard, settings.page_config(), stack)
        out = stack.enter_context(claim_out(config.out, run_id, joins=bool(config.network.initial_peers)))
        if is_numbered(config.out, out, run_id):
            say(f"{default_dir(run_id)} is in use; to continue this peer later, add --out {out}")
        saved = read_saved(out, settings, config)
        if config.log is not None:
            tracker = open_tracker(config.log, out, run_id)
            stack.callback(tracker.join)
            watching.append(tracker)
        network = dataclasses.replace(config.network, identity=str(config.network.identity or out / IDENTITY_FILE))
        session = stack.enter_context(open_session(network, out, saved, say))
        if pinned := check_pins(session, settings, config, continues=saved is not None):
            say(pinned)
        chosen = choose_run(session, settings, config, source, tokenizer, saved, out=out, say=say)
        if chosen is None:
            ranks.tell()  # there is no job
            return
        run = chosen.run
        if not chosen.is_live and saved is None:
            for line in unusual(run, settings.explicit_run()):
                say(f"warning: {line}")
        if ranks.size > 1 and run.inner_moments == "averaged":
            raise ConfigError(
                f"inner_moments = 'averaged': is not supported in several processes, and run {run_id!r} has it; start "
                f"one process, without torchrun"
            )
        known = None
        if run.model in PRESETS:
            known = count_parameters(run.model, vocab_size=run.vocab_size, context=run.context)
        for finding in quick_look(out, run.model, config.device, num_parameters=known, vectors=vectors_more(run)):
            say(f"warning: {finding.check}: {finding.text}; {finding.remedy} (for details: p2ptrain doctor)")
        job = Job(run, config, session.network.peer_id, source, chosen.tokenizer, out, saved, device)
        # This also covers the member's leaving. All ranks do what follows, the other ones in `follow`.
        stack.enter_context(ranks.lost_ranks_reported())
        job.tell(ranks)
        model = build_model(job)
        if config.init_from:
            say(_init_weights(model, job, is_live=chosen.is_live, knows_others=session.knows_others))
        # Done before joining: it takes a second or more, in which a member would delay rounds.
        trainer, partition, share = build_trainer(job, model, ranks, say)
        member, peer = join_ranks(
            model,
            ranks,
            partial(
                session.enter,
                run=run,
                optimizer=trainer.optimizer.adamw,
                metrics=Path(config.metrics or out / METRICS_FILE),
                sinks=watching,
                resume_state=saved.state["peer"] if saved else None,
                tokenizer=chosen.tokenizer.file,
                worker_threads=config.worker_threads,
                on_status=on_status or say,
            ),
        )
        assert peer is not None  # this is rank 0
        stack.push(member)
        on_peer(peer)
        if config.network.write_addresses:
            write_addresses(Path(config.network.write_addresses), peer.maddrs)
        if partition is not None:
            sizes = partition.sizes
            peer.shard_tokens = sizes[share]
            peer.record("shard", sharding=run.sharding, shard=share, sizes=sizes, partition_sha256=partition.digest)
        if show is not None:
            say(f"the run is shown at {show(peer)}")
        continues, processes = saved is not None, ranks.size
        announce(peer, run, network, processes=processes, continues=continues, share_key=share_key, qr=qr, say=say)

        noted: list[str] = []

        def progressed(progress: TrainingProgress) -> None:
            nonlocal noted
            if noted != (noted := peer.alive_maddrs):
                write_known_peers(out, noted)
            on_progress(progress)

        job, saved = dataclasses.replace(job, saved=None), None  # free it: gigabytes for a large model
        end = take_part(job, trainer, ranks, member, say=say, on_progress=progressed)
        hint = to_continue(config.out, out, run_id)
        say(_end_line(end, run, peer.run_step, peer.round, out, chosen.tokenizer, hint))


def _end_line(
    end: TrainingEnd, run: RunConfig, step: int, rounds: int, out: Path, tokenizer: Tokenizer, hint: str
) -> str:
    """The last line for the user: how training ended, and what to do next (`hint`, if it has not finished)."""
    of_rounds = ""
    if end.reason == "finished":
        hint = f"try: p2ptrain generate {shlex.quote(str(out))}"
        if tokenizer.identity == IDS:
            hint += " --tokenizer FILE.json"
        planned = run.total_steps // run.sync_every
        if not run.is_pairwise and rounds < NOTABLE_SHARE * planned:
            of_rounds = f" after {rounds} of {planned} planned rounds"
    loss = ""
    if end.eval_loss is not None:
        perplexity = math.exp(min(end.eval_loss, 99.0))
        loss = f": held-out {end.eval_loss:.3f} (perplexity {perplexity:.1f}) after the last round"
    saved = "saved" if (out / checkpoint.name_of(step)).exists() else "not saved"
    return f"{end.reason} at step {step}{of_rounds}{loss}, {saved} in {out}; {hint}"


def _init_weights(model: nn.Module, job: Job, *, is_live: bool, knows_others: bool) -> str:
    """Load the weights of `--init-from` if the run starts with this peer. Returns what to tell the user."""
    given, run_id = str(job.config.init_from), job.run.run_id
    unused = f"--init-from {given}: not used, because"
    if is_live:
        return f"{unused} run {run_id!r} has started; its weights are used"
    if job.saved:
        return f"{unused} the checkpoint of step {job.saved.step} in {job.out} is continued"
    load_weights(model, read_weights(Path(given), job.run.tokenizer), origin=given)
    # If two peers start at the same time, neither finds the other, and only one of them starts the run.
    unless = ", unless another peer starts the run first" if knows_others else ""
    return f"starting from the weights of {given}{unless}"
