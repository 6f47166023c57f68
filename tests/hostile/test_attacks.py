"""The attacks that once ended peers or destroyed their model: as a stranger, and as a member who takes part in rounds.

In `tests/protocol/` are made-up records in the DHT (`membership/test_made_up_records.py`), text with control characters
(`wire/test_forged_text.py`), and what a joiner is told (`state_sync/test_state_sync.py`). Relayed bytes are in
`tests/network/test_relay.py`, half requests to the page in `tests/monitor/dashboard/test_server.py`.
"""

from __future__ import annotations

import pytest
import trio

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.protocol.wire.messages import Answer, Request
from tests.hostile.attacks import ATTACKS, Attack, Known, take_over
from tests.hostile.harness import NAMES, STEP_S, attacked, check_sizes, forgive, undisturbed
from tests.hostile.liar import Liar
from tests.protocol.swarm import Swarm, run_virtual

# Of virtual time: three intervals and more.
ATTACK_S = 7.0


def known(s: Swarm) -> Known:
    driver = s.peers["a"].node.driver
    assert driver.history.genesis is not None
    return Known(s.run, s.peers["a"].exchange.space.num_blocks, driver.head, driver.history.genesis)


async def attack_all(attack: Attack, s: Swarm, liar: Liar) -> None:
    """Send the frames of an attack to every victim; what is refused comes again, as from another identity."""
    until_s = trio.current_time() + attack.takes_s
    while trio.current_time() < until_s:
        # What is known gets old: once a second.
        frames, end_s = attack.frames(liar, known(s)), trio.current_time() + 1
        if attack.takes_over:
            take_over(liar, known(s))
        while trio.current_time() < end_s:
            frame = next(frames)
            for name in NAMES:
                await liar.tell(name, *frame)
            await trio.sleep(attack.every_s)
        forgive(s, liar)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("as_member", [False, True], ids=["stranger", "member"])
def test_honest_peers_train_on(attack: Attack, as_member: bool) -> None:
    sizes = undisturbed()

    async def main() -> None:
        async with attacked(as_member=as_member) as (s, liar, _):
            lineage = s.peers["a"].node.driver.head.lineage
            await attack_all(attack, s, liar)
            assert liar.sent > 10
            assert {s.peers[name].node.driver.head.lineage for name in NAMES} == {lineage}
            check_sizes(s, sizes)

    run_virtual(main)


def test_a_liar_that_answers_with_the_same_page_of_history_is_soon_asked_no_more() -> None:
    """Once each victim asked it for a thousand pages."""

    async def main() -> None:
        async with attacked(as_member=False) as (s, liar, _):
            take_over(liar, known(s))
            serve, asked = liar.serve, 0

            def counted(request: Request) -> tuple[Answer, bytes] | None:
                nonlocal asked
                asked += request.what == "history"
                return serve(request)

            liar.serve = counted
            frames = ATTACKS["Beat of 10^15 tokens, and a state of its own"].frames(liar, known(s))
            for _ in range(int(ATTACK_S / STEP_S)):
                for name in NAMES:
                    await liar.tell(name, *next(frames))
                await trio.sleep(STEP_S)
            assert 0 < asked <= 2 * len(NAMES)

    run_virtual(main)


@pytest.mark.parametrize("weight", [1e5, 0.9 * MAX_GRADIENT], ids=str)
def test_a_contribution_of_another_scale_destroys_nothing(weight: float) -> None:
    """Well formed: a member whose weights are all one large number, up to the largest that can be contributed."""

    sizes = undisturbed()

    async def main() -> None:
        async with attacked(as_member=True) as (s, _, _):
            x, began = s.peers["x"], trio.current_time()
            while trio.current_time() < began + ATTACK_S:
                for tensor in x.tensors:
                    tensor.fill_(weight)
                await trio.sleep(STEP_S)
            check_sizes(s, sizes)
            reasons = [r["reason"] for r in x.rounds("committed") if r["t"] > began]
            assert reasons  # x has sent it, and the guard left it out
            assert all(reason.startswith("its outer gradient was left out: its norm") for reason in reasons)

    run_virtual(main)
