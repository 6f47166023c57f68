"""Draw the pictures of the documentation: `python docs/pictures/draw.py` (or `make docs`) writes them beside this file.

Each function returns one SVG. The picture of the layers is drawn from the list in tests/test_layers.py.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, QUIET, LINE, PAPER = "#1f2933", "#616e7c", "#cbd2d9", "#ffffff"
BLUE, ORANGE, GREEN, RED, VIOLET = "#1f6feb", "#c2570c", "#1a7f37", "#c62828", "#7c3aed"
TINT = {BLUE: "#e7f0ff", ORANGE: "#fdeee1", GREEN: "#e4f5e8", RED: "#fdeaea", VIOLET: "#f1eafe"}
COLOURS = (BLUE, ORANGE, GREEN, VIOLET)


class Drawing:
    """Collects shapes; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._shapes: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        family = ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}{family}>'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = PAPER, line: str = LINE) -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{line}"/>'
        )

    def line(self, *points: tuple[float, float], colour: str = INK, width: float = 1.5, dashes: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        stroke = f'stroke="{colour}" stroke-width="{width:g}"{dashed}'
        self._shapes.append(f'<polyline points="{path}" fill="none" {stroke}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = INK, dashes: str = "") -> None:
        self.line((x1, y1), (x2, y2), colour=colour, dashes=dashes)
        angle = math.atan2(y2 - y1, x2 - x1)
        back = [(x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.4, -0.4)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *back])
        self._shapes.append(f'<polygon points="{path}" fill="{colour}"/>')

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        self._shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{colour}"/>')

    def cross(self, x: float, y: float, colour: str = RED) -> None:
        for direction in (-1, 1):
            self.line((x - 6, y - 6 * direction), (x + 6, y + 6 * direction), colour=colour, width=2.5)

    def svg(self) -> str:
        width, height = self._size
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
                'font-family="system-ui, Helvetica, DejaVu Sans, sans-serif">',
                f"<title>{escape(self._title)}</title>",
                f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}" stroke="{LINE}"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def overview() -> str:
    """Four peers over two intervals: steps, fragments, rounds in the background, one peer lost, one joining."""
    d = Drawing(860, 400, "Four peers train: fragments at every step, a round every H steps, one crashes, one joins")
    top, gap, left, step = 80, 62, 110, 22
    lanes = [top + gap * i for i in range(4)]
    rounds = (left + 11 * step, left + 24 * step)
    for x in rounds:
        d.box(x, top - 34, 3.2 * step, gap * 3 + 68, fill="#f3f4f6")
    d.text(rounds[0] + 1.6 * step, top - 42, "round 0", anchor="middle", bold=True)
    d.text(rounds[1] + 1.6 * step, top - 42, "round 1", anchor="middle", bold=True)
    lives = ((0, 33), (0, 33), (0, 18), (14.2, 33))
    for lane, (y, colour, life) in enumerate(zip(lanes, COLOURS, lives, strict=True)):
        d.text(20, y + 5, f"peer {'ABCD'[lane]}", colour=colour, bold=True)
        d.line((left + life[0] * step, y), (left + life[1] * step, y), colour=colour, width=2)
        for i in range(math.ceil(life[0]), math.floor(life[1])):
            d.dot(left + i * step, y, 3, colour)
    for when, source, target in (
        (1, 0, 1), (2, 2, 1), (3, 1, 0), (4, 0, 2), (5, 1, 2), (6, 2, 0), (7, 0, 1), (8, 1, 0), (9, 2, 1), (15, 0, 1),
        (14.7, 3, 1), (16.8, 0, 1), (17.8, 1, 0), (21.4, 3, 0), (22, 1, 3), (23, 0, 3),
        (28, 1, 0), (29, 3, 1), (30, 0, 3), (31, 1, 0),
    ):  # fmt: skip
        towards = 6 if target > source else -6
        x = left + when * step
        d.arrow(x, lanes[source] + towards, x + 0.7 * step, lanes[target] - towards, colour=COLOURS[source])
    d.box(left + 18 * step - 60, lanes[2] + 14, 128, 20, line=PAPER)
    d.text(left + 18 * step - 58, lanes[2] + 28, "crashes; run goes on", colour=RED, size=12)
    d.text(left + 4.2 * step, lanes[3] + 5, "joins: downloads the state", colour=VIOLET, size=13)
    d.arrow(rounds[0] + 3.2 * step, lanes[1] + 26, left + 14.2 * step, lanes[3] - 8, colour=QUIET, dashes="4 3")
    d.cross(left + 18 * step, lanes[2])
    for x, members in ((rounds[0], (0, 1, 2)), (rounds[1], (0, 1, 3))):
        for lane in members:
            d.line((x, lanes[lane]), (x + 1.6 * step, lanes[1] + 31), (x + 3.2 * step, lanes[lane]), colour=QUIET)
        d.dot(x + 1.6 * step, lanes[1] + 31, 6, INK)
    y = top + gap * 3 + 62
    d.dot(left, y, 3, BLUE)
    d.text(left + 12, y + 4, "an inner step on the peer's own data")
    d.arrow(left + 300, y, left + 322, y, colour=BLUE)
    d.text(left + 330, y + 4, "a fragment: p of the weights, to one random peer")
    d.dot(left, y + 26, 6, INK)
    d.text(left + 12, y + 30, "a round averages the outer gradients: the new anchor is the same on every member")
    return d.svg()


def gossip() -> str:
    """A fragment from its sender's weights to its receiver's."""
    d = Drawing(860, 330, "A fragment: the blocks of one slot, sent by one peer and mixed by half into another's")
    d.text(24, 34, "sender", colour=BLUE, bold=True)
    d.text(610, 34, "receiver", colour=ORANGE, bold=True)
    slot = {2, 7, 12, 21, 27, 32, 41, 46}
    for x0, colour in ((24, BLUE), (610, ORANGE)):
        for block in range(50):
            x, y = x0 + 22 * (block % 10), 50 + 22 * (block // 10)
            d.box(x, y, 19, 19, fill=colour if block in slot else TINT[colour], line=LINE)
    d.text(24, 184, "all parameters in blocks of 64;", colour=QUIET)
    d.text(24, 202, "dark: the blocks of slot s of cycle c,", colour=QUIET)
    d.text(24, 220, "1/p slots per cycle, shuffled by a", colour=QUIET)
    d.text(24, 238, "permutation keyed by the run's seed", colour=QUIET)
    d.box(278, 56, 300, 92, fill="#f3f4f6")
    d.text(290, 78, "header: lineage, round, cycle, slot", mono=True, size=12)
    d.text(290, 98, "scales: one bfloat16 per block", mono=True, size=12)
    d.text(290, 118, "values: 64 × int8 per block", mono=True, size=12)
    d.text(290, 138, "no indices: both sides compute them", size=12, colour=QUIET)
    d.arrow(248, 102, 276, 102, colour=BLUE)
    d.arrow(580, 102, 607, 102, colour=BLUE)
    d.text(610, 184, "at its next step, in the same blocks:", colour=QUIET)
    d.text(610, 208, "θ ← θ + ½ (received − θ)", mono=True, size=14)
    d.line((24, 262), (836, 262), colour=LINE)
    d.text(24, 286, "Skipped and counted:", bold=True)
    d.text(190, 286, "from an earlier epoch · p · age above 0.15 · distance above 4 × the median · too many at once")
    d.text(24, 310, "Peers do not wait for fragments and do not acknowledge them.", colour=QUIET)
    return d.svg()


def sequence(
    title: str, actors: Sequence[tuple[str, str]], steps: Sequence[tuple[int, int, str] | str], *, width: int = 860,
) -> str:  # fmt: skip
    """A sequence diagram: (i, j, …) is a message, (i, i, …) a note at an actor, a text alone a heading."""
    height = 76 + 30 * len(steps)
    d = Drawing(width, height, title)
    xs = [110 + (width - 220) * i / (len(actors) - 1) for i in range(len(actors))]
    for x, (name, colour) in zip(xs, actors, strict=True):
        d.line((x, 52), (x, height - 16), colour=LINE)
        d.box(x - 90, 20, 180, 30, fill=TINT[colour], line=colour)
        d.text(x, 40, name, colour=colour, anchor="middle", bold=True)
    for row, step in enumerate(steps):
        y = 84 + 30 * row
        if isinstance(step, str):
            d.box(16, y - 15, width - 32, 22, fill="#f3f4f6")
            d.text(width / 2, y, step, anchor="middle", colour=QUIET, bold=True, size=12)
            continue
        source, target, words = step
        colour = actors[source][1]
        if source == target:
            wide = 6.6 * len(words) + 16
            x = min(max(xs[source] - wide / 2, 12), width - 12 - wide)
            d.box(x, y - 15, wide, 22, fill=TINT[colour], line=colour)
            d.text(x + wide / 2, y, words, anchor="middle", size=12)
            continue
        d.arrow(xs[source], y + 4, xs[target], y + 4, colour=colour)
        d.text((xs[source] + xs[target]) / 2, y - 2, words, anchor="middle", size=12)
    return d.svg()


def round_() -> str:
    """One attempt at a round, from the time it is due until it has landed."""
    return sequence(
        "One round: joining, sending, averaging, deciding, landing",
        [("member", BLUE), ("leader (a member)", VIOLET), ("reducers (members)", ORANGE)],
        [
            (0, 1, "Due (to all peers): H steps are done"),
            (1, 0, "Call: join within the window"),
            (0, 0, "snapshot of the weights; training goes on"),
            (0, 1, "Join: promise, tokens, speed, linked peers"),
            (1, 0, "Roster: members, reducer of each part"),
            "the outer gradient, anchor − weights, in parts",
            (0, 2, "Contribution: each part to its reducer, in chunks, int8"),
            (2, 1, "Arrived: complete and stalled senders"),
            (1, 2, "Reduce: one set of contributors for all parts"),
            (2, 1, "Reduced: hash of the encoded mean"),
            "two phases: a record is committed only after a quorum has accepted it",
            (1, 0, "Propose: the record, with the part hashes"),
            (2, 0, "the parts of the mean, checked by hash"),
            (0, 1, "Ready"),
            (1, 0, "Commit: Ready came from a quorum"),
            (0, 0, "landing, inside peer.step(): the same new anchor on every member"),
        ],
    )


def joining() -> str:
    """How a peer joins: from an address to the first step."""
    return sequence(
        "Joining: from an address to the first step",
        [("joiner", VIOLET), ("initial peer", ORANGE), ("members of the run", BLUE)],
        [
            (0, 1, "dial the address from the command line"),
            (0, 1, "look up the members in the DHT"),
            (1, 0, "addresses, each signed by its peer"),
            (0, 2, "as an observer: ask for the run's settings"),
            (2, 0, "settings; compared with those that the user gave"),
            (0, 0, "build the model, check its layout"),
            (0, 2, "Hello with the run digest; another digest is refused, with the reason"),
            (0, 2, "ask for the head and the list of chunk hashes"),
            (2, 0, "chunks of anchor and momentum, from all members at once"),
            (0, 0, "check each by hash; replace lost donors; apply rounds that end meanwhile"),
            (0, 0, "first step; it contributes to the next round"),
        ],
    )


def epochs() -> str:
    """Epochs, which decide which fragments are mixed, and lineages, which rejoin after a partition."""
    d = Drawing(860, 420, "Epochs: fragments from before a round are dropped. Lineages: partitions become one again")
    d.text(24, 34, "Epochs", bold=True, size=15)
    for y, name, colour, landings in ((80, "peer A", BLUE, (280, 600)), (150, "peer B", ORANGE, (330, 650))):
        d.text(24, y + 5, name, colour=colour, bold=True)
        d.line((100, y), (836, y), colour=colour, width=2)
        for number, x in enumerate(landings):
            d.line((x, y - 16), (x, y + 16), colour=INK, width=3)
            d.text(x, y - 21 if y == 80 else y + 30, f"round {number} lands", anchor="middle", size=12)
    d.arrow(160, 86, 180, 144, colour=BLUE)
    d.text(190, 118, "same epoch: mixed", colour=GREEN)
    d.arrow(575, 144, 625, 86, colour=ORANGE)
    d.cross(625, 86)
    d.text(836, 122, "sent before: dropped", colour=RED, anchor="end")
    d.text(
        24,
        204,
        "Mixing it would undo part of the round's average. A fragment from a later epoch than the",
        colour=QUIET,
    )
    d.text(24, 222, "receiver's waits until the receiver has landed the round.", colour=QUIET)
    d.line((24, 240), (836, 240), colour=LINE)
    d.text(24, 268, "Lineages", bold=True, size=15)
    d.line((60, 320), (300, 320), colour=BLUE, width=3)
    for x, n in ((100, 0), (180, 1), (260, 2)):
        d.dot(x, 320, 7, BLUE)
        d.text(x, 306, f"round {n}", anchor="middle", size=12)
    d.line((300, 320), (340, 300), (660, 300), (700, 320), (836, 320), colour=BLUE, width=3)
    d.line((300, 320), (340, 360), (480, 360), colour=QUIET, width=2, dashes="5 4")
    d.line((480, 360), (660, 360), colour=ORANGE, width=3)
    d.line((660, 360), (700, 322), colour=ORANGE, width=2, dashes="5 4")
    for x, y, n, colour in ((420, 300, 3, BLUE), (560, 300, 4, BLUE), (560, 360, 3, ORANGE), (770, 320, 5, BLUE)):
        d.dot(x, y, 7, colour)
        d.text(x, y - 14, f"round {n}", anchor="middle", size=12)
    d.text(300, 288, "the network is cut", anchor="middle", size=12, colour=RED)
    d.text(700, 288, "healed", anchor="middle", size=12, colour=GREEN)
    d.text(340, 384, "the half without a quorum trains on; after", size=12, colour=QUIET)
    d.text(340, 400, "max(60 s, 3 intervals) it starts a new lineage", size=12, colour=QUIET)
    d.text(714, 352, "more tokens wins;", size=12, colour=QUIET)
    d.text(714, 368, "the other peers", size=12, colour=QUIET)
    d.text(714, 384, "adopt its anchor", size=12, colour=QUIET)
    return d.svg()


# A short description of each component.
WORDS = {
    "algorithms": "fragments, codecs, mixing, averaging: torch and numpy only",
    "settings": "of the run and the machine; flags, variables, TOML, presets",
    "protocol": "links, gossip, rounds, state sync: trio only, no clock or socket of its own",
    "network": "transport and DHT over libp2p: the only package that imports hivemind",
    "memory_network": "transport and directory in memory, with faults",
    "peer": "connects a training loop to a node on the network thread",
    "monitor": "live view, Prometheus, dashboard, doctor",
    "api": "p2ptrain.join, for the user's own training loop",
    "training": "models, data, trainer, checkpoints: what `p2ptrain join` runs",
    "integrations": "callbacks for trainers of other libraries",
    "simulation": "many peers in one process, virtual time; the papers' experiments",
    "demo": "a swarm of processes on one machine",
    "cli": "the commands, without logic",
}


def layers() -> str:
    """The components in the layer list of tests/test_layers.py, lowest layer first."""
    source = (HERE.parents[1] / "tests/test_layers.py").read_text(encoding="utf-8")
    (found,) = [
        node.value for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "LAYERS"
    ]  # fmt: skip
    assert found is not None
    rows: list[set[str]] = ast.literal_eval(found)
    height = 66 + 46 * len(rows)
    d = Drawing(860, height, "The layers of the package: each row may import the rows above it")
    d.text(24, 30, "Each row may import the rows above it, but none below (tests/test_layers.py).", colour=QUIET)
    d.arrow(30, height - 24, 30, 50, colour=QUIET)
    for row, names in enumerate(rows):
        x, y = 56.0, 44 + 46 * row
        words = [f"{name}: {WORDS[name]}" for name in sorted(names) if name in WORDS]
        for name in sorted(names):
            wide = 7.4 * len(name) + 20
            colour = GREEN if name == "algorithms" else ORANGE if name in ("network", "memory_network") else BLUE
            d.box(x, y, wide, 28, fill=TINT[colour], line=colour)
            d.text(x + wide / 2, y + 19, name, anchor="middle", mono=True, size=12)
            x += wide + 8
        if len(words) == 1:
            d.text(x + 8, y + 19, words[0].partition(": ")[2], size=12, colour=QUIET)
        else:
            for line, text in enumerate(words):
                d.text(x + 8, y + 11 + 13 * line, text, size=11, colour=QUIET)
    return d.svg()


def ways() -> str:
    """A fragment's and a round's way through a peer: a lane for each part, an arrow for each call or message, and where
    to read it."""
    lanes = [
        ("exchange", "training thread"),
        ("protocol/gossip", "network thread"),
        ("protocol/rounds", "network thread"),
        ("algorithms", "worker threads"),
        ("protocol/links", "network thread"),
    ]
    fragment = [
        (1, 0, "offer_push: blocks of the next slots", "gossip.py: Gossip"),
        (0, 1, "Push: their values, read in step()", "exchange/pushing.py: Pusher"),
        (1, 3, "encode (int8)", "gossip.py: Gossip"),
        (1, 4, "Fragment, to one random peer", "links/link.py: Link"),
        (4, 1, "Fragment: slots, size and epoch are checked", "node/node.py: on_message"),
        (1, 3, "decode, find its blocks", "gossip.py: Gossip"),
        (1, 0, "inbox.put: mixed in the next step()", "exchange/merging.py: Merger"),
    ]
    round_ = [
        (0, 2, "RoundDue: H steps are done", "exchange/position.py"),
        (2, 4, "Due; consensus: Call", "schedule.py, consensus.py"),
        (2, 0, "want_snapshot", "snapshot.py: SnapshotTaker"),
        (0, 2, "SnapshotTaken: weights, copied in step()", "exchange/snapshots.py"),
        (2, 4, "consensus: Join", "member.py: Participation"),
        (2, 3, "encode anchor − weights, by chunks", "snapshot.py: OwnContribution"),
        (2, 4, "Contribution: chunks, to reducers", "member.py: Sender"),
        (4, 2, "Contribution: each chunk is checked", "collection.py: Collection"),
        (2, 3, "averaging: reduce", "reducer.py, averaging.py"),
        (2, 4, "consensus: Propose", "leader.py, record.py"),
        (4, 2, "parts of the mean, checked by hash", "pushed_means.py, fetch.py"),
        (2, 4, "consensus: Ready, Commit", "consensus.py"),
        (2, 3, "outer step on the anchor", "commit.py, outer_step.py"),
        (2, 0, "land: takes effect in the next step()", "exchange/exchange.py"),
        (2, 3, "hashes of the new state", "commit.py, anchor.py"),
    ]
    left, gap, top, row = 100, 176, 76, 27
    height = top + row * (len(fragment) + len(round_) + 2)
    d = Drawing(left + gap * (len(lanes) - 1) + 300, height, "The way of a fragment and of a round through a peer")
    x = [left + gap * i for i in range(len(lanes))]
    for at, (part, thread) in zip(x, lanes, strict=True):
        d.text(at, 28, part, anchor="middle", mono=True, size=12)
        d.text(at, 45, thread, anchor="middle", size=11, colour=QUIET)
        d.line((at, 56), (at, height - 16), colour=LINE)
    read_at = x[-1] + 100
    d.text(read_at, 28, "read it in", size=12)
    y = float(top)
    for title, colour, steps in (("A fragment", BLUE, fragment), ("A round", GREEN, round_)):
        d.text(12, y, title, bold=True, colour=colour)
        for start, end, words, where in steps:
            y += row
            middle, wide = (x[start] + x[end]) / 2, 5.8 * len(words)
            d.box(middle - wide / 2, y - 17, wide, 14, line=PAPER)
            d.arrow(x[start], y, x[end], y, colour=colour)
            d.text(middle, y - 6, words, anchor="middle", size=11)
            d.text(read_at, y - 4, where, mono=True, size=11, colour=QUIET)
        y += row * 1.2
    return d.svg()


def copies() -> str:
    """Where the bytes of a round lie, and who copies them: one lane for each thread, one box for each place."""
    lanes = [
        ("training thread", BLUE),
        ("worker threads", GREEN),
        ("network thread", VIOLET),
        ("TLS and kernel", ORANGE),
    ]
    # For each row a lane, the place, what is done there, and whether that is a copy.
    out = [
        (0, "snapshot", "weights, fp32; in slices of steps", True),
        (1, "chunk", "anchor − weights as int8, in C", True),
        (1, "its place in the snapshot", "so a chunk needs no memory", True),
        (2, "queue of the link", "the outer step will write there", True),
        (2, "frame", "prefix, header, bytes", True),
        (3, "records of 16 KiB", "encrypted, and into the socket", True),
    ]
    reduce = [
        (3, "records of 16 KiB", "from the socket, and decrypted", True),
        (2, "buffer of the reader", "until the frame is whole", True),
        (2, "received chunk", "size and scales are checked", True),
        (1, "sum, fp32", "measured; decoded and weighted, in C", False),
        (1, "chunk of the mean", "encoded, in C", True),
        (2, "buffer of the mean", "grows while others send; hashed at its end", True),
        (3, "records of 16 KiB", "as above, to each member", True),
    ]
    land = [
        (2, "buffer of the mean", "by way of the reader, as above", True),
        (1, "hash and check", "read twice", False),
        (1, "anchor and moments", "outer step, in C, on copies in the cache", True),
        (1, "its place in the snapshot", "the change of the weights, fp32", True),
        (0, "live weights", "added, in slices of steps", True),
    ]
    left, gap, top, row, wide = 112, 216, 84, 46, 206
    height = top + row * (len(out) + len(reduce) + len(land)) + 3 * 34
    d = Drawing(left + gap * 3 + 112, height, "The bytes of a round: where they lie, and who copies them")
    x = [left + gap * i for i in range(len(lanes))]
    for at, (name, colour) in zip(x, lanes, strict=True):
        d.text(at, 30, name, anchor="middle", bold=True, colour=colour)
        d.line((at, 42), (at, height - 14), colour=LINE)
    y, number = float(top), 0
    for title, steps in (("our outer gradient", out), ("at a reducer", reduce), ("the mean, at a member", land)):
        d.box(8, y - 22, 7.2 * len(title) + 12, 20, line=PAPER)
        d.text(12, y - 7, title, bold=True, size=14)
        before: tuple[float, float] | None = None
        for lane, place, words, is_copy in steps:
            colour, number = lanes[lane][1], number + is_copy
            if before is not None:
                d.arrow(before[0], before[1], x[lane], y + 4, colour=QUIET)
            d.box(x[lane] - wide / 2, y + 4, wide, 34, fill=TINT[colour] if is_copy else PAPER, line=colour)
            d.text(x[lane], y + 18, f"{number}. {place}" if is_copy else place, anchor="middle", size=11, bold=True)
            d.text(x[lane], y + 32, words, anchor="middle", size=9, colour=QUIET)
            before = x[lane], y + 38
            y += row
        y += 34
    return d.svg()


def pictures() -> dict[str, str]:
    """Every picture, by file name."""
    return {
        "overview.svg": overview(),
        "gossip.svg": gossip(),
        "round.svg": round_(),
        "joining.svg": joining(),
        "epochs.svg": epochs(),
        "layers.svg": layers(),
        "ways.svg": ways(),
        "copies.svg": copies(),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text, encoding="utf-8")
