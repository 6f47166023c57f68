"""Contained exceptions are logged once each."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from p2ptrain.error_log import MAX_REMEMBERED, ErrorLog, innermost


def raised(kind: type[Exception]) -> Exception:
    try:
        raise kind("a bug")
    except kind as error:
        return error


def test_a_bug_is_logged_once_with_its_traceback_and_another_one_too(caplog: pytest.LogCaptureFixture) -> None:
    log = ErrorLog(logging.getLogger("p2ptrain.test"))
    for _ in range(3):
        log.note("adding up", raised(KeyError))
    log.note("adding up", ExceptionGroup("of a nursery", [raised(KeyError)]))
    assert [record.levelno for record in caplog.records if record.levelno >= logging.ERROR] == [logging.ERROR]
    assert "raise kind" in caplog.text
    assert "adding up: KeyError('a bug')" in caplog.text
    log.note("adding up", raised(OSError))
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2


def test_what_it_remembers_is_bounded() -> None:
    log = ErrorLog(logging.getLogger("p2ptrain.test"))
    for number in range(3 * MAX_REMEMBERED):
        log.note("never raised", ValueError(str(number)))
    assert len(log._seen) <= MAX_REMEMBERED


def test_the_innermost_of_nested_groups() -> None:
    error = ValueError()
    assert innermost(ExceptionGroup("", [ExceptionGroup("", [error]), KeyError()])) is error
    assert innermost(error) is error


def test_a_block_that_fails_is_noted_and_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "p2ptrain.test")
    log = ErrorLog(logging.getLogger("p2ptrain.test"))
    for error in (ValueError("one"), ValueError("two"), KeyError("three")):
        with log.containing("counting"):
            raise error
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == caplog.text.count("Traceback") == 2
    assert all(record.getMessage().startswith("counting failed; it is tried again: ") for record in errors)
    assert "ValueError('two')" in caplog.text
    with log.containing("guessing", "it is skipped"):
        raise ValueError
    assert "guessing failed; it is skipped: ValueError()" in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind), ErrorLog(logging.getLogger("p2ptrain.test")).containing("counting"):
        raise kind


def test_cancellation_passes() -> None:
    async def main() -> None:
        block = ErrorLog(logging.getLogger("p2ptrain.test")).containing("waiting")
        with trio.move_on_after(1) as scope, block:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
        assert scope.cancelled_caught

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
