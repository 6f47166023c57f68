"""The settings of one machine: network, dashboard and training. Settings of a run are in `config`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.settings.peer_id import is_peer_id
from p2ptrain.settings.presets import PRESETS
from p2ptrain.settings.run_key import RunKey
from p2ptrain.settings.setting import (
    FROM_MODEL,
    POSITIVE,
    Rule,
    check,
    check_settings,
    choice,
    count,
    number,
    setting,
    text,
)

# Where this machine listens if the user gives no host: other machines cannot connect.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def default_dir(run_id: str) -> Path:
    """The output directory of a peer whose user named none, in the current one."""
    return Path(f"p2ptrain-{run_id}")


def parse_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Host and port of `PORT` (on loopback), `HOST:PORT` or `[IPV6]:PORT`; None if malformed. Port 0: any free one."""
    host, found, port = endpoint.rpartition(":")
    if found and not host:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or not host.isprintable() or " " in host:
        return None
    if not (port.isascii() and port.isdecimal()) or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        return None
    return host or LOOPBACK, int(port)


PORT = Rule("from 0 to 65535 (0: any free one)", lambda port: type(port) is int and 0 <= port <= MAX_PORT, example=8080)
ENDPOINT = Rule(
    "PORT or HOST:PORT, such as 9100 or 0.0.0.0:9100, with a port from 0 to 65535",
    lambda endpoint: isinstance(endpoint, str) and parse_endpoint(endpoint) is not None,
    is_int_allowed=True,
)
MICRO_BATCH = Rule(
    "auto, or a number of windows, 1 or more",
    lambda given: given == "auto" or (isinstance(given, str) and re.fullmatch(r"[1-9]\d{0,6}", given) is not None),
    is_int_allowed=True,
)
PEER_ID = text("a whole peer id, as `p2ptrain peers` shows it", lambda peer: not peer or is_peer_id(peer))
SHA256 = text("64 hexadecimal digits", lambda digest: re.fullmatch(r"[0-9a-fA-F]{64}|", digest) is not None)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Network settings of this machine. Addresses are libp2p multiaddrs."""

    # fmt: off
    initial_peers: tuple[str, ...] = setting((), metavar="ADDRESS|FILE",
        help="Address of a peer of the run, or a file of addresses; repeatable.",
        why="Without initial peers a new run starts.")
    founder: str = setting("", PEER_ID, metavar="PEER_ID",
        help="Join only the run that this peer founded.",
        why="A first join trusts its initial peers. `p2ptrain join` prints the founder's id.")
    anchor: str = setting("", SHA256, metavar="SHA256",
        help="Join only a run with this record in its history.",
        why="As the founder, for a run that you have seen before: a record_sha256 of your metrics.")
    # Addresses of earlier peers, which `p2ptrain join` keeps in its output directory. They are also used to join, but
    # the user did not choose them, so their answers cannot prevent a start.
    remembered_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = setting(("/ip4/0.0.0.0/tcp/0",), Rule("at least one address to listen on", bool),
        metavar="ADDRESS", help="Address to listen on; repeatable.",
        why="All interfaces, so that other machines can connect. Port 0: any free one.")
    lan: str = setting("auto", choice("auto", "on", "off", "join"),
        help="Announce and find runs on the local network; join: do not ask.",
        why="Open runs are announced by peers that listen on a private address, but not in containers. on: in "
        "containers too, and that there is a closed run, without its name. join: join the run that is found.")
    announce_maddrs: tuple[str, ...] = setting((), metavar="ADDRESS",
        help="Address to announce (port forwarding); repeatable.",
        why="Addresses of this machine's network cards, and those seen by other peers, are announced by default.")
    identity: str | None = setting(None, metavar="FILE",
        default_text="for join identity.key in its output directory, else a new key",
        help="Private key file, created if missing.",
        why="Stored in the output directory, so that the same command is the same peer again.")
    startup_timeout_s: float = setting(25.0, POSITIVE, metavar="SECONDS",
        help="Time limit for the libp2p daemon to start.",
        why="hivemind's 15 s is too short on busy machines (a known complaint); errors are due within 30 s.")
    peer_timeout_s: float = setting(30.0,
        number("at least 3 (a peer with few links sends a heartbeat every second)", lambda seconds: seconds >= 3),
        metavar="SECONDS",
        help="Longest silence before a peer is considered lost; 10 s if its heartbeats are frequent.",
        why="Enough for a laptop that swaps or a route that changes (guess). "
        "A peer with many links sends heartbeats more rarely, and may be silent for three of its intervals.")
    gossip_budget: float = setting(0.02, number("above 0 and at most 1, all cores", lambda share: 0 < share <= 1),
        metavar="SHARE",
        help="Share of this machine's CPU time that gossip may take; less: fewer pushes.",
        why="Where every core is busy, what gossip takes is lost to training: 1.7 to 3.4 % were measured with models "
        "of 25M and 124M parameters, 4.5 to 6 % with steps of 4 ms or less. With eight cores or more, gossip "
        "hardly ever needs as much, and pushes at every step.")
    relay_peers: int = setting(32, count(0),
        help="Peers behind NAT to relay traffic for; 0 for none.",
        why="Each circuit takes up to 2 MB of buffers, and its traffic passes twice (guess). Used only with a public "
        "address that others can dial.")
    relay_mbit: float = setting(100.0, POSITIVE, metavar="MBIT",
        help="Limit of relayed Mbit/s, a pair gets 1/4; off: --relay-peers 0.",
        why="A stranger may use a relay too. 100 Mbit/s leave most of a server's line free, and carry fragments of a "
        "dozen peers at 1 MB a second each. 25 for one pair carry a round of 124M parameters in int8 in 80 s.")
    bulk: str = setting("on", choice("on", "off"),
        help="Direct TLS connections for rounds and state: on or off.",
        why="libp2p's daemon carries less than one TLS connection does, for more CPU time. Where peers cannot dial "
        "each other, it carries all.")
    bulk_port: int = setting(0, PORT, metavar="PORT",
        help="TCP port for direct connections; 0 for any free one.",
        why="Peers learn it from each other. Behind a firewall, open it beside the port of --host-maddrs.")
    allow: str | None = setting(None, metavar="FILE",
        help="File of the only peer ids to link with, one per line.",
        why="Everybody who knows the run, and its key if it has one, may link. The file is read again when it changes.")
    deny: str | None = setting(None, metavar="FILE",
        help="File of peer ids to refuse, one per line.",
        why="For peers that do harm: strikes expire after ten minutes, this list does not. It is read again when it "
        "changes.")
    run_key: str | None = setting(None, metavar="FILE",
        help="Key file of a closed run, made by p2ptrain key.",
        why="A run is open by default: whoever knows an address and the run id can join it.")
    write_addresses: str | None = setting(None, metavar="FILE",
        help="File to write this peer's addresses to, for --initial-peers.",
        why="For scripts and containers; people copy the printed command.")
    # fmt: on
    # The content of `run_key`, or the key of a ticket.
    key: RunKey | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        is_used = any(maddr.endswith(f"/tcp/{self.bulk_port}") for maddr in self.host_maddrs)
        check(
            not (self.bulk == "on" and self.bulk_port and is_used),
            "bulk_port",
            self.bulk_port,
            "another one than that of host_maddrs",
        )

    @property
    def without_bulk(self) -> NetworkConfig:
        """These settings for a process that does not train, to which no peer opens bulk connections."""
        return dataclasses.replace(self, bulk="off")

    @property
    def key_file(self) -> str | None:
        """The run key's file, for printed commands; a placeholder if the key came with a ticket."""
        return self.run_key or ("FILE" if self.key is not None else None)


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """Where this machine serves the dashboard."""

    # fmt: off
    host: str = setting(LOOPBACK, metavar="ADDRESS",
        help="Address to serve the page on; 0.0.0.0 for all networks.",
        why="Other machines are not allowed by default. Beyond this machine the page needs the token that is printed.")
    port: int = setting(8080, PORT, metavar="PORT",
        help="Port to serve the page on; 0 for any free one.",
        why="A usual port for local pages.")
    page_names: tuple[str, ...] = setting((),
        help="Host name to accept in browsers' requests; repeatable.",
        why="Addresses and localhost are enough; other names are refused, which prevents DNS rebinding.")
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Settings of this machine, which may differ from peer to peer."""

    # fmt: off
    network: NetworkConfig = NetworkConfig()
    preset: str | None = setting(None, choice(*PRESETS), metavar="NAME",
        help=f"A paper's settings as defaults of a new run: {', '.join(PRESETS)}.",
        why="None: learning rate, length and H follow from the model. A preset has the paper's other settings, too.")
    data: str = setting("stdlib", metavar="stdlib|FILE|DIR", names=("stdlib",),
        help="Training text, or token files (train.bin, prepared).",
        why="The source of Python's library is available wherever Python is, and English enough to show that a model "
        "learns.")
    tokenizer: str | None = setting(None, metavar="NAME", names=("chars", "bytes"),
        default_text="that of --data, else chars",
        help="chars, bytes, FILE.json, hub:NAME, train:N or ids:N.",
        why="Characters need no file. Peers of a run share the tokenizer, and joiners get it from the others.")
    init_from: str | None = setting(None, metavar="DIR|FILE",
        help="Initial weights of a new run: checkpoint or .safetensors file.",
        why="Random weights, from run_seed.")
    batch_tokens: int | None = setting(None, count(1), default_text=FROM_MODEL, metavar="N",
        help="Tokens of this peer in an inner step, rounded to windows.",
        why="256 for the demo model, tuned for one slow core. 65,536 for GPT-2: an eighth of nanoGPT's half million, "
        "which eight peers then have together. DiLoCo gives each replica half a million.")
    micro_batch: str = setting("auto", MICRO_BATCH, metavar="N|auto",
        help="Windows at once; the gradients of a step are added up.",
        why="auto: all of a step, and half as many each time that memory does not suffice. A CPU's memory cannot be "
        "tried out, as the system kills a process that takes too much: there auto begins with as many windows as take "
        "about a gigabyte, or a quarter of what is free.")
    dtype: str = setting("auto", choice("auto", "float32", "bfloat16"),
        help="Precision of matrix products; weights stay float32.",
        why="bfloat16 on GPUs that have it; CPUs mostly emulate it slowly.")
    compile: str = setting("off", choice("off", "on"),
        help="Compile the model with torch.compile.",
        why="Off: the first step then takes a minute or more. On a GPU it is worth it in long runs.")
    fsdp: str = setting("off", choice("off", "on"),
        help="Shard the model over the processes of torchrun (FSDP2).",
        why="Off: each process holds the whole model, which is faster where it fits.")
    device: str = setting("auto", metavar="DEVICE", names=("auto", "cpu", "cuda", "mps"),
        help="Device to train on: auto, cpu, cuda, cuda:1, mps.",
        why="A GPU where torch sees one.")
    threads: int = setting(0, count(0, "(0: torch decides)"),
        help="CPU threads for torch; 0 for torch's own default.",
        why="torch takes every core. When several peers share a machine, 1 each is faster.")
    worker_threads: int = setting(0, count(0, "(0: half of the cores, at most 8)"),
        default_text="half of the cores, at most 8",
        help="Threads that encode, average and hash in rounds.",
        why="Training uses all cores, and these threads have a lower priority. Results have the same bits with any "
        "number of them.")
    out: str | None = setting(None, metavar="DIR", default_text="p2ptrain-<run id>",
        help="Directory for key, metrics, checkpoints.",
        why="One directory per run, in the current directory; a second peer takes the next free number.")
    metrics: str | None = setting(None, metavar="FILE", default_text="metrics.jsonl in --out",
        help="File of events, as JSON lines.",
        why="Beside the checkpoints.")
    prometheus: str | None = setting(None, ENDPOINT, metavar="[HOST:]PORT",
        help=f"Serve Prometheus metrics there; HOST defaults to {LOOPBACK}.",
        why="No port is opened by default.")
    log: str | None = setting(None, choice("tensorboard", "wandb", "trackio"),
        help="Tracker for this peer's figures and the swarm's.",
        why="None: the metrics file has them all. Each needs its extra, such as pip install 'p2ptrain[wandb]'.")
    sample_every: int = setting(0, count(0, "(0: never)"),
        help="Steps between two texts that the model writes; 0 for none.",
        why="Off: a text of 100 tokens takes as long as some dozens of the demo model's steps.")
    seed: int | None = setting(None, count(0), default_text="from its identity",
        help="Seed of this peer's text sampling.",
        why="Different on each peer, and the same after a restart.")
    shard: int | None = setting(None, count(0), default_text="from its identity",
        help="Text shard to train on, from 0.",
        why="As the seed: needs no coordination, though two peers may get the same shard.")
    eval_every: int | None = setting(None, count(1), default_text=FROM_MODEL,
        help="Steps between two evaluations on held-out text.",
        why="100 for the demo model: an evaluation takes about six of its steps, so about 5 % of the time. 500 for "
        "models of more than 50M parameters and those of transformers, 100 for other models.")
    eval_tokens: int | None = setting(None, count(1), default_text=FROM_MODEL, metavar="N",
        help="Held-out tokens to evaluate on, rounded to windows.",
        why="As many as 16 inner steps of the model train on (4096 for the demo's, a million for GPT-2), which costs "
        "about 5 % at an eval_every of 100; all held-out text if that is less. The same windows each time, and on "
        "each peer with this number and the same held-out text.")
    checkpoint_minutes: float = setting(10.0, POSITIVE, metavar="MINUTES",
        help="Minutes between two checkpoints.",
        why="A guess: a swarm keeps the weights anyway, so one peer risks little. One more is written at the end.")
    dashboard: str | None = setting(None, ENDPOINT, metavar="[HOST:]PORT",
        help=f"Serve the run's dashboard there; HOST defaults to {LOOPBACK}.",
        why="No port is opened by default.")
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
