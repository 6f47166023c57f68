"""Click options made from settings, so that help, environment and TOML always agree."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection
from typing import Any

import click
from click.shell_completion import CompletionItem

from p2ptrain.settings.run_key import looks_like_key, without_secrets
from p2ptrain.settings.setting import Setting, settings_of
from p2ptrain.settings.table import SECTIONS, SETTINGS, merge
from p2ptrain.settings.ticket import looks_like_ticket

EVERY_WAY = (
    "Each setting can also come from an environment variable (P2PTRAIN_RUN_ID=novels) or from the TOML file given "
    'with -c (run_id = "novels"). Earlier ones win: flag, variable, file,{preset} default.'
)
IN_PROCESS_LIST = (
    "warning: the ticket holds the run key, and other users of this machine can see it in the list of processes; put "
    "it into a file that only you can read (chmod 600), and give the file instead"
)
# Key in a click context's `meta`: whether all options are shown.
HELP_ALL = "p2ptrain.help_all"
TICKET_HELP = "Ticket that `p2ptrain join` printed, a file that holds one, or an initial peer."
# A refused word may be a part of a ticket, so messages show only its first characters.
MAX_SHOWN_CHARS = 12
# Settings of the commands that ask the peers of a run without joining it.
OBSERVING = ("run_id", "initial_peers", "run_key", "identity", "host_maddrs", "startup_timeout_s")
# What nanoGPT's and transformers' trainers call these settings; the nearest spelling would be an unrelated one.
OTHER_NAMES = {
    "batch_size": "batch_tokens", "block_size": "context", "dataset": "data", "eval_interval": "eval_every",
    "eval_iters": "eval_tokens", "gradient_accumulation_steps": "micro_batch", "learning_rate": "lr",
    "lr_scheduler_type": "schedule", "max_iters": "steps", "max_steps": "steps", "optim": "inner_optimizer",
    "optimizer": "inner_optimizer", "out_dir": "out", "output_dir": "out",
    "per_device_train_batch_size": "micro_batch", "wandb_log": "log", "warmup_iters": "warmup_steps",
}  # fmt: skip


class NumberRange(click.FloatRange):
    """A range that refuses nan, which click takes for a number of any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class SettingsCommand(click.Command):
    """A command whose help shows its settings in sections, and whose errors show no part of a ticket or a key.

    Attributes:
        rare: the options that only `--help-all` shows; empty if the command has no `--help-all`.
    """

    rare: frozenset[str] = frozenset()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = OTHER_NAMES.get(error.option_name.lstrip("-").replace("-", "_"), "")
            is_ours = name in {parameter.name for parameter in self.params}
            suggested = SETTINGS[name].flag if is_ours else next(iter(error.possibilities or ()), None)
            if suggested is None:
                raise
            message = f"No such option {error.option_name!r}. Did you mean {suggested!r}?"
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None
        except click.UsageError:
            if all(without_secrets(word) == word for word in given):
                raise
            # A messenger has broken a ticket into parts, and click takes them for other arguments.
            raise click.UsageError(
                "write the ticket as one word, without spaces and line breaks, and nothing beside it but options", ctx
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        section_of = {setting.name: title for title, settings in SECTIONS.items() for setting in settings}
        titles: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            # Not every version of click takes help for an argument.
            record = ("[TICKET]", TICKET_HELP) if parameter.name == "ticket" else parameter.get_help_record(ctx)
            if record is not None and (parameter.name not in self.rare or ctx.meta.get(HELP_ALL)):
                titles.setdefault(section_of.get(parameter.name or "", "Options"), []).append(record)
        for title, records in titles.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.rare and not ctx.meta.get(HELP_ALL):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{len(self.rare)} more options: p2ptrain {ctx.info_name} --help-all")
        super().format_epilog(ctx, formatter)


def _check_ticket(context: click.Context, parameter: click.Parameter, word: str | None) -> str | None:
    """The word, if it can be a ticket, an address or a file. Raises UsageError if not."""
    # A Path would raise if the word is too long for a name.
    is_place = word is not None and (bool(set(word) & set("/.")) or os.path.isfile(word))
    if word is None or is_place or looks_like_ticket(word) or looks_like_key(word):
        return word
    shown = word if len(word) <= MAX_SHOWN_CHARS else word[:MAX_SHOWN_CHARS] + "…"
    raise click.UsageError(f"{shown!r} is not a ticket, an address or a file", context)


def _show_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[HELP_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def takes(owner: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each setting of the dataclass `owner`. Values are checked; lists stay text."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for setting in reversed(list(settings_of(owner))):
            name, text, parse = setting.field_name, setting.help_with_default, functools.partial(_parse, setting)
            command = click.option(setting.flag, name, metavar=setting.metavar, help=text, callback=parse)(command)
        return command

    return decorate


def _parse(setting: Setting, context: click.Context, parameter: click.Parameter, given: Any) -> Any:
    return given if given is None or setting.kind is tuple else setting.parse(given, setting.flag)


def settings_command(
    *names: str, common: Collection[str] = (), kind: type[SettingsCommand] = SettingsCommand
) -> Callable[[Callable[..., None]], SettingsCommand]:
    """Make a command with `-c` and an option for each named setting, which calls its function with `settings`.

    Args:
        common: the settings that `--help` shows if `--help-all` is to show all; empty: `--help` shows all.
    """

    def decorate(function: Callable[..., None]) -> SettingsCommand:
        @functools.wraps(function)
        def command(config_file: str | None, ticket: str | None = None, **given: Any) -> None:
            flags = {name: given.pop(name) for name in names}
            if ticket is not None:
                flags["initial_peers"] = (ticket, *flags["initial_peers"])
            settings = merge(flags, os.environ, config_file)
            has_key = settings.ticket is not None and settings.ticket.key is not None
            if has_key and any(map(looks_like_ticket, flags["initial_peers"])):
                click.echo(IN_PROCESS_LIST, err=True)
            function(settings, **given)

        rare = frozenset(names).difference(common) if common else frozenset()
        name, text = ["-c", "--config", "config_file"], "TOML file with settings; or set P2PTRAIN_CONFIG."
        config = click.Option(name, metavar="FILE", help=text, shell_complete=complete_files)
        # Values stay text here: `merge` converts and checks the values of all sources.
        params: list[click.Parameter] = [config, *(_option(SETTINGS[name]) for name in names)]
        if rare:
            name, text = ["--help-all"], "Show all options and exit."
            params.insert(
                0, click.Option(name, is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=text)
            )
        if "initial_peers" in names:
            params.append(click.Argument(["ticket"], required=False, metavar="[TICKET]", callback=_check_ticket))
        epilog = EVERY_WAY.format(preset=" preset," if "preset" in names else "")
        made = click.command(cls=kind, epilog=epilog, params=params)(command)
        made.rare = rare
        return made

    return decorate


def _option(setting: Setting) -> click.Option:
    return click.Option(
        [setting.flag, setting.name],
        metavar=setting.metavar,
        multiple=setting.kind is tuple,
        help=setting.help_with_default,
        shell_complete=functools.partial(_complete, setting),
    )


def _complete(
    setting: Setting, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a setting's value: its known names, else files or directories. bash cannot show both."""
    words = setting.metavar.split("|")
    if found := [CompletionItem(name) for name in setting.names if name.startswith(incomplete)]:
        return found
    if "FILE" in words:
        return complete_files(context, parameter, incomplete)
    return [CompletionItem(incomplete, type="dir")] if "DIR" in words else []


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]
