"""The settings of one machine: network, dashboard and training. Settings of a run are in `config`."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.settings.config_rules import check, check_choice, check_count, check_number, check_positive
from p2ptrain.settings.endpoint import parse_endpoint
from p2ptrain.settings.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Network settings of this machine; described in `table.py`. Addresses are libp2p multiaddrs.

    Attributes:
        initial_peers: multiaddrs of peers or bootstrap nodes to join through; empty to start a new swarm.
        remembered_peers: multiaddrs of earlier peers, also used to join. The user did not choose them, so their
            answers cannot prevent a start.
        announce_maddrs: addresses to announce instead of the detected ones (port forwarding, containers).
        identity: None for a new identity at each start.
        peer_timeout_s: seconds without a message before a peer is considered lost; less on usually quick links.
        relay_peers: used only if this machine has a public address.
    """

    # Without initial peers a new run starts.
    initial_peers: tuple[str, ...] = ()
    # `p2ptrain join` stores them in its output directory.
    remembered_peers: tuple[str, ...] = ()
    # All interfaces, so that other machines can connect. Port 0: any free one.
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    # Addresses of this machine's network cards, and those seen by other peers, are announced by default.
    announce_maddrs: tuple[str, ...] = ()
    # Stored in the output directory, so that the same command is the same peer again.
    identity: str | None = None
    # hivemind's 15 s is too short on busy machines (a known complaint); errors are due within 30 s.
    startup_timeout_s: float = 25.0
    # Enough for a laptop that swaps or a route that changes (guess).
    peer_timeout_s: float = 30.0
    # Each circuit takes up to 2 MB of buffers, and its traffic passes twice (guess).
    relay_peers: int = 32

    def __post_init__(self) -> None:
        check(len(self.host_maddrs) > 0, "host_maddrs", self.host_maddrs, "at least one address to listen on")
        check_positive("startup_timeout_s", self.startup_timeout_s)
        check_number(
            "peer_timeout_s", self.peer_timeout_s, lambda x: x >= 3, "at least 3 (peers send a heartbeat every second)"
        )
        check_count("relay_peers", self.relay_peers, 0)


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """Where this machine serves the dashboard; described in `table.py`."""

    # Everyone who can reach the page sees the run, so other machines are not allowed by default.
    host: str = "127.0.0.1"
    # A usual port for local pages.
    port: int = 8080
    # Addresses and localhost are enough; other names are refused, which prevents DNS rebinding.
    page_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "from 0 to 65535 (0: any free one)")


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Settings of this machine, which may differ from peer to peer; described in `table.py`.

    Attributes:
        data: "stdlib", or the path of a text file or of a directory of text files.
        device: "auto" (a GPU when torch sees one), or a torch device such as "cpu" or "cuda:1".
        out: None for `p2ptrain-<run id>`.
        metrics: None for `metrics.jsonl` in the output directory.
        prometheus: PORT (on loopback) or HOST:PORT; None for no server.
        seed, shard: None derives them from the identity.
        checkpoint_minutes: time between two checkpoints; one more is written when training stops.
        dashboard: None for no dashboard.
    """

    network: NetworkConfig = NetworkConfig()
    # The defaults fit the demo model. Presets fit a paper's model.
    preset: str | None = None
    # Available wherever Python is, and English enough to show that a model learns.
    data: str = "stdlib"
    # Random weights, from run_seed.
    init_from: str | None = None
    # Tuned with the demo model, for one slow core.
    batch_size: int = 4
    # A GPU where torch sees one.
    device: str = "auto"
    # torch takes every core. When several peers share a machine, 1 each is faster.
    threads: int = 0
    # One directory per run, in the current directory; a second peer takes the next free number.
    out: str | None = None
    # Stored in the output directory.
    metrics: str | None = None
    # No port is opened by default.
    prometheus: str | None = None
    # Different on each peer, and the same after a restart.
    seed: int | None = None
    # As the seed: needs no coordination, though two peers may get the same shard.
    shard: int | None = None
    # An evaluation of the demo model takes about six of its steps, so 100 costs near 5 %. For other models a guess.
    eval_every: int = 100
    # A guess: a swarm keeps the weights anyway, so one peer risks little.
    checkpoint_minutes: float = 10.0
    # For scripts and containers; people copy the printed command.
    write_addresses: str | None = None
    # No port is opened by default.
    dashboard: int | None = None

    def __post_init__(self) -> None:
        if self.preset is not None:
            check_choice("preset", self.preset, tuple(PRESETS))
        check_count("batch_size", self.batch_size, 1)
        check_count("threads", self.threads, 0, "(0: torch decides)")
        check_count("eval_every", self.eval_every, 1)
        check_positive("checkpoint_minutes", self.checkpoint_minutes)
        if self.dashboard is not None:
            check(0 <= self.dashboard < 65536, "dashboard", self.dashboard, "from 0 to 65535 (0: any free one)")
        check(
            self.prometheus is None or parse_endpoint(self.prometheus) is not None,
            "prometheus", self.prometheus, "PORT or HOST:PORT, such as 9100 or 0.0.0.0:9100",
        )  # fmt: skip
        if self.seed is not None:
            check_count("seed", self.seed, 0)
        if self.shard is not None:
            check_count("shard", self.shard, 0)
