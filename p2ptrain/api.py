"""The Python API: join a run from a training loop with a model of your own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.network.lan import hosts_of, is_closed, look, matching, runs_of
from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.peer_state import saved_run
from p2ptrain.peer.process_group import device_of
from p2ptrain.peer.session import NetworkSession
from p2ptrain.settings.access import Access
from p2ptrain.settings.config import RunConfig, resolve_run
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.files import user_path
from p2ptrain.settings.initial_peers import nobody_found
from p2ptrain.settings.peer_config import NetworkConfig, PageConfig, PeerConfig
from p2ptrain.settings.run_key import read_key, warn_if_shared
from p2ptrain.settings.setting import shortened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


def _named(name: str) -> Any:
    """A field of `RunConfig` that has another name here."""
    return dataclasses.field(default=None, metadata={"run": name})


@dataclass(frozen=True, kw_only=True)
class Sparta:
    """Sparse gossip at every step (SPARTA, Algorithm 1). None means the run's value, or the default in a new run.

    Attributes:
        fragment_fraction: p, share of the parameters pushed at every inner step; 0 turns gossip off.
        selection: "cyclic", or "fresh" as in the paper.
        codec: "int8" or "fp16".
        schedule: how p changes over time: "fixed", "ramp" or "decay".
        topology: how the receivers of a push are chosen: "push", "pairs", "groups" or "all".
        fan_out: number of peers that each fragment is pushed to.
        delay: steps to hold a fragment before it is sent.
        max_staleness: fragments with p · delay above this are discarded; 0 keeps all.
    """

    fragment_fraction: float | None = None
    selection: str | None = _named("fragment_selection")
    codec: str | None = _named("fragment_codec")
    schedule: str | None = _named("fragment_schedule")
    topology: str | None = None
    fan_out: int | None = None
    delay: int | None = _named("fragment_delay")
    max_staleness: float | None = None


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """The outer rounds (DiLoCo, Algorithm 1). None means the run's value, or the default in a new run.

    Attributes:
        sync_every: H, inner steps between rounds.
        sections: sections of the model, of which each round averages one; each is averaged every `sections` · H steps.
        sync_schedule: "fixed"; "grow" or "shrink" change H over a run that has a length.
        averaging: "parts", each peer averages one part; "gather", every peer averages everything; or
            "pairwise", random pairs average (NoLoCo), and peers are close, not equal. The last takes other defaults
            of the outer optimizer: "sgdm" with 0.7 and 0.5.
        codec: codec of the outer gradients: "int8", "int4", "int2", "fp16", "none" or "topk".
            The last takes other defaults: "gather", the "disjoint" mean, and "sgd" with 1.0 as the outer optimizer.
        density: share of the values that "topk" sends.
        prune_fraction: share of the values that "int8" leaves out, by sign.
        weights: how outer gradients are weighted: by "tokens", "equal", or by size of the "shard".
        mean: "weighted", "disjoint"; or "clipped", "trimmed" or "geometric", which tolerate a minority of liars.
        guard: what rounds do with far too large outer gradients: "exclude", "clip" or "off". In a new
            run with `run_key` or `allow` the default is "clip".
        audit_rate: fraction of rounds in which one reducer's work is checked.
        inner_moments: "local"; or "averaged", with codec "none": rounds also average the moments of the optimizer.
        outer_optimizer: "nesterov", "sgdm", "sgd" or "adam".
        outer_lr: learning rate of the outer step.
        outer_lr_schedule: "constant" or "cosine".
        outer_momentum: momentum of the outer step.
        max_contributors: most peers that contribute to a round; larger swarms draw them.
        max_missed_rounds: rounds in a row that a peer may miss before it adopts the anchor.
        round_timeout_s: longest time of an attempt at a round; shorter timeouts are derived from measurements.
    """

    sync_every: int | None = None
    sections: int | None = _named("round_sections")
    sync_schedule: str | None = None
    averaging: str | None = None
    codec: str | None = _named("round_codec")
    density: float | None = _named("round_density")
    prune_fraction: float | None = None
    weights: str | None = _named("round_weights")
    mean: str | None = _named("round_mean")
    guard: str | None = _named("round_guard")
    audit_rate: float | None = None
    inner_moments: str | None = None
    outer_optimizer: str | None = None
    outer_lr: float | None = None
    outer_lr_schedule: str | None = None
    outer_momentum: float | None = None
    max_contributors: int | None = None
    max_missed_rounds: int | None = None
    round_timeout_s: float | None = None


def join(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    run_id: str = "p2ptrain",
    initial_peers: Sequence[str] | Literal["lan"] = (),
    founder: str = "",
    anchor: str = "",
    sparta: Sparta | None = None,
    diloco: DiLoCo | None = None,
    total_steps: int | None = None,
    run_seed: int | None = None,
    identity: str | Path | None = None,
    host_maddrs: Sequence[str] = NetworkConfig.host_maddrs,
    announce_maddrs: Sequence[str] = (),
    lan: str = NetworkConfig.lan,
    peer_timeout_s: float = NetworkConfig.peer_timeout_s,
    gossip_budget: float = NetworkConfig.gossip_budget,
    bulk: str = NetworkConfig.bulk,
    bulk_port: int = NetworkConfig.bulk_port,
    worker_threads: int = PeerConfig.worker_threads,
    run_key: str | Path | None = None,
    allow: str | Path | None = None,
    deny: str | Path | None = None,
    metrics: str | Path | None = None,
    prometheus: int | str | None = None,
    dashboard: int | str | None = None,
    resume: dict[str, Any] | None = None,
    on_status: Callable[[str], None] | None = None,
    process_group: ProcessGroup | None = None,
) -> Peer | GroupPeer:
    """Join a run with a model of your own. Start it if no peer of it is found, or no initial peers are given.

    Blocks until the model has the run's state. Without initial peers that takes a second or two. With them: at most
    25 s to reach one, 5 s to find the run, and then as long as the download of its state takes (the parameters' fp32
    bytes, twice with an outer optimizer's moment). It gives up after 120 s without progress. `on_status` reports the
    progress, and Ctrl-C ends it.

    Trainable parameters are exchanged, tied ones once. Frozen parameters must be equal on all peers. Persistent buffers
    are downloaded when joining and stay local after that. Parameters may be of any float type and on any device. Their
    storage is never replaced, so optimizers, AMP and torch.compile that were set up before keep working.

    Args:
        model: overwritten with the run's weights when joining a live run.
        optimizer: the inner optimizer; needed only with `DiLoCo(inner_moments="averaged")`.
        run_id: name of the run.
        initial_peers: addresses (`peer.maddrs`) of any peers of the run, or of a bootstrap node. "lan": look for an
            open run of this name on the local network, for two seconds.
        founder: id of the peer that must have founded the run; "" for any.
        anchor: hash of a record that the run's history must contain (a `record_sha256` of its metrics); "" for any.
        sparta: gossip settings; a joiner may leave them out and adopts the run's.
        diloco: round settings; a joiner may leave them out and adopts the run's.
        total_steps: length of the run in inner steps; it ends with one plain average. None: the run's, or no end.
        run_seed: seeds the fragment partition; all peers of a run share it.
        identity: key file that keeps this peer's id over restarts; created if missing.
        host_maddrs: addresses to listen on.
        announce_maddrs: addresses that other peers should dial, for example with port forwarding.
        lan: announce the run on the local network. "auto": open runs, but not in a container; "on": always, of a closed
            run only that there is one; "off": never.
        peer_timeout_s: longest time without a message before a peer is considered lost; shorter timeouts are derived
            from measurements.
        gossip_budget: share of this machine's CPU time that gossip may take. Where pushes at every step cost more,
            there are fewer.
        bulk: "on": TLS connections beside libp2p's for rounds and state, where peers can dial each other; or "off".
        bulk_port: TCP port for them; 0 for any free one.
        worker_threads: threads that encode, average and hash in rounds; 0: half of the cores, at most 8.
        run_key: key file of a closed run, made by `p2ptrain key`; None: the run is open.
        allow: file of the only peer ids to link with, one per line; read again when it changes.
        deny: file of peer ids to refuse, one per line; read again when it changes.
        metrics: file to append the metrics stream to.
        prometheus: port (on loopback), or "HOST:PORT", for Prometheus metrics; None: do not serve them.
        dashboard: port (on loopback), or "HOST:PORT", for the web page of the run; 0 takes any free port. Its address,
            with a token if other machines can reach it, is `peer.dashboard`. None: do not serve it.
        resume: a `peer.state_dict()` from before a restart. Load your checkpoint into the model and its optimizer
            before you call this. If no peer of the run is found, the settings in the state are used; those given here
            override them.
        on_status: called with a text when the status of the joining peer changes. Exceptions in it are logged.
        process_group: the torch.distributed processes that form this one peer. All of them call this with the same
            arguments. Only rank 0 is on the network, and its arguments are used. The group's timeout must be longer
            than joining takes.

    Returns:
        A `Peer`; with a process group a `GroupPeer`, which has the same methods.

    Raises:
        ConfigError: an argument or the model cannot work, another peer in this process has the model, or the network or
            the run cannot be reached; the message says what to do.
        RunMismatchError: an argument or the model contradicts the run.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer = {optimizer!r}: must be a torch.optim.Optimizer, or left out")
    if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
        raise ConfigError(f"process_group = {process_group!r}: must be a group of torch.distributed")
    if initial_peers is None or (isinstance(initial_peers, str) and initial_peers != "lan"):
        raise ConfigError(
            f"initial_peers = {shortened(initial_peers)}: must be a list of addresses ([] for none), or 'lan'; put a "
            "single address in [ ]"
        )
    for name, listed in (("host_maddrs", host_maddrs), ("announce_maddrs", announce_maddrs)):
        if isinstance(listed, str):
            raise ConfigError(f"{name} = {shortened(listed)}: must be a list of addresses; put a single one in [ ]")
    if not isinstance(sparta, Sparta | None):
        raise ConfigError(f"sparta = {sparta!r}: must be p2ptrain.Sparta(fragment_fraction=…), or left out")
    if not isinstance(diloco, DiLoCo | None):
        raise ConfigError(f"diloco = {diloco!r}: must be p2ptrain.DiLoCo(sync_every=…), or left out")
    explicit: dict[str, Any] = {"run_id": run_id, "total_steps": total_steps, "run_seed": run_seed}
    for part in (sparta or Sparta(), diloco or DiLoCo()):
        for field in dataclasses.fields(part):
            explicit[field.metadata.get("run", field.name)] = getattr(part, field.name)
    explicit = {name: value for name, value in explicit.items() if value is not None}
    # Refuse bad values before the network is opened. A joiner's need not go together with the defaults.
    if initial_peers:
        RunConfig.checked(explicit)
    else:
        resolve_run(explicit, None)
    if isinstance(model, DistributedDataParallel):
        if process_group is None:
            raise ConfigError(
                "model is a DistributedDataParallel: give process_group=, or the model inside it, model.module"
            )
        model = model.module

    def enter(ours: ModelParts) -> Peer:
        with ExitStack() as failing:
            sinks = [] if prometheus is None else [failing.enter_context(closing(PrometheusSink(str(prometheus))))]
            show = None if dashboard is None else _take_port(str(dashboard), failing)
            key = None
            if run_key is not None:
                key = read_key(user_path(run_key))
                warn_if_shared(user_path(run_key))
            if initial_peers == "lan":
                if run_key is not None or lan not in ("auto", "on"):
                    raise ConfigError(
                        "initial_peers = 'lan': finds open runs, where lan is 'auto' or 'on'; give addresses, or leave "
                        "out run_key and lan"
                    )
                peers, pinned_to = _find_on_lan(run_id, founder, host_maddrs)
            else:
                peers, pinned_to = tuple(initial_peers), founder
            network = NetworkConfig(
                initial_peers=peers,
                founder=pinned_to,
                anchor=anchor,
                host_maddrs=tuple(host_maddrs),
                announce_maddrs=tuple(announce_maddrs),
                lan=lan,
                identity=None if identity is None else str(identity),
                peer_timeout_s=peer_timeout_s,
                gossip_budget=gossip_budget,
                allow=None if allow is None else str(allow),
                bulk=bulk,
                bulk_port=bulk_port,
                deny=None if deny is None else str(deny),
                run_key=None if run_key is None else str(run_key),
                key=key,
            )
            PeerConfig(worker_threads=worker_threads)  # checks it
            Access(network).check_allowed(network.initial_peers)
            session = failing.enter_context(NetworkSession(network))
            saved = None if resume is None else saved_run(resume)
            known = saved if saved is not None and saved.run_id == run_id else None
            found = session.find_run(run_id, explicit=explicit, ours=known) if peers else None
            if initial_peers and found is None and resume is None:
                logger.warning("%s", nobody_found(run_id, "run_id="))
            if found is None and known is not None:
                # A peer that comes back alone goes on with the settings that it had joined with.
                run = RunConfig.from_dict(known.to_dict() | explicit)
            else:
                run = resolve_run(explicit, found, is_closed=is_closed(network))
            if process_group is not None and run.inner_moments == "averaged":
                raise ConfigError(
                    "inner_moments = 'averaged': is not supported with a process group; leave process_group out, or "
                    "join a run with inner_moments = 'local'"
                )
            if found is None and known is None and total_steps is None:
                run = dataclasses.replace(run, total_steps=0)
            peer = session.enter(
                ours,
                run,
                optimizer=optimizer,
                metrics=None if metrics is None else Path(metrics),
                sinks=sinks,
                resume_state=resume,
                worker_threads=worker_threads,
                on_status=on_status,
            )
            failing.callback(peer.leave, "could not join")
            if show is not None:
                peer.dashboard = show(peer)
                logger.info("run %r is shown at %s", run.run_id, peer.dashboard)
            peer.on_leave(failing.pop_all().close)  # from here on the peer closes them
        return peer

    try:
        if process_group is not None:
            return GroupPeer(model, process_group, enter, device=device_of(process_group, model))
        return enter(ModelParts(model))
    except ConfigError as error:
        # Its way here, through the tasks of the network thread, says nothing to the caller and fills a screen.
        raise error.with_traceback(None) from None


def _find_on_lan(run_id: str, founder: str, host_maddrs: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Addresses and founder of the run of this name on the local network; neither if there is none.

    Raises ConfigError if there are several.
    """
    runs = matching(runs_of(look(hosts_of(host_maddrs))), run_id, founder)
    if len(runs) > 1:
        founders = ", ".join(run.founder for run in runs)
        raise ConfigError(
            f"initial_peers = 'lan': found {len(runs)} runs named {run_id!r}; give founder= one of {founders}, or "
            "addresses"
        )
    return (runs[0].addresses, runs[0].founder or founder) if runs else ((), founder)


def _take_port(endpoint: str, stack: ExitStack) -> Callable[[Peer], str]:
    require_extra("dashboard", f"dashboard = {endpoint!r}")
    from p2ptrain.monitor.dashboard.serve import take_port

    return take_port(endpoint, PageConfig(), stack)
