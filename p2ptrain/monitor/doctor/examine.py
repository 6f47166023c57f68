"""Run all checks of `p2ptrain doctor`, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from p2ptrain.errors import ConfigError, P2PTrainError
from p2ptrain.monitor.doctor import reach
from p2ptrain.monitor.doctor.finding import Finding, failed, ok
from p2ptrain.monitor.doctor.local import check_machine, read_machine
from p2ptrain.monitor.estimate import vectors_more
from p2ptrain.network.addresses import check_host_maddrs
from p2ptrain.network.probe import Probe, probe
from p2ptrain.network.thread import NetworkThread
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig, default_dir
from p2ptrain.settings.table import Settings

# A router that maps ports (UPnP) answers within seconds.
MAPPING_S = 4.0
# Starting the daemon, dialling, comparing clocks and measuring rates; each has its own shorter limit.
PROBE_TIMEOUT_S = 120.0
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)


def examine(settings: Settings, count_parameters: Callable[[str], int]) -> Iterator[Finding]:
    """Run every check and yield its finding.

    Args:
        settings: as for `p2ptrain join`.
        count_parameters: returns the number of parameters of a model, by name.

    Raises:
        ConfigError: a setting is invalid.
    """
    config = settings.peer_config()
    run_id = str(settings.values["run_id"])
    out = Path(config.out or default_dir(run_id))
    if config.threads:
        torch.set_num_threads(config.threads)
    network, refusal = dataclasses.replace(config.network, identity=None), None
    try:
        check_host_maddrs(network.host_maddrs)
    except ConfigError as error:
        network, refusal = dataclasses.replace(network, host_maddrs=ANY_PORT), error
    found, broken = _look_around(network)
    answering = found is not None and any(peer.answered_s is not None for peer in found.peers)
    run, of_run = _look_at_run(settings, network, run_id) if answering else (None, [])
    model = run.model if run is not None and not settings.explicit("model") else str(settings.values["model"])

    yield from check_machine(
        read_machine(out, device=config.device),
        out=out,
        model=model,
        num_parameters=count_parameters(model) if model else None,
        device=config.device,
        vectors=0 if run is None else vectors_more(run),
    )
    yield reach.check_port(config.network, refusal)
    if found is None:
        assert broken is not None
        yield broken
        return
    yield ok("libp2p daemon", f"p2pd started in {found.started_s:.1f} s")
    yield reach.check_addresses(found.maddrs)
    yield reach.check_reachable(config.network, found)
    yield from reach.check_initial_peers(found.peers)
    yield from reach.check_interfaces(found.peers)
    yield reach.check_clock(found.peers)
    yield from of_run


def _look_around(network: NetworkConfig) -> tuple[Probe | None, Finding | None]:
    """Probe the network. Returns a finding instead if the daemon does not start."""
    thread = NetworkThread()
    on_loopback = all(reach.kind_of(maddr) is reach.AddressKind.LOOPBACK for maddr in network.host_maddrs)
    mapping_s = 0.0 if on_loopback else MAPPING_S
    try:
        return thread.run(lambda: probe(network, mapping_s=mapping_s), timeout_s=PROBE_TIMEOUT_S), None
    except (P2PTrainError, TimeoutError) as error:
        return None, failed("libp2p daemon", error, "pip install --force-reinstall hivemind")
    finally:
        thread.stop(PROBE_TIMEOUT_S)


def _look_at_run(settings: Settings, network: NetworkConfig, run_id: str) -> tuple[RunConfig | None, list[Finding]]:
    """Find the run's settings, and check whether this peer could join it and how its peers reach each other."""
    from p2ptrain.peer.session import NetworkSession

    try:
        with NetworkSession(network.without_bulk) as session:
            run = session.find_run(run_id)
            members = session.members(run_id) if run else []
    except ConfigError as error:  # a wrong clock; check_clock reports it too
        return None, [failed("run", error)]
    try:
        settings.resolve_run(run)
    except ConfigError as error:
        return run, [failed("run", error)]
    return run, [reach.check_run(run_id, run, len(members)), *reach.check_ways(members)]
