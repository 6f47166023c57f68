"""docs/configuration.md, made from the table of settings and from the comments that stand above the defaults.

Every default in `config.py` and `peer_config.py` has its reason in the comment above it; fields that follow share it,
up to the next comment. The page is printed by `p2ptrain config reference`, and a test compares it with the one in
`docs/`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence

from p2ptrain.settings.presets import PRESETS
from p2ptrain.settings.table import (
    CONFIG_VARIABLE,
    NETWORK_SETTINGS,
    PAGE_SETTINGS,
    RUN_SETTINGS,
    TRAINING_SETTINGS,
    Owner,
    Setting,
    Value,
)

INTRODUCTION = f"""\
# Configuration

<!-- Made by `p2ptrain config reference > docs/configuration.md`. Edit p2ptrain/settings/. -->

Each setting can be given in four ways. The first that is there counts:

1. its flag, `--sync-every 500`;
2. its variable, `P2PTRAIN_SYNC_EVERY=500`;
3. its key in the TOML file of `-c FILE` (or of the variable `{CONFIG_VARIABLE}`), `sync_every = 500`;
4. the preset that was chosen ([below](#presets)), for a run that is founded here.

Else it has the default. Unknown flags, variables and keys are refused, with the name that was probably meant. Several
addresses are one flag each, a list in TOML, and separated by blanks or commas in a variable. `p2ptrain config show`
prints every setting and where it came from; it takes the options of `p2ptrain join`.

What belongs to [the run](#the-run) is the same on every peer: the founder decides, joiners take it over, and a joiner
that gives another value is refused by name. What belongs to [the network](#the-network) and to
[this machine](#this-machine) is each peer's own. [The page](#the-page) is that of
`p2ptrain dashboard`.
"""
SECTIONS: Sequence[tuple[str, Sequence[Setting]]] = (
    ("The run", RUN_SETTINGS),
    ("The network", NETWORK_SETTINGS),
    ("This machine", TRAINING_SETTINGS),
    ("The page", PAGE_SETTINGS),
)


def reference() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION]
    for title, settings in SECTIONS:
        parts.append(f"\n## {title}\n")
        parts += [_entry(setting) for setting in settings]
    return "".join([*parts, *_presets()])


def reasons(owner: Owner) -> dict[str, str]:
    """Why each field of a dataclass has its default: the comment above it, or above the fields that it follows."""
    source = textwrap.dedent(inspect.getsource(owner))
    lines = source.splitlines()
    (declared,) = ast.parse(source).body
    assert isinstance(declared, ast.ClassDef)
    found: dict[str, str] = {}
    reason = ""
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = list(_comment_above(lines, node.lineno))
            reason = " ".join(reversed(above)) or reason
            found[node.target.id] = reason
    return found


def _comment_above(lines: Sequence[str], lineno: int) -> Iterator[str]:
    """The lines of the comment that ends above line `lineno`, the last first."""
    for line in reversed(lines[: lineno - 1]):
        text, mark, words = line.partition("# ")
        if text.strip() or not mark:
            return
        yield words


def _entry(setting: Setting) -> str:
    reason = reasons(setting.owner)[setting.field_name]
    flag = f"{setting.flag} {setting.metavar}"
    text, _, told = setting.help.rstrip("]").partition(" [default: ")
    return (
        f"\n### {setting.name}\n\n{text}\n\n"
        f"`{flag}` · `{setting.variable}` · `{setting.name}` in TOML\n\n"
        f"Default: {told or _shown(setting.default)}. {reason}\n"
    )


def _shown(default: Value) -> str:
    if default in (None, ()):
        return "none"
    return f"`{' '.join(default) if isinstance(default, tuple) else default}`"


def _presets() -> Iterator[str]:
    yield "\n## Presets\n\n`--preset NAME` puts these between the defaults and what you give yourself.\n\n"
    names = [setting.name for setting in RUN_SETTINGS if any(setting.name in preset for preset in PRESETS.values())]
    yield f"| setting | {' | '.join(PRESETS)} |\n|---|{'---|' * len(PRESETS)}\n"
    for name in names:
        values = (f"`{preset[name]}`" if name in preset else "" for preset in PRESETS.values())
        yield f"| [{name}](#{name}) | {' | '.join(values)} |\n"
