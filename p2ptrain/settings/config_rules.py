"""The rules that settings are checked by. Each function raises ConfigError with the value and the rule it broke."""

from __future__ import annotations

import math

from p2ptrain.errors import ConfigError


def is_finite(value: float) -> bool:
    """Whether a value is a number, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def check(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError with the value and its rule unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")


def check_count(name: str, value: int, least: int, note: str = "") -> None:
    # The upper bound is that of a signed 64-bit integer on the wire.
    ok = type(value) is int and least <= value < 2**63
    check(ok, name, value, f"a whole number, {least} or more {note}".rstrip())


def check_positive(name: str, value: float) -> None:
    check(is_finite(value) and value > 0, name, value, "a finite number above 0")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    check(value in choices, name, value, "one of " + ", ".join(choice or "''" for choice in choices))
