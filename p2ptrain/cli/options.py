"""Click options made from the settings, so that help, environment and TOML always agree."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from p2ptrain.cli.completion import completer
from p2ptrain.settings.setting import Setting
from p2ptrain.settings.table import SETTINGS, merge

EVERY_WAY = (
    "Each setting can also come from an environment variable (P2PTRAIN_SYNC_EVERY=200) or from the TOML file given "
    "with -c (sync_every = 200). A flag overrides a variable, a variable the file, and the file --preset."
)


class SettingsCommand(click.Command):
    """A command whose help shows its settings in sections."""

    sections: Mapping[str, Sequence[Setting]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        section_of = {s.name: title for title, settings in self.sections.items() for s in settings}
        titles: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                titles.setdefault(section_of.get(parameter.name or "", "Options"), []).append(record)
        for title, records in titles.items():
            with formatter.section(title):
                formatter.write_dl(records)


def takes_settings(sections: Mapping[str, Sequence[Setting]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command's function: adds `-c` and one option per setting, and calls it with `settings`.

    Args:
        sections: settings by the title of their section in the help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = [setting.name for settings in sections.values() for setting in settings]

        @functools.wraps(function)
        def command(config_file: str | None, **given: Any) -> None:
            flags = {name: given.pop(name) for name in names}
            function(merge(flags, os.environ, config_file), **given)

        decorated: Callable[..., None] = command
        for name in reversed(names):
            decorated = _option(SETTINGS[name])(decorated)
        return click.option(
            "-c",
            "--config",
            "config_file",
            metavar="FILE",
            help="TOML file with settings; or set P2PTRAIN_CONFIG.",
            shell_complete=lambda context, parameter, incomplete: [CompletionItem(incomplete, type="file")],
        )(decorated)

    return decorate


def settings_command(sections: Mapping[str, Sequence[Setting]]) -> type[SettingsCommand]:
    """Return the command class with these sections, for `click.command(cls=…)`."""
    return type("SettingsCommand", (SettingsCommand,), {"sections": sections})


def _option(setting: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    # Values stay text here: `merge` converts and checks the values of all sources.
    return click.option(
        setting.flag,
        setting.name,
        metavar=setting.metavar,
        multiple=setting.kind is tuple,
        help=setting.help_with_default,
        shell_complete=completer(setting),
    )
