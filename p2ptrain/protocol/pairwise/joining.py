"""Gets a joiner its first anchor: chooses a donor, downloads its anchor, and checks that.

Each peer has an anchor of its own, so no record has the hash of a donor's. Instead, a joiner compares random chunks of
it with those of other peers.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import trio

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.algorithms.codec import is_within
from p2ptrain.algorithms.pairwise import Array, is_usual
from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.anchor import STATE_CHUNK_BLOCKS
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.nursery import fetch_pipelined
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Time for one chunk of an anchor (as in `state_sync`), and for all chunks of a peer that are compared.
CHUNK_TIMEOUT_S = 60.0
# A copied anchor is compared with those of this many other peers, in this many chunks (guesses).
COMPARED_PEERS, COMPARED_CHUNKS = 4, 8
# How long a joiner waits for that many peers, if it knows more members (guess). They link and send a Beat within 2 s.
MEET_S, MEET_POLL_S = 5.0, 0.1
# Pause before another donor is asked.
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Copied:
    """A donor's anchor, which the caller owns, and the step of the run that the donor reported."""

    donor: PeerId
    run_step: int
    anchor: Array


class AnchorCopier:
    """Copies the anchor of a peer that is ahead of us."""

    def __init__(self, context: RoundContext, rng: random.Random, membership: Membership) -> None:
        self._context = context
        self._rng = rng
        self._membership = membership

    async def copy(self) -> Copied | None:
        """The checked anchor of a peer that is more than an interval ahead; None once there is no such peer."""
        refused: set[PeerId] = set()
        if self._ahead():
            # Wait for peers to compare the anchor with.
            with trio.move_on_after(MEET_S):
                while len(self._ahead()) <= COMPARED_PEERS and self._meets_more():
                    await trio.sleep(MEET_POLL_S)
        while donors := self._ahead():
            chosen = [link for link in donors if link.peer_id in self._context.links.chosen]
            fresh = [link for link in chosen or donors if link.peer_id not in refused]
            donor = self._rng.choice(fresh or donors)
            copied = await self._copy_from(donor, [link for link in donors if link is not donor])
            if copied is not None:
                return copied
            refused.add(donor.peer_id)
            await trio.sleep(RETRY_S)
        return None

    def _meets_more(self) -> bool:
        """Whether a known member is not linked yet, or has sent no Beat."""
        return self._membership.undecided or any(link.beat is None for link in self._context.links.trainers())

    def _ahead(self) -> list[Link]:
        """Linked peers near the step that the others have reached, if that is more than an interval ahead of us."""
        others, interval = linked_others(self._context), self._context.run.sync_every
        step = others_step(others)
        if step <= self._context.exchange.run_step + interval:
            return []
        return [link for link in others if link.beat and abs(link.beat.step - step) <= interval]

    async def _copy_from(self, donor: Link, others: list[Link]) -> Copied | None:
        """A donor's anchor; None if it does not send it, or if it is unlike the others'."""
        assert donor.beat is not None
        run_step, state = donor.beat.step, self._context.state
        anchor = await self._context.compute(np.empty_like, state.anchor)
        if not await self._fetch(donor, range(state.num_slices), anchor, self._context.run.round_timeout_s):
            return None
        if not await self._is_usual(anchor, others):
            logger.warning("the anchor of %s is unlike those of other peers: not taken", donor.peer_id)
            return None
        return Copied(donor.peer_id, run_step, anchor)

    async def _fetch(self, donor: Link, indices: Sequence[int], out: Array, timeout_s: float) -> bool:
        """Write chunks of a donor's anchor into `out`, one after the other. False if they do not all come in time."""

        async def fetch(i: int) -> None:
            answer, payload = await self._context.links.request(
                donor, "anchor", "", indices[i], timeout_s=CHUNK_TIMEOUT_S
            )
            chunk = out[rows(i)]
            if not answer.found:
                raise PeerLostError(f"{donor.peer_id} has no anchor")
            if len(payload) != chunk.nbytes:
                raise WireError(f"{len(payload)} bytes for a chunk of an anchor of {chunk.nbytes}")
            chunk[:] = np.frombuffer(payload, "<f4").reshape(chunk.shape)
            if not is_within(chunk, MAX_GRADIENT):
                raise WireError(f"an anchor with values that are NaN or beyond {MAX_GRADIENT:g}")

        with self._context.links.containing(donor, "copying its anchor"), trio.move_on_after(timeout_s):
            try:
                await fetch_pipelined(len(indices), fetch)
                return True
            except PeerLostError as error:
                logger.info("copying the anchor of %s: %s", donor.peer_id, error)
        return False

    async def _is_usual(self, anchor: Array, others: list[Link]) -> bool:
        """Whether random chunks of a copied anchor are like those of two or four other peers. True if there are fewer.

        The others are asked last, when the donor cannot change its chunks any more.
        """
        # Not the last chunk, which is shorter, if there are others.
        slices = range(max(1, self._context.state.num_slices - 1))
        indices = self._rng.sample(slices, min(len(slices), COMPARED_CHUNKS))
        sample = np.concatenate([anchor[rows(index)] for index in indices])
        samples = list[Array]()

        async def compare(link: Link) -> None:
            theirs = np.empty_like(sample)
            if await self._fetch(link, indices, theirs, CHUNK_TIMEOUT_S):
                samples.append(theirs)

        async with trio.open_nursery() as nursery:
            for link in self._rng.sample(others, min(len(others), COMPARED_PEERS)):
                nursery.start_soon(compare, link)
        # Together with the donor's an odd number, so that the median is one of them.
        samples = samples[: len(samples) // 2 * 2]
        return not samples or await self._context.compute(is_usual, sample, samples)


def rows(index: int) -> slice:
    """The blocks of a chunk of an anchor."""
    return slice(index * STATE_CHUNK_BLOCKS, (index + 1) * STATE_CHUNK_BLOCKS)


def linked_others(context: RoundContext) -> list[Link]:
    """The links to the live peers of our lineage that hold its state."""
    links = (context.links.get(peer_id) for peer_id in context.host.lineage_peers())
    return [link for link in links if link is not None]


def others_step(others: Sequence[Link]) -> int:
    """The step that more than a third of these peers have reached; 0 without any.

    Peers may lie about their steps: a third of them cannot raise the result. New members, which are at 0, lower it only
    if they are two thirds.
    """
    steps = sorted(link.beat.step for link in others if link.beat is not None)
    return steps[(2 * len(steps) - 1) // 3] if steps else 0
