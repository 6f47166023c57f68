"""Checks of settings. Each `check` function raises ConfigError with the value and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable

from p2ptrain.errors import ConfigError


def check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")


def check_count(name: str, value: int, least: int, note: str = "") -> None:
    # On the wire it is a signed 64-bit integer.
    ok = type(value) is int and least <= value < 2**63
    check(ok, name, value, f"a whole number, {least} or more {note}".rstrip())


def check_number(name: str, value: float, fits: Callable[[float], bool], rule: str) -> None:
    check(isinstance(value, (int, float)) and math.isfinite(value) and fits(value), name, value, rule)


def check_positive(name: str, value: float) -> None:
    check_number(name, value, lambda x: x > 0, "a finite number above 0")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    check(value in choices, name, value, "one of " + ", ".join(choice or "''" for choice in choices))
