"""Every message kind with every field at its extremes, well formed and signed.

As a stranger and as a member, before and after the first round. Those that do not unpack are in `test_fuzz.py`.
"""

from __future__ import annotations

import random

import pytest
import trio

from p2ptrain.protocol.wire.messages import KIND_OF, Answer, Contribution, Fragment, PairWeights
from tests.hostile.harness import NAMES, attacked, facts, forgive
from tests.hostile.values import ENDS_A_LINK, well_formed
from tests.protocol.swarm import run_virtual

# In all some twenty rounds.
EVERY_S = 0.03
PAYLOADS = (b"", b"\0" * 66, b"\xff" * 5000)


@pytest.mark.parametrize("when", ["before rounds", "after rounds", pytest.param("pairwise", marks=pytest.mark.long)])
@pytest.mark.parametrize("as_member", [False, True], ids=["stranger", "member"])
def test_every_kind_with_every_field_at_its_extremes(as_member: bool, when: str) -> None:
    rng = random.Random(1)

    async def main() -> None:
        scene = {"as_member": as_member, "before_rounds": when == "before rounds", "pairwise": when == "pairwise"}
        async with attacked(**scene) as (s, liar, _):
            for kind in KIND_OF:
                sent = of = 0
                for message in well_formed(kind, facts(s), rng):
                    payload = rng.choice(PAYLOADS) if kind in (Answer, Contribution, Fragment, PairWeights) else b""
                    # A refused message ends its link: most go out at once, the others on a new link.
                    victim, of = NAMES[of % len(NAMES)], of + 1
                    told = await liar.tell(victim, liar.sign(message), payload)
                    await trio.sleep(EVERY_S)
                    if not told or kind in ENDS_A_LINK:
                        forgive(s, liar)
                        told = told or await liar.tell(victim, liar.sign(message), payload)
                    sent += told
                assert sent >= 0.9 * of, f"only {sent} of {of} {kind.__name__} went out"
            assert liar.sent > 1000

    run_virtual(main)
