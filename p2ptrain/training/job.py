"""What one process of a peer trains: model, data and settings. All ranks build the same from what rank 0 tells them.

Rank 0 runs `join_run` and is on the network. The other ranks run `follow`: they only train.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from p2ptrain.peer.model_tensors import check_has_values
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.machine import free_memory_bytes
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.settings.setting import settings_of
from p2ptrain.settings.torchrun import Launch
from p2ptrain.signals import SIGNALS, interruptible
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Corpus
from p2ptrain.training.data.source import Source, open_source
from p2ptrain.training.data.token_files import TokenFolder
from p2ptrain.training.data.tokenizer import Ids, Tokenizer
from p2ptrain.training.data.tokenizer_file import read_tokenizer
from p2ptrain.training.device import choose_precision, device_of
from p2ptrain.training.loop import take_part
from p2ptrain.training.memory import check_tokens, check_window, windows_at_once
from p2ptrain.training.models import batch_windows, build_of, context_length, eval_tokens
from p2ptrain.training.parallel import shard
from p2ptrain.training.partitioning import Partition, choose_share, make_partition
from p2ptrain.training.pretrained import load_saved
from p2ptrain.training.ranks import Ranks, join_ranks, open_ranks
from p2ptrain.training.trainer import Execution, Trainer, TrainingData, within_memory


@dataclass(frozen=True)
class Job:
    """What one process trains, and with which settings.

    Attributes:
        run: the run's settings.
        config: this machine's settings.
        peer_id: seeds the peer's data.
        source: the text.
        tokenizer: the run's tokenizer.
        out: the peer's directory, which has the tokenizer's file.
        saved: the checkpoint to continue from; None to start from the initial weights.
        device: the device of this rank.
    """

    run: RunConfig
    config: PeerConfig
    peer_id: str
    source: Source
    tokenizer: Tokenizer
    out: Path
    saved: checkpoint.Checkpoint | None
    device: torch.device

    def tell(self, ranks: Ranks) -> None:
        """Rank 0: give the job to the other ranks, which call `be_told`. Secrets of the network stay here."""
        ranks.tell(
            {
                "run": self.run.to_dict(),
                "config": {s.field_name: getattr(self.config, s.field_name) for s in settings_of(PeerConfig)},
                "peer_id": self.peer_id,
                "out": str(self.out),
                "checkpoint": None if self.saved is None else checkpoint.name_of(self.saved.step),
            }
        )


def be_told(ranks: Ranks, launch: Launch) -> Job | None:
    """On another rank: wait for the job of rank 0. Returns None if there is nothing to train any more.

    Reads the data, and from the checkpoint only the trainer's state. Raises ConfigError if it cannot read one of them.
    """
    told = ranks.tell()
    if not told:
        return None
    run, config, out = RunConfig.from_dict(told["run"]), PeerConfig(**told["config"]), Path(told["out"])
    saved = None if told["checkpoint"] is None else checkpoint.load(out / told["checkpoint"], ("trainer",))
    tokenizer = read_tokenizer(out, run.tokenizer, run.vocab_size) or Ids(run.vocab_size)
    source = open_source(config.data)
    return Job(run, config, told["peer_id"], source, tokenizer, out, saved, device_of(config.device, launch))


def build_model(job: Job) -> nn.Module:
    """The model on the CPU, with the weights of the checkpoint, or the initial ones. Raises ConfigError.

    Other ranks get the weights of rank 0 later.
    """
    model = build_of(job.run)
    if job.saved and "model" in job.saved.state:
        load_saved(model, job.saved.state["model"], job.run, "give another --out")
    return model


def build_trainer(
    job: Job, model: nn.Module, ranks: Ranks, say: Callable[[str], None]
) -> tuple[Trainer, Partition | None, int]:
    """All ranks: move the model to the devices, whole or sharded, and make its trainer, with the checkpoint's state.

    Blocks while data is read and cut. Returns the trainer, the run's partition, and the number of this peer's share.
    Raises ConfigError if the data cannot be trained on.
    """
    run, config = job.run, job.config
    check_has_values(model)
    with within_memory("the model", job.device):
        if config.fsdp == "on":
            shard(model, ranks, job.device)
        else:
            model.to(job.device)
    corpus = interruptible(partial(job.source.corpus, job.tokenizer))
    partition, share = _partition(job, corpus, model, say) if ranks.is_first else (None, 0)
    # Rank 0 decides: with clusters, ranks on other GPUs might cut differently.
    told = ranks.tell(
        {
            "spans": None if partition is None else partition.spans(share).tolist(),
            "at_once": _windows_at_once(job, model, ranks),
        }
    )
    context = context_length(model)
    if not hasattr(model, "context"):
        say(f"--model {run.model}: has no attribute context; windows are {context} tokens")
    evaluated = config.eval_tokens or eval_tokens(run.model, context)
    if ranks.is_first:
        check_tokens("--eval-tokens", min(evaluated, len(corpus.held_out)), free_memory_bytes())
    trainer = Trainer(
        model,
        TrainingData(
            corpus,
            spans=None if told["spans"] is None else np.array(told["spans"], dtype=np.int64),
            tokenizer=job.tokenizer,
            eval_tokens=evaluated,
        ),
        run,
        batch_size=batch_windows(run.model, context, config.batch_tokens, ranks.size),
        seed=_seed(job, ranks.rank),
        ranks=ranks,
        execution=Execution(
            micro_batch=None if config.micro_batch == "auto" else int(config.micro_batch),
            most_at_once=told["at_once"],
            precision=choose_precision(config.dtype, job.device),
            compiled=config.compile == "on",
            read_ahead=job.device.type == "cuda" or isinstance(job.source, TokenFolder),
        ),
    )
    if job.saved:
        trainer.load_state_dict(job.saved.state["trainer"])
    return trainer, partition, share


def _windows_at_once(job: Job, model: nn.Module, ranks: Ranks) -> int | None:
    """The most windows that a rank computes at once; None on a GPU, where running out of memory raises an error."""
    if job.device.type != "cpu":
        return None
    free_bytes = free_memory_bytes()
    shapes, context = [parameter.shape for parameter in model.parameters()], context_length(model)
    if ranks.is_first:
        check_window(shapes, context, free_bytes)
    return windows_at_once(shapes, context, free_bytes and free_bytes // ranks.size)


def _seed(job: Job, rank: int) -> int:
    """Seed of a rank's text and dropout. Each rank has a different one."""
    given = job.config.seed
    if rank:
        return job.run.data_seed(f"{job.peer_id if given is None else given}/{rank}")
    return job.run.data_seed(job.peer_id) if given is None else given


def _partition(job: Job, corpus: Corpus, model: nn.Module, say: Callable[[str], None]) -> tuple[Partition | None, int]:
    """The run's partition of the text, and this peer's share; (None, 0) without shares."""
    run, given = job.run, job.config.shard
    if run.num_shards == 0 and given is None:
        return None, 0
    share = choose_share(given, run, job.peer_id)
    if run.sharding == "clusters":
        say(f"sorting the text into {run.num_shards} clusters; this takes a while")
    partition = make_partition(run, corpus, context=context_length(model), device=job.device)
    assert partition is not None
    say(
        f"training on shard {share} of {run.num_shards} ({run.sharding}): {partition.sizes[share]:,} of "
        f"{sum(partition.sizes):,} tokens; partition {partition.digest[:12]}, the same on peers with the same text"
    )
    return partition, share


def follow(launch: Launch) -> None:
    """On another rank than 0: train what rank 0 tells; blocks until it ends. Prints only errors of this rank.

    Raises:
        ConfigError: this rank cannot train; TransientError if others have ended.
        SystemExit: something is wrong that rank 0 reports.
    """
    logging.getLogger("p2ptrain").setLevel(logging.ERROR)
    # Until training begins there is nothing to save, and waiting for rank 0 cannot be interrupted otherwise.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job of a shell
            signal.signal(number, signal.SIG_DFL)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(launch))
        with ranks.lost_ranks_reported(first_speaks=True):
            job = be_told(ranks, launch)
            if job is None:
                return
            if job.config.threads:
                torch.set_num_threads(job.config.threads)
            model = build_model(job)
            trainer, _, _ = build_trainer(job, model, ranks, _say_nothing)
            job = dataclasses.replace(job, saved=None)  # free it
            member, _ = join_ranks(model, ranks)
            stack.enter_context(ranks.lost_ranks_reported())  # also while the member leaves
            stack.push(member)
        take_part(job, trainer, ranks, member, say=_say_nothing, on_progress=lambda progress: None)


def _say_nothing(line: str) -> None:
    """Ignore the line: rank 0 prints it."""
