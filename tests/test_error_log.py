"""Contained exceptions are logged once each."""

from __future__ import annotations

import logging

import pytest

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
