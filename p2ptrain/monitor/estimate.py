"""What a run will cost on a link, before it starts: a round, gossip, a joiner's state, memory. Pure.

Bytes are those of the run's own codecs, averaging strategy and topology. Seconds follow from the link that the user
describes, if all peers have the same. tests/monitor/test_estimate.py compares them with measured rounds.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.fragments import Walk
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.algorithms.pairwise import swap_bytes
from p2ptrain.algorithms.topology import partners
from p2ptrain.formatting import count, seconds, size
from p2ptrain.protocol.push_pace import MIN_PUSH_INTERVAL_S
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec, mean_codec
from p2ptrain.protocol.rounds.deciding.timeouts import (
    WARNED_SHARE,
    allowed_share,
    changed,
    fewest_steps,
    with_smaller_codec,
)
from p2ptrain.protocol.wire.frames import MAX_PAYLOAD_BYTES
from p2ptrain.protocol.wire.messages import Attempt, Join
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.link import UNITS, Link

# From due to landed: four from the Call (test_rounds.py::test_a_round_takes_four_round_trips_from_its_call),
# and one until enough voters are known to be due.
ROUND_TRIPS = 5
# The same of a pairwise step: a pause of at most four, two on average; and two from the first offer
# (test_pairwise.py::test_a_pairwise_step_takes_two_round_trips_from_its_offer).
PAIR_ROUND_TRIPS = 4
# Snapshot, encoding, hashing, averaging and the outer step: about a second for 25M parameters on one busy core
# (docs/evidence/benchmarks.md, "Far apart").
COMPUTE_S = 1 / 25e6
# A TCP connection begins with ten segments (RFC 6928) and doubles its window in each round trip. It begins anew after a
# pause, as between two rounds.
FIRST_WINDOW_BYTES = 14_600
# CPU time of a push, as `PushPace` counts it, and of each of its bytes: 6.0 ms for a fragment of 22 kB, 7.6 ms for
# 131 kB, 12.9 ms for 650 kB (computed from docs/log/, "gossip that became rarer and rarer").
PUSH_S, PUSH_BYTE_S = 6e-3, 1e-8
# Memory, in units of the parameters in fp32. AT_REST: weights, gradients and AdamW's two moments. IN_A_ROUND: the most
# that a round adds (3.66 x measured at 124M, int8, docs/evidence/benchmarks.md), in host memory even with a GPU.
AT_REST, IN_A_ROUND = 4.0, 3.7
# Memory of a peer with the demo model (measured: 421 MB), nearly all of it libraries.
LIBRARIES_BYTES = 420_000_000
# Gossip should take at most a quarter of the slower direction of a link (docs/use/choosing.md). A change that saves
# less than a tenth of a round is not advised.
SHARE_OF_LINK, NOTABLY = 0.25, 0.9
# Sections to try: those of the measurements (docs/evidence/late.md).
SECTIONS = 5


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and seconds of one peer.

    Attributes:
        round_up_bytes, round_down_bytes: of a round, at the member with the most; or of a pairwise step, as below.
        taken_over_bytes: what a peer that does not contribute downloads of a round.
        passed_on_bytes: what a peer uploads for those, on average.
        transfer_s, round_trips_s, compute_s: the parts of a round's seconds.
        interval_s: from one round to the next.
        fragment_bytes: of one fragment.
        push_every_s: from one push to the next: the time of the steps that share one, or more if the gossip budget
            requires it.
        gossip_bytes_s: of fragments, out; in as many come on average.
        state_bytes, joining_s: what a joiner downloads, and how long that takes.
        at_rest_bytes: weights, gradients and AdamW's moments, in the GPU's memory if there is one.
        in_a_round_bytes: what a round, or a pairwise step, adds to that, and the libraries, in host memory.
    """

    round_up_bytes: int
    round_down_bytes: int
    taken_over_bytes: int
    passed_on_bytes: int
    transfer_s: float
    round_trips_s: float
    compute_s: float
    interval_s: float
    fragment_bytes: int
    push_every_s: float
    gossip_bytes_s: float
    state_bytes: int
    joining_s: float
    at_rest_bytes: int
    in_a_round_bytes: int

    @property
    def round_s(self) -> float:
        return self.transfer_s + self.round_trips_s + self.compute_s

    @property
    def share(self) -> float:
        """Share of the time in which a round is under way."""
        return self.round_s / self.interval_s

    def to_dict(self) -> dict[str, float]:
        return {**dataclasses.asdict(self), "round_s": self.round_s, "share": self.share}


def at_rest_bytes(params: int) -> int:
    """Weights, gradients and AdamW's two moments."""
    return round(4 * AT_REST * params)


def in_a_round_bytes(params: int, vectors: int = 0) -> int:
    """Host memory that a round and the libraries need beyond that. `vectors`: as `vectors_more` counts them."""
    return round(4 * (IN_A_ROUND + vectors) * params) + LIBRARIES_BYTES


def vectors_more(run: RunConfig) -> int:
    """Vectors that this run needs beyond IN_A_ROUND: one for pairs, or two error buffers (before and after a round)."""
    return 1 if run.is_pairwise else 2 if gradient_codec(run).error_decay else 0


def estimate_run(run: RunConfig, params: int, link: Link) -> Estimate:
    """What this run costs one of its peers, with a model of so many parameters."""
    num_blocks = -(-params // BLOCK)
    # AdamW's two moments are averaged like weights.
    averaged_blocks = num_blocks * (3 if run.inner_moments == "averaged" else 1)
    # Sections are of whole tensors, so this is about the mean.
    round_blocks = -(-averaged_blocks // run.round_sections)
    contributors, donors_count = min(link.peers, run.max_contributors), link.peers - 1
    up_bytes, down_bytes = round_bytes(run, round_blocks, contributors)
    connections = 1 if run.is_pairwise else contributors - 1
    taken_over = taken_over_bytes(run, round_blocks, contributors)
    fragment_bytes = fragment_size(run, num_blocks)
    steps = steps_in_a_push(fragment_bytes, link.step_s)
    push_s = (PUSH_S + PUSH_BYTE_S * steps * fragment_bytes) / (link.gossip_budget * link.cores)
    push_every_s = max(steps * link.step_s, push_s)
    vector_bytes = codec("none").size_bytes(averaged_blocks)
    state_bytes = vector_bytes * (1 + OUTER_OPTIMIZERS[run.outer_optimizer].num_moments)
    donated_bytes_s = min(link.down_bytes_s, link.up_bytes_s * donors_count)
    # With pairwise steps the second vector is an anchor, which one peer gives.
    from_all_bytes = vector_bytes if run.is_pairwise else state_bytes
    joining_s = transfer_s(from_all_bytes, donated_bytes_s, link.rtt_s, donors_count)
    if run.is_pairwise:
        joining_s += transfer_s(vector_bytes, min(link.down_bytes_s, link.up_bytes_s), link.rtt_s, 1)
    return Estimate(
        round_up_bytes=up_bytes,
        round_down_bytes=down_bytes,
        taken_over_bytes=taken_over,
        passed_on_bytes=taken_over * (link.peers - contributors) // link.peers,
        transfer_s=max(
            transfer_s(up_bytes, link.up_bytes_s, link.rtt_s, connections),
            transfer_s(down_bytes, link.down_bytes_s, link.rtt_s, connections),
        ),
        round_trips_s=event_of(run)[1] * link.rtt_s,
        compute_s=params * COMPUTE_S / run.round_sections,
        interval_s=run.sync_every * link.step_s,
        fragment_bytes=fragment_bytes,
        push_every_s=push_every_s,
        gossip_bytes_s=steps * fragment_bytes * receivers(run, link.peers) / push_every_s,
        state_bytes=state_bytes,
        joining_s=joining_s,
        at_rest_bytes=at_rest_bytes(params),
        in_a_round_bytes=in_a_round_bytes(params, vectors_more(run)),
    )


def event_of(run: RunConfig) -> tuple[str, int]:
    """What averages in this run, and its round trips."""
    return ("a pair", PAIR_ROUND_TRIPS) if run.is_pairwise else ("a round", ROUND_TRIPS)


def round_bytes(run: RunConfig, num_blocks: int, members: int) -> tuple[int, int]:
    """The most that a member sends and receives in a round, by the plan of the averaging strategy; or in a pair."""
    if run.is_pairwise:
        return (swap_bytes(gradient_codec(run), num_blocks),) * 2
    averaging, grid = averaging_of(run), Grid.of(num_blocks, gradient_codec(run))
    sizes = [part.stop - part.start for part in averaging.plan(_joins(members), (), grid)]
    gradients = [gradient_codec(run).size_bytes(size) for size in sizes]
    means = [mean_codec(run).size_bytes(size) * averaging.reduces for size in sizes]
    # A member without a part sends all and receives all.
    own = [*zip(gradients, means, strict=True), *[(0, 0)] * (members - len(sizes))]
    sent = (sum(gradients) - gradient + (members - 1) * mean for gradient, mean in own)
    received = ((members - 1) * gradient + sum(means) - mean for gradient, mean in own)
    return max(sent), max(received)


def taken_over_bytes(run: RunConfig, num_blocks: int, members: int) -> int:
    """Bytes that a peer downloads in a round of this many members: the mean, or all gradients; 0 for pairs."""
    if run.is_pairwise:
        return 0
    if averaging_of(run).reduces:
        return mean_codec(run).size_bytes(num_blocks)
    return members * gradient_codec(run).size_bytes(num_blocks)


def transfer_s(size_bytes: int, rate_bytes_s: float, rtt_s: float, connections: int) -> float:
    """Seconds to move so many bytes over a link, on connections that start slowly (see `FIRST_WINDOW_BYTES`)."""
    window, left, seconds = float(FIRST_WINDOW_BYTES * connections), float(size_bytes), 0.0
    while window < min(left, rate_bytes_s * rtt_s):
        left, window, seconds = left - window, 2 * window, seconds + rtt_s
    return seconds + left / rate_bytes_s


def fragment_size(run: RunConfig, num_blocks: int) -> int:
    """Bytes of the fragment of one step; 0 without gossip."""
    if not run.fragment_fraction:
        return 0
    walk = Walk.of(run.fragment_fraction)
    return codec(run.fragment_codec).size_bytes(max(1, num_blocks * walk.per_step // walk.num_slots))


def steps_in_a_push(fragment_bytes: int, step_s: float) -> int:
    """How many steps share a push, because they are fast."""
    fit = MAX_PAYLOAD_BYTES // fragment_bytes if fragment_bytes else 1
    return max(1, min(fit, math.ceil(MIN_PUSH_INTERVAL_S / step_s)))


def codecs_of(run: RunConfig) -> str:
    """The codec of outer gradients, and that of their mean if it is another one."""
    if run.is_pairwise or not averaging_of(run).reduces:
        return run.round_codec
    mean = mean_codec(run).name
    return run.round_codec if mean == run.round_codec else f"{run.round_codec}, the mean as {mean}"


def receivers(run: RunConfig, peers: int) -> int:
    """The most peers that get a fragment; with pairs and groups one peer may be left over."""
    own, *others = (str(i) for i in range(peers))
    rng = random.Random(0)
    return max(
        len(partners(run.topology, own, others, fan_out=run.fan_out, seed=run.run_seed, step=step, rng=rng))
        for step in range(8)
    )


def advice(run: RunConfig, params: int, link: Link, found: Estimate) -> Iterator[str]:
    """Yield what the user should change, the ways that cost least loss first, and whether H suits this link."""
    sections, event = run.round_sections, event_of(run)[0]
    share = "a tenth" if sections == 1 else f"{100 * allowed_share(sections):.0f} %"
    steps = fewest_steps(found.round_s, link.step_s, sections)
    is_too_frequent = found.share > allowed_share(sections)
    if not is_too_frequent:
        yield f"H = {run.sync_every} suits this link: {event} takes at most {share} of its interval from {steps} on"
    ways = list[str]()
    for option, changed_run in _alternatives(run, link):
        other = estimate_run(changed_run, params, link)
        if other.round_s < NOTABLY * found.round_s:
            fewest = fewest_steps(other.round_s, link.step_s, sections)
            suits = is_too_frequent and fewest <= run.sync_every
            enough = f"H = {run.sync_every} suits it" if suits else f"--sync-every {fewest} is enough"
            ways.append(
                f"with {option} {event} takes {seconds(other.round_s)} instead of {seconds(found.round_s)}, so {enough}"
            )
    if is_too_frequent:
        ways += _sections_advice(run, params, link, found)
        ways.append(f"give --sync-every {steps} or more: {event} then takes at most {share} of its interval")
    yield from (f"or {way}" if number and is_too_frequent else way for number, way in enumerate(ways))
    is_too_large = found.fragment_bytes > MAX_PAYLOAD_BYTES
    slower_bytes_s, slower = _slower(link)
    if is_too_large or found.gossip_bytes_s > SHARE_OF_LINK * slower_bytes_s:
        # Computed for a push at every step, so that it also holds with a larger gossip budget.
        allowed = SHARE_OF_LINK * slower_bytes_s * link.step_s / receivers(run, link.peers)
        most = run.fragment_fraction * min(MAX_PAYLOAD_BYTES, allowed) / found.fragment_bytes
        # One digit, rounded down. The factor keeps a fraction that is one digit already, except for its last bits.
        digit = Context(prec=1, rounding=ROUND_DOWN).create_decimal(most * (1 + 1e-9))
        too_large = (
            f"a fragment of {size(found.fragment_bytes)} does not fit into a frame of {size(MAX_PAYLOAD_BYTES)}, and "
            "p2ptrain join refuses it"
        )
        why = too_large if is_too_large else f"gossip then takes at most a quarter of the {slower}"
        yield f"give --fragment-fraction {digit:f} or less: {why}"
    if found.transfer_s > run.round_timeout_s / 2:
        least = math.ceil(2 * found.transfer_s / 100) * 100
        yield (
            f"give --round-timeout-s {least} or more: half of the {run.round_timeout_s:g} s of an attempt are too short"
        )


def _sections_advice(run: RunConfig, params: int, link: Link, found: Estimate) -> Iterator[str]:
    """Yield that the rounds could average sections, if this is allowed and saves most of a round's time."""
    if run.round_sections > 1 or run.sync_every < SECTIONS or found.share < WARNED_SHARE:
        return
    cut = changed(run, round_sections=SECTIONS, sync_every=run.sync_every // SECTIONS)
    if cut is None:
        return
    other = estimate_run(cut, params, link)
    if other.round_s < found.round_s / 2 and other.share < 1:
        yield (
            f"with --round-sections {SECTIONS} --sync-every {cut.sync_every} each round averages one section of the "
            f"model, and takes {seconds(other.round_s)} instead of {seconds(found.round_s)}"
        )


def _alternatives(run: RunConfig, link: Link) -> Iterator[tuple[str, RunConfig]]:
    """Yield options that may make a round shorter and did not raise the loss, each with the run that has it."""
    # Gather is for two or three (docs/use/choosing.md).
    if run.averaging == "gather" and min(link.peers, run.max_contributors) > 3:
        yield "--averaging parts", dataclasses.replace(run, averaging="parts")
    smaller = with_smaller_codec(run)
    if smaller is not None:
        yield f"--round-codec {smaller.round_codec}", smaller


def texts(run: RunConfig, params: int, link: Link, found: Estimate) -> Iterator[str]:
    """The estimate for a terminal."""
    unit = next(unit for unit in reversed(UNITS) if params >= UNITS[unit])
    yield (
        f"{params / UNITS[unit]:.4g}{unit} parameters, {count(link.peers, 'peer')}, {link.rate_mbit:g} Mbit/s down and "
        f"{link.rate_up_mbit or link.rate_mbit:g} up, {link.rtt_ms:g} ms round trip, {link.step_ms:g} ms a step"
    )
    event, round_trips = event_of(run)
    trips = f"{seconds(found.round_trips_s)} for {round_trips} round trips"
    share, interval = f"{100 * found.share:.1f} %", seconds(found.interval_s)
    coded = codecs_of(run) + (f"; one of {run.round_sections} sections" if run.round_sections > 1 else "")
    yield f"{event:<9}{size(found.round_up_bytes)} up, {size(found.round_down_bytes)} down ({coded})"
    yield (
        f"{'':9}{seconds(found.round_s)}: {seconds(found.transfer_s)} for the bytes, {trips}, "
        f"{seconds(found.compute_s)} of compute"
    )
    yield f"{'':9}{share} of an interval of {run.sync_every} steps, {interval}; training goes on meanwhile"
    others = link.peers - run.max_contributors
    if found.taken_over_bytes and others > 0:
        each = "the other one" if others == 1 else f"each of the other {others}"
        yield (
            f"{'':9}{run.max_contributors} peers contribute; {each} then downloads {size(found.taken_over_bytes)} from "
            f"partners, so {size(found.passed_on_bytes)} up per peer on average"
        )
    slower_bytes_s, slower = _slower(link)
    gossip = f"{size(found.gossip_bytes_s)} a second up and down, {100 * found.gossip_bytes_s / slower_bytes_s:.1f} %"
    is_limited = found.push_every_s > steps_in_a_push(found.fragment_bytes, link.step_s) * link.step_s
    every = f"; a push every {seconds(found.push_every_s)} by --gossip-budget {link.gossip_budget:g}"
    yield f"gossip   {gossip} of the {slower}" + (every if found.fragment_bytes and is_limited else "")
    yield f"joining  {size(found.state_bytes)} down, {seconds(found.joining_s)}"
    in_a_round, at_rest = size(found.at_rest_bytes + found.in_a_round_bytes), size(found.at_rest_bytes)
    yield f"memory   {in_a_round} in a round, plus the batch; of that {at_rest} on the GPU if there is one"
    yield from (f"→ {text}" for text in advice(run, params, link, found))


def _slower(link: Link) -> tuple[float, str]:
    """The slower direction of a link, in bytes a second, and its name."""
    return min((link.up_bytes_s, "uplink"), (link.down_bytes_s, "downlink"), key=lambda pair: pair[0])


def _joins(members: int) -> dict[str, Join]:
    """The records of so many members that are all linked, at the same rate."""
    names = tuple(f"{i:04}" for i in range(members))
    attempt = Attempt(0, names[0], "")
    return {
        name: Join("", 0, attempt, "", "", True, 0, 0, 0, 1.0, 1.0, names, False, None, None, None) for name in names
    }
