"""The report at the end of the demo: results, files, and the commands to do the same across machines."""

from __future__ import annotations

import shlex
import socket
import textwrap
from collections import Counter
from pathlib import Path

from p2ptrain.demo.directory import BOOTSTRAP, CURVES, SUMMARY
from p2ptrain.demo.plan import DemoPlan
from p2ptrain.demo.results import Results
from p2ptrain.monitor.formatting import clock, count, size
from p2ptrain.monitor.liveview import REASONS
from p2ptrain.monitor.swarmview import SwarmView

PORT = 4001
WIDTH = 79


def format_report(
    results: Results, swarm: SwarmView, plan: DemoPlan, out: Path, *, bootstrap_id: str, took_s: float
) -> str:
    """The report as plain text. Only its commands are wider than a terminal."""
    sections = [
        _headline(swarm, took_s),
        _losses(results),
        _agreement(results, swarm),
        _traffic(results, plan),
        f"The merged model ({results.parameters:,} weights) writes:\n{_quoted(results.text)}",
        _files(results, out),
        _across_machines(plan, out, bootstrap_id),
    ]
    return "\n\n".join(sections) + "\n"


def _headline(swarm: SwarmView, took_s: float) -> str:
    steps = sum(peer.own_steps for peer in swarm.peers.values())
    return _prose(
        f"Done in {clock(took_s)}: {count(len(swarm.peers), 'peer')} made {steps:,} inner steps in a run of "
        f"{swarm.total_steps:,}."
    )


def _losses(results: Results) -> str:
    lines = ["Held-out loss, nats a character      before the last round     after it"]
    for peer in results.peers:
        before = "" if peer.before is None else f"{peer.before:.3f}"
        lines.append(f"    peer {peer.number}, {peer.steps:>6,} own steps {before:>28} {peer.after:>12.3f}")
    lines.append(f"    merged model {results.merged:>52.3f}")
    return "\n".join(lines)


def _agreement(results: Results, swarm: SwarmView) -> str:
    by_size = Counter(len(round_.contributors) for round_ in swarm.rounds.applied)
    sizes = ", ".join(f"{times} by {count(peers, 'peer')}" for peers, times in sorted(by_size.items(), reverse=True))
    anchors = "the same, bit for bit," if results.same_anchor else "NOT THE SAME"
    lines = [f"Rounds committed: {by_size.total()} ({sizes}); their anchors were {anchors} on all peers."]
    if results.correlation_mean is not None:
        lines.append(
            f"Average pairwise correlation of the weights: {results.correlation_mean:.4f} while training "
            f"(lowest {results.correlation_lowest:.4f}), {results.correlation_end:.4f} at the end."
        )
    skipped = Counter(results.skipped)
    reasons = [f"{number:,} {REASONS.get(reason, reason)}" for reason, number in skipped.most_common()]
    why = f" ({', '.join(reasons)})" if reasons else ""
    lines.append(f"Fragments: {results.merged_fragments:,} merged, {skipped.total():,} skipped{why}.")
    return "\n".join(_prose(line) for line in lines)


def _traffic(results: Results, plan: DemoPlan) -> str:
    traffic = results.traffic
    sent = traffic.fragments + traffic.rounds
    return _prose(
        f"Payload sent per step and peer: {size(sent)} (fragments {size(traffic.fragments)}, rounds "
        f"{size(traffic.rounds)}). Dense data-parallel training would send {size(traffic.dense)}, "
        f"{traffic.dense / sent:,.0f} times as much, and wait for it: ring all-reduce of fp32 gradients at "
        f"every step, 2(k−1)/k · 4N bytes with k = {plan.peers} peers and N = {results.parameters:,} weights."
    )


def _files(results: Results, out: Path) -> str:
    lines = {
        out / CURVES: "losses and correlation",
        results.checkpoint: "the merged model, for p2ptrain generate",
        out / SUMMARY: "this report",
        out / "peer-*": "log, metrics and checkpoint of each peer",
    }
    width = max(len(str(path)) for path in lines)
    return "Written:\n" + "\n".join(f"    {path!s:<{width}}  {what}" for path, what in lines.items())


def _across_machines(plan: DemoPlan, out: Path, bootstrap_id: str) -> str:
    identity = out / BOOTSTRAP / "identity.key"
    address = f"/ip4/{lan_address()}/tcp/{PORT}/p2p/{bootstrap_id}"
    bootstrap = ["p2ptrain", "bootstrap", "--host-maddrs", f"/ip4/0.0.0.0/tcp/{PORT}", "--identity", str(identity)]
    join = ["p2ptrain", "join", "--initial-peers", address, *plan.run_flags]
    return (
        f"To do the same across machines, start a bootstrap node on this one:\n\n{shlex.join(bootstrap)}\n\n"
        f"and a peer on each machine, including this one, in another terminal:\n\n{shlex.join(join)}"
    )


def lan_address() -> str:
    """The address of this machine in its network; sends nothing to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; UDP connect only looks up the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _prose(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _quoted(text: str) -> str:
    """Indent; cut lines that are too wide."""
    lines = text.expandtabs(4).splitlines()
    shortened = (line if len(line) <= WIDTH - 4 else f"{line[: WIDTH - 6].rstrip()} …" for line in lines)
    return "\n".join(f"    {line}".rstrip() for line in shortened)
