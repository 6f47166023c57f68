"""What a fault barrier keeps in, what it lets out, and what it logs."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from p2ptrain.protocol.fault_barrier import FaultBarrier

LOGGER = logging.getLogger("p2ptrain.tests")


def test_each_type_of_exception_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    barrier = FaultBarrier("counting", LOGGER)
    for error in (ValueError("one"), ValueError("two"), KeyError("three"), ExceptionGroup("", [ValueError("four")])):
        with barrier:
            raise error
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["counting failed; it is tried again"] * 2
    assert caplog.text.count("Traceback") == 2
    for text in ("ValueError: one", "KeyError: 'three'", "ValueError('two')", "ValueError('four')"):
        assert text in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind), FaultBarrier("counting", LOGGER):
        raise kind


def test_cancellation_passes() -> None:
    async def main() -> None:
        with trio.move_on_after(1) as scope, FaultBarrier("waiting", LOGGER):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
        assert scope.cancelled_caught

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
