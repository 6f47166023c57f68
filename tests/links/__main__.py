"""`python -m tests.links`: four peers on links of several rates, on links that are cut, and on ones that lose packets;
prints a table of what it did to training and rounds. Takes about 20 minutes. Exits with 1 where a promise was broken.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import wan
from benchmarks.namespaces import Machine, Wires, why_not, wires
from tests.links.peers import MODEL, fragments, join_all, losses, memory_mib, step_s, wait_for_rounds
from tests.swarm.processes import Process, Swarm, assert_anchors_agree

# Fragments of 14 kB, 20 a second: 2.2 Mbit/s, more than the slowest link carries. Rounds are due every 12 s.
RUN = f"{MODEL} --steps 0 --sync-every 300 --fragment-fraction 0.05 --eval-every 1000"
WATCH_S = 45.0
# A fragment is smaller than what a connection carries that loses 5 % of its packets. Rounds there take 5 to 8 s.
FAR_RUN = f"{MODEL} --steps 0 --sync-every 300 --fragment-fraction 0.005 --eval-every 1000"
FAR_WATCH_S = 120.0
# Longer than the 10 s after which a silent peer is lost here.
CUT_S = 25.0
FAST = 100.0


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        mbit: the rates of the four links.
        cut: how many of the four are parted from the others for a while.
        far: the links of machines that are far apart, as `wan.c` takes them; "" for machines at one switch.
    """

    name: str
    mbit: tuple[float, ...] = ()
    cut: int = 0
    far: str = ""


CASES = [
    *(Case(f"all at {rate:g} Mbit/s", (rate,) * 4) for rate in (1000.0, 100.0, 10.0, 2.0)),
    Case("one at 2, three at 100 Mbit/s", (FAST, FAST, FAST, 2.0)),
    Case(f"one of four cut off for {CUT_S:.0f} s", (FAST,) * 4, cut=1),
    Case(f"two of four cut off for {CUT_S:.0f} s", (FAST,) * 4, cut=2),
    # A packet passes two accesses: twice 2.53 % are 5 %, and twice 75 ms one way.
    Case("far: 20 Mbit/s, 4 ms", far="mbit=20,ms=1"),
    Case("far: 20 Mbit/s, 300 ms, 5 % loss", far="mbit=20,ms=75,loss=0.0253"),
]
COLUMNS = (
    "links", "ms a step (slowest peer)", "rounds: committed, skipped", "s a round (median, longest)",
    "in the mean (median)", "fragments shed", "peers lost", "MiB at start, at end (largest)",
)  # fmt: skip


def main() -> None:
    if reason := why_not() or wan.why_not():
        sys.exit(f"not run: {reason}")
    names = sys.argv[1:]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for case in CASES:
        if not names or any(name in case.name for name in names):
            with _machines(case) as machines, tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
                print("| " + " | ".join([case.name, *_run(case, *machines, Path(directory))]) + " |", flush=True)


@contextlib.contextmanager
def _machines(case: Case) -> Iterator[tuple[Wires | None, list[Machine]]]:
    if case.far:
        with wan.wide_area(*(case.far,) * 4) as machines:
            yield None, machines
    else:
        with wires() as net:
            yield net, [net.machine(mbit=mbit) for mbit in case.mbit]


def _run(case: Case, net: Wires | None, machines: Sequence[Machine], directory: Path) -> list[str]:
    for name in ("sockets", "files"):
        (directory / name).mkdir()
    swarm = Swarm(directory / "files", directory / "sockets")
    try:
        peers = join_all(swarm, directory / "peers", machines, FAR_RUN if case.far else RUN)
        wait_for_rounds(swarm, peers, by=len(peers))
        began_s, began_mib = time.time(), max(map(memory_mib, peers))
        if net is not None and case.cut:
            _cut_and_heal(net, swarm, machines, peers, case.cut)
        else:
            _watch(swarm, FAR_WATCH_S if case.far else WATCH_S)
        assert_anchors_agree(*peers)
        if case.far:
            assert all(any(e["status"] != "skipped" for e in p.events("round") if e["t"] > began_s) for p in peers)
            assert not any(losses(peer, began_s) for peer in peers)
        return _columns(peers, began_s, began_mib)
    finally:
        swarm.close()


def _watch(swarm: Swarm, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    swarm.until(lambda: time.monotonic() > ends_s)


def _cut_and_heal(net: Wires, swarm: Swarm, machines: Sequence[Machine], peers: list[Process], count: int) -> None:
    """Part the last peers from the others; all are in one lineage and in one round after it."""
    last = max(event["round"] for peer in peers for event in peer.rounds())
    net.cut(*machines[-count:])
    _watch(swarm, CUT_S)
    swarm.until(lambda: all(losses(peer) for peer in peers))
    net.heal(*machines[-count:])
    wait_for_rounds(swarm, peers, by=len(peers), since=last + 2)
    heads = {peer.rounds()[-1]["lineage"] for peer in peers}
    assert len(heads) == 1, heads


def _columns(peers: Sequence[Process], began_s: float, began_mib: float) -> list[str]:
    rounds = [[e for e in peer.events("round") if e["t"] > began_s] for peer in peers]
    committed = [[e for e in events if e["status"] != "skipped"] for events in rounds]
    walls = [event["wall_s"] for events in committed for event in events if not event["late"]]
    sizes = [event["group_size"] for events in committed for event in events]
    pushed, shed = (sum(counts) for counts in zip(*(fragments(peer, began_s) for peer in peers), strict=True))
    return [
        f"{1000 * max(step_s(peer, began_s) for peer in peers):.0f}",
        f"{_least(committed)}, {max(len(a) - len(c) for a, c in zip(rounds, committed, strict=True))}",
        f"{statistics.median(walls):.1f}, {max(walls):.1f}" if walls else "–",
        f"{statistics.median(sizes):.0f} of {len(peers)}" if sizes else "–",
        f"{shed / max(1, pushed + shed):.0%}",
        str(sum(len(losses(peer, began_s)) for peer in peers)),
        f"{began_mib:.0f}, {max(map(memory_mib, peers)):.0f}",
    ]


def _least(events: Sequence[Sequence[object]]) -> int:
    return min(map(len, events))


if __name__ == "__main__":
    main()
