"""One setting: a field of a dataclass, with its rule, its help and the reason for its default beside it.

    fan_out: int = setting(1, count(1), help="Number of peers that get each fragment.", why="…")

Checks, flag, environment variable, TOML key, shell completion and docs/use/configuration.md follow from the field.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from p2ptrain.errors import ConfigError
from p2ptrain.settings.run_key import without_secrets

ENV_PREFIX = "P2PTRAIN_"
# Messages show this much of a refused value. Allowed values are shorter, except paths and lists.
MAX_SHOWN_CHARS = 200

# Text of a default that follows from the run's model (`model_defaults`).
FROM_MODEL = "from the model"

Value = str | int | float | tuple[str, ...] | None


@dataclass(frozen=True)
class Rule:
    """A check of a value, and its text for messages.

    `choices`: the allowed texts, if they are few; `example`: a valid number, where the usual example is not one;
    `is_int_allowed`: whether TOML may give a number although the setting is a text.
    """

    text: str
    fits: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    example: float | None = None
    is_int_allowed: bool = False


def count(least: int, note: str = "") -> Rule:
    # On the wire it is a signed 64-bit integer.
    text = f"a whole number, {least} or more {note}".rstrip()
    return Rule(text, lambda value: type(value) is int and least <= value < 2**63)


def number(text: str, fits: Callable[[float], bool], example: float | None = None) -> Rule:
    return Rule(text, lambda value: is_finite_number(value) and fits(value), example=example)


def text(rule: str, fits: Callable[[str], bool]) -> Rule:
    return Rule(rule, lambda value: isinstance(value, str) and fits(value))


def choice(*choices: str) -> Rule:
    return Rule("one of " + ", ".join(choices), choices.__contains__, choices)


POSITIVE = number("a finite number above 0", lambda x: x > 0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as `settings_of` reads it from its field.

    Attributes:
        field_name: name of its field.
        name: the TOML key; flag and variable follow from it.
        kind: `str`, `int`, `float`, or `tuple` for a list.
        default: default on the command line; the field's own default is that of the Python API.
        default_text: how help and reference show the default.
        rule: what a value must be; None for any.
        help: one line for `--help`; starts with a noun or a verb.
        why: reason for the default.
        metavar: placeholder of the value in the help.
        names: known values, for shell completion.
    """

    field_name: str
    name: str
    kind: type
    default: Value
    default_text: str
    rule: Rule | None
    help: str
    why: str
    metavar: str
    names: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def help_with_default(self) -> str:
        return f"{self.help} [default: {self.default_text}]" if self.default_text else self.help

    def parse(self, given: object, origin: str) -> Value:
        """Convert the value of a flag, variable or TOML key, and check its rule. Raises ConfigError naming `origin`."""
        if type(given) is int and self.rule is not None and self.rule.is_int_allowed:
            given = str(given) if 0 <= given < 10**6 else given
        value = _convert(given, self.kind, origin, self.rule.example if self.rule else None)
        if isinstance(value, str) and value.startswith("~/"):  # a shell expands it only at the beginning of a word
            value = os.path.expanduser(value)
        if value == "":
            raise ConfigError(f"{origin}: is empty; give a value, or leave it out")
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, str) and "\0" in item for item in texts):
            raise ConfigError(f"{origin}: {shortened(value)} contains a null character; remove it")
        if self.rule is not None and not self.rule.fits(value):
            raise ConfigError(f"{origin}: {shortened(value)} must be {self.rule.text}")
        return value


def setting(
    default: Value | tuple[object, ...],
    rule: Rule | None = None,
    *,
    help: str,
    why: str = "",
    name: str = "",
    metavar: str = "",
    names: tuple[str, ...] = (),
    default_text: str = "",
    cli_default: Value = None,
) -> Any:
    """The field of a setting; see `Setting`. A field whose default is None may always be None."""
    metadata = {
        "rule": rule, "help": help, "why": why, "name": name, "metavar": metavar, "names": names,
        "default_text": default_text, "default": default if cli_default is None else cli_default,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(owner: type) -> Iterator[Setting]:
    """The settings among the fields of a dataclass, in order."""
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if not field.metadata:
            continue
        given, hint = dict(field.metadata), hints[field.name]
        if isinstance(hint, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        kind = typing.get_origin(hint) or hint
        choices = given["rule"].choices if given["rule"] else ()
        given["name"] = given["name"] or field.name
        given["metavar"] = given["metavar"] or "|".join(choices) or {int: "N", float: "X"}.get(kind, "NAME")
        given["names"] = given["names"] or choices
        given["default_text"] = given["default_text"] or value_text(given["default"])
        yield Setting(field_name=field.name, kind=kind, **given)


def value_text(value: object) -> str:
    """A value in one line; an empty text for None."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def shortened(value: object) -> str:
    """The `repr` of a refused value without keys and tickets, cut to `MAX_SHOWN_CHARS`."""
    try:
        shown = without_secrets(repr(value))
    except ValueError:  # Python converts at most 4,300 digits
        return f"<{type(value).__name__} with too many digits to show>"
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"


def is_finite_number(value: object) -> bool:
    """Whether it is an int or a float that a float can hold, and not infinite or nan."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(cast(float, value)) <= sys.float_info.max


def as_float(number: float) -> float:
    """Convert an int to a float. One beyond the largest float stays an int; every rule of `number` refuses it."""
    return float(number) if is_finite_number(number) else number


def check(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError with the value and the rule."""
    if not ok:
        raise ConfigError(f"{name} = {shortened(value)}: must be {rule}")


def check_settings(config: Any) -> None:
    """Check the rule of every setting of a dataclass. Raises ConfigError with the value and the rule."""
    for field in dataclasses.fields(config):
        value, rule = getattr(config, field.name), field.metadata.get("rule")
        if rule is not None and not (value is None and field.default is None):
            check(rule.fits(value), field.name, value, rule.text)


def _convert(given: object, kind: type, origin: str, example: float | None) -> Value:
    """Convert to the setting's type, without checking its rule. Flags and variables give text."""
    if kind is tuple:
        # Flags are tuples. One text may hold several items, between blanks or commas; a file's name may contain these.
        if isinstance(given, (str, tuple)):
            items = (given,) if isinstance(given, str) else given
            parts = ([item] if os.path.exists(item) else item.replace(",", " ").split() for item in items)
            return tuple(itertools.chain.from_iterable(parts)) or ""
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            return tuple(given)
        raise ConfigError(f'{origin}: {shortened(given)} is not a list of texts, such as ["a", "b"]')
    if kind is float and type(given) is int:
        return as_float(given)
    if type(given) is kind:
        return cast(Value, given)
    if kind in (int, float) and isinstance(given, str):
        try:
            return cast(Value, kind(given))
        except ValueError:
            pass
    wanted = {
        int: f"whole number, such as {example or 200}",
        float: f"number, such as {example or 0.003:g}",
        str: "text in quotes",
    }[kind]
    raise ConfigError(f"{origin}: {shortened(given)} is not a {wanted}")
