"""The settings that are one machine's own business: its network, its pages, its training. They never leave it.

What a run agrees on is in `config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.settings.config_rules import check, check_choice, check_count, check_positive, is_finite
from p2ptrain.settings.endpoint import parse_endpoint
from p2ptrain.settings.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """How this machine meets the network. See libp2p's multiaddr notation for addresses.

    Attributes:
        initial_peers: multiaddrs of peers or bootstrap nodes to join through; empty to start a new swarm.
        remembered_peers: multiaddrs of peers met before, to join through as well. The user did not choose them, so
            nothing that they answer keeps this peer from starting.
        host_maddrs: addresses to listen on.
        announce_maddrs: addresses to tell others instead of those found out (behind port forwarding, in containers).
        identity: file with this peer's private key, made when missing; None for a new identity at each start.
        startup_timeout_s: how long the libp2p daemon may take to start.
        peer_timeout_s: the longest that a silent peer counts as there. It is lost sooner where its link used to be
            quick: this is the upper bound of what is learnt.
        relay_peers: peers behind NAT that may be reached through this machine, if it has a public address; 0 for none.
    """

    # Without anybody to join, a new run starts.
    initial_peers: tuple[str, ...] = ()
    # `p2ptrain join` keeps them in its directory.
    remembered_peers: tuple[str, ...] = ()
    # All interfaces: others on the network are to reach us. Port 0: any free one.
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    # The addresses of this machine's network cards, and what others see, are told unasked.
    announce_maddrs: tuple[str, ...] = ()
    # With the rest of what this peer keeps, so that the same command again is the same peer.
    identity: str | None = None
    # hivemind's 15 s is too short on busy machines (a known complaint); errors are due within 30 s.
    startup_timeout_s: float = 25.0
    # Half a minute: a laptop that swaps or a route that changes is back by then (guess).
    peer_timeout_s: float = 30.0
    # Each circuit takes up to 2 MB of buffers here, and what it carries comes in and goes out (guess).
    relay_peers: int = 32

    def __post_init__(self) -> None:
        check(len(self.host_maddrs) > 0, "host_maddrs", self.host_maddrs, "at least one address to listen on")
        check_positive("startup_timeout_s", self.startup_timeout_s)
        check(
            is_finite(self.peer_timeout_s) and self.peer_timeout_s >= 3,
            "peer_timeout_s", self.peer_timeout_s, "at least 3 (a peer shows life every second)",
        )  # fmt: skip
        check_count("relay_peers", self.relay_peers, 0)


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """Where this machine serves the page that shows the run.

    Attributes:
        host: address or name to serve on.
        port: TCP port to serve on; 0 for any free one.
        page_names: names under which browsers may ask for the page, beside addresses and localhost.
    """

    # Whoever can reach the page sees the run: that is for the user to decide.
    host: str = "127.0.0.1"
    # Where people look for a page of their own machine.
    port: int = 8080
    # Addresses and localhost are enough, and a page of somebody else's cannot be asked for under its name.
    page_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "from 0 to 65535 (0: any free one)")


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """This machine's own business: nothing here has to be equal on another peer.

    Attributes:
        network: how this machine meets the others.
        preset: name of the settings that a run founded here takes where the user gives none; see `presets.py`.
        data: "stdlib", or the path of a text file or of a directory of text files.
        init_from: checkpoint directory or .safetensors file with the first weights of a run that is founded here.
        batch_size: windows of text per inner step.
        device: "auto" (a GPU when torch sees one), or a torch device such as "cpu" or "cuda:1".
        threads: CPU threads for torch; 0 leaves the choice to torch.
        out: directory for identity, metrics and checkpoints; None for `p2ptrain-<run id>`.
        metrics: file that gets one JSON line per event; None for `metrics.jsonl` in the out directory.
        prometheus: PORT (on loopback) or HOST:PORT to serve figures for Prometheus on; None for nowhere.
        seed: of this peer's stream of training windows; None derives it from the identity.
        shard: the part of the text to train on, in runs that have parts; None chooses one by the identity.
        eval_every: inner steps of the run between two measurements on the held-out text.
        checkpoint_minutes: time between two checkpoints; one more is written when training stops.
        write_addresses: file that gets the addresses of this peer, one a line, for others' `--initial-peers`.
        dashboard: port on which this peer serves the page that shows the run; None for no page.
    """

    network: NetworkConfig = NetworkConfig()
    # The defaults are the demo model's. A paper's are for models of its size.
    preset: str | None = None
    # On every machine that can run this program, and English enough to show a model that learns.
    data: str = "stdlib"
    # Random weights, from run_seed.
    init_from: str | None = None
    # Tuned with the demo model, for one slow core.
    batch_size: int = 4
    # A GPU where torch sees one.
    device: str = "auto"
    # torch takes every core. Where several peers share a machine, 1 each is faster.
    threads: int = 0
    # One directory a run, below the current one; a second peer there takes the next free number.
    out: str | None = None
    # With the rest of what this peer keeps.
    metrics: str | None = None
    # Nothing is served that nobody asked for.
    prometheus: str | None = None
    # Peers differ, and each goes on with its own text after a restart.
    seed: int | None = None
    # As the seed: no two people need agree, though two peers may come to share one.
    shard: int | None = None
    # One evaluation of the demo model takes as long as about six of its steps: 100 keeps it near 5 %. A guess else.
    eval_every: int = 100
    # A guess: ten minutes of one peer's work is little in a swarm, which keeps the weights anyway.
    checkpoint_minutes: float = 10.0
    # For scripts and containers; people copy the line that is printed.
    write_addresses: str | None = None
    # No port is opened unasked.
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
